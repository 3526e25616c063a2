"""Shares of a global batch."""

from hypothesis import given
from hypothesis import strategies as st

from streamshard.layout.batch import BatchPlan, keep_global_batch


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
