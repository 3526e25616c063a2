"""Regions side by side: every difference found and counted, against a loop over elements."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamshard.engine.numeric.cast import cast_between, find_nans
from streamshard.engine.run.work import Region
from streamshard.engine.scan.equality import Comparator, Comparison, Mismatch
from tests.engine.fakes import FakeReader, copies_of

DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "float64", 16: "complex128"}


def compare(comparison: Comparison, left: bytes, right: bytes, window: int) -> list[Mismatch]:
    """Compare what two files hold."""
    told: list[int] = []
    comparator = Comparator(
        FakeReader([left]),
        FakeReader([right]),
        window_bytes=window,
        scratch_bytes=64,
        progress=told.append,
    )
    found = comparator.compare(comparison)
    comparator.close()
    assert sum(told) == 2 * comparison.right.content_bytes
    return found


def plain(data: bytes, itemsize: int) -> Region:
    """Make a region of a whole file."""
    copies = copies_of([(0, 0, 0, len(data))])
    return Region(len(data), copies, source_itemsize=itemsize, target_itemsize=itemsize)


@given(st.data(), st.sampled_from(list(DTYPES)))
def test_every_difference_is_found_where_it_is(data: st.DataObject, itemsize: int) -> None:
    numels = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=6))
    starts = np.cumsum([0, *numels[:-1]])
    numel = sum(numels)
    left = bytes(range(256)) * (numel * itemsize // 256 + 1)
    left = left[: numel * itemsize]
    changed = data.draw(st.sets(st.integers(0, max(0, numel - 1)), max_size=8)) if numel else set()
    right = bytearray(left)
    for element in changed:
        right[element * itemsize + data.draw(st.integers(0, itemsize - 1))] ^= 1
    comparison = Comparison(
        plain(left, itemsize), plain(bytes(right), itemsize), starts, DTYPES[itemsize]
    )
    window = data.draw(st.sampled_from([16, 48, 1 << 12]))
    found = {m.part: (m.first, m.count) for m in compare(comparison, left, bytes(right), window)}
    wanted = {}
    for part, (start, own) in enumerate(zip(starts.tolist(), numels, strict=True)):
        inside = sorted(e - start for e in changed if start <= e < start + own)
        if inside:
            wanted[part] = (inside[0], len(inside))
    assert found == wanted


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_zeros_differ_in_their_sign(dtype: str) -> None:
    left = np.zeros(6, dtype)
    right = left.copy()
    right[[1, 5]] *= -1
    region = plain(left.tobytes(), left.itemsize)
    comparison = Comparison(region, region, np.array([0]), dtype)
    assert compare(comparison, left.tobytes(), right.tobytes(), 64) == [Mismatch(0, 1, 2)]


@pytest.mark.parametrize("any_nan", [False, True])
def test_nans_of_a_cast_may_have_any_bits(any_nan: bool) -> None:
    source = np.array([1.0, np.nan, np.nan, 3.0, np.inf], dtype=np.float32).tobytes()
    target = np.array([0x3F80, 0x7FC1, 0x7F80, 0x4041, 0x7F80], dtype=np.uint16).tobytes()
    left = Region(
        10,
        copies_of([(0, 0, 0, 20)]),
        source_itemsize=4,
        target_itemsize=2,
        cast=cast_between("float32", "bfloat16"),
    )
    comparison = Comparison(left, plain(target, 2), np.array([0]), "bfloat16", any_nan=any_nan)
    found = compare(comparison, source, target, 64)
    # Infinity is not a NaN, and 3.0 is not 3.015625.
    assert found == [Mismatch(0, 2, 2) if any_nan else Mismatch(0, 1, 3)]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_nans_are_found_as_numpy_does(dtype: str) -> None:
    bits = np.random.default_rng(7).integers(0, 256, 4096, dtype=np.uint8)
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0], dtype=dtype)
    data = bits.tobytes() + special.tobytes()
    wanted = np.isnan(np.frombuffer(data, dtype=dtype))
    assert find_nans(memoryview(data), dtype).tolist() == wanted.tolist()
    assert wanted.sum() > 2
    assert not find_nans(memoryview(data), "uint8").any()
