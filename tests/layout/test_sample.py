"""Shares of a whole: of a rotation by weight, of a global batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamshard import sizes
from streamshard.layout.batch import BatchPlan, keep_global_batch
from streamshard.layout.sample import EVERYTHING, Sample


@given(st.lists(st.integers(0, 10**12), max_size=40), st.integers(1, 50))
def test_every_unit_is_in_exactly_one_part(weights: list[int], parts: int) -> None:
    total, at = sum(weights), 0
    for weight in weights:
        own = [p for p in range(1, parts + 1) if Sample(p, parts).holds(at, at + weight, total)]
        assert len(own) == 1
        assert EVERYTHING.holds(at, at + weight, total)
        at += weight


@given(st.integers(1, 20), st.integers(1, 9))
def test_equal_units_are_shared_out_equally(parts: int, each: int) -> None:
    count = parts * each
    for part in range(1, parts + 1):
        held = [Sample(part, parts).holds(i, i + 1, count) for i in range(count)]
        assert sum(held) == each


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1/1", (1, 1)),
        (" 7 / 30 ", (7, 30)),
        ("100%", (None, 1)),
        ("50 %", (None, 2)),
        ("60%", (None, 1)),
        ("0.5%", (None, 200)),
        ("33.4%", (None, 2)),
    ],
)
def test_how_a_part_is_written(text: str, found: tuple[int | None, int]) -> None:
    assert sizes.parse_part(text) == found


@pytest.mark.parametrize(
    "text", ["", "0/3", "4/3", "3/0", "0%", "101%", "5", "-1/2", "a/b", "1/2%"]
)
def test_what_is_no_part(text: str) -> None:
    with pytest.raises(ValueError, match="not a part of a whole"):
        sizes.parse_part(text)


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 20))
def test_the_global_batch_is_kept_with_the_largest_micro_batch(
    total: int, micro_batch: int, world_size: int
) -> None:
    fitting = [
        (micro, accumulation)
        for micro in range(1, micro_batch + 1)
        for accumulation in range(1, total + 1)
        if micro * accumulation * world_size == total
    ]
    found = keep_global_batch(total, micro_batch, world_size)
    assert found == (BatchPlan(total, *max(fitting)) if fitting else None)
