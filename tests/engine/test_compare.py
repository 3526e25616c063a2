"""Regions side by side: every difference found, counted and measured."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from streamshard.engine.numeric.cast import cast_between
from streamshard.engine.run.source_reader import SourceReader
from streamshard.engine.run.work import Region
from streamshard.engine.scan.distance import BLOCK_NUMEL, COUNTS, SUMS, Measured, Measurer
from streamshard.engine.scan.region_pair import Comparator, Mismatch, RegionPair
from streamshard.io.entries import identify
from streamshard.model import Copies
from streamshard.operations.diff.diff_report import Totals
from tests.engine.fakes import FakeReader, copies_of

DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "float64", 16: "complex128"}


def compare(pair: RegionPair, left: bytes, right: bytes, window: int) -> list[Mismatch]:
    told: list[int] = []
    comparator = Comparator(
        FakeReader([left]),
        FakeReader([right]),
        window_bytes=window,
        scratch_bytes=64,
        progress=told.append,
    )
    found = comparator.compare(pair)
    comparator.close()
    assert sum(told) == 2 * pair.right.content_bytes
    return found


def plain(data: bytes, itemsize: int) -> Region:
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
    comparison = RegionPair(
        plain(left, itemsize), plain(bytes(right), itemsize), numels, DTYPES[itemsize]
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
    comparison = RegionPair(region, region, [6], dtype)
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
    comparison = RegionPair(left, plain(target, 2), [5], "bfloat16", any_nan=any_nan)
    found = compare(comparison, source, target, 64)
    # Infinity is not a NaN, and 3.0 is not 3.015625.
    assert found == [Mismatch(0, 2, 2) if any_nan else Mismatch(0, 1, 3)]


# Distances, against plain NumPy in float64 on whole arrays ---------------------------------------


Array = NDArray[Any]
KINDS = ("float64", "float32", "float16", "bfloat16", "int64", "uint8", "bool")
PARTS = (3, BLOCK_NUMEL, 0, 2 * BLOCK_NUMEL + 777, 1)
"""Elements of tensors that share a window: less than a block, just one, none, several."""


def values(dtype: str, seed: int, numel: int) -> Array:
    """Make up elements; of bfloat16 their bits."""
    random = np.random.default_rng(seed)
    if dtype == "bool":
        return random.integers(0, 2, numel).astype(bool)
    if dtype in ("int64", "uint8"):
        return random.integers(0, 200, numel).astype(dtype)
    made = random.normal(0, 3, numel)
    if dtype == "bfloat16":
        return (made.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return made.astype(dtype)


def numbers(array: Array, dtype: str) -> NDArray[np.float64]:
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def measured(
    place: Path, left: Array, right: Array, dtype: str, *, window_bytes: int = 1 << 18
) -> list[Measured]:
    """Measure two arrays that lie in files, as if they were tensors of `PARTS`."""
    readers = []
    for name, array in (("left", left), ("right", right)):
        path = place / name
        path.write_bytes(array.tobytes())
        readers.append(SourceReader([identify(path)]))
    zero = np.zeros(1, dtype=np.int64)
    region = Region(
        content_bytes=left.nbytes,
        copies=Copies(zero, zero, zero, np.array([left.nbytes])),
        source_itemsize=left.itemsize,
        target_itemsize=left.itemsize,
    )
    seen: list[int] = []
    tools = Measurer(
        readers[0], readers[1], window_bytes=window_bytes, scratch_bytes=0, progress=seen.append
    )
    try:
        found = tools.measure(RegionPair(region, region, PARTS, dtype))
    finally:
        tools.close()
    assert sum(seen) == 2 * left.nbytes
    return found


def total(found: Measured, numel: int) -> Totals:
    totals = Totals(numel)
    totals.add(found)
    return totals


def split(array: Array) -> Sequence[Array]:
    return np.split(array, np.cumsum(PARTS)[:-1])


def spoil(array: Array, dtype: str, seed: int) -> None:
    """Put in what is not finite, and zeros of both signs."""
    random = np.random.default_rng(seed)
    places = random.integers(0, len(array), 40)
    odd = [np.nan, np.inf, -np.inf, 0.0, -0.0]
    if dtype == "bfloat16":
        array[places] = [0x7FC1, 0x7F80, 0xFF80, 0x0000, 0x8000] * 8
    else:
        array[places] = odd * 8
    if dtype == "float32":  # a signalling NaN, which NumPy warns of when it is cast
        array.view(np.uint32)[places[:3]] = 0x7F800001


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from(KINDS),
    seed=st.integers(0, 1000),
    changed=st.sampled_from([0, 1, 500, 1 << 20]),
    odd=st.booleans(),
)
def test_the_statistics_are_numpys(
    tmp_path: Path, dtype: str, seed: int, changed: int, odd: bool
) -> None:
    left = values(dtype, seed, sum(PARTS))
    right = left.copy()
    places = np.random.default_rng(seed + 1).integers(0, len(left), changed)
    right[places] = values(dtype, seed + 2, len(left))[places]
    if odd and dtype.endswith(("float16", "float32", "float64")):
        spoil(left, dtype, seed + 3)
        spoil(right, dtype, seed + 4)
    found = measured(tmp_path, left, right, dtype)
    for part, one, other in zip(found, split(left), split(right), strict=True):
        distance = total(part, len(one)).distance(are_numbers=True)
        bits = [array.view(f"u{array.itemsize}") for array in (one, other)]
        assert distance.changed == np.count_nonzero(bits[0] != bits[1])
        with np.errstate(invalid="ignore"):
            a, b = numbers(one, dtype), numbers(other, dtype)
        assert distance.nan == (np.isnan(a).sum(), np.isnan(b).sum())
        assert distance.inf == (np.isinf(a).sum(), np.isinf(b).sum())
        finite = np.isfinite(a) & np.isfinite(b)
        a, b = a[finite], b[finite]
        if not len(a):
            assert (distance.max_abs, distance.cosine) == (None, None)
            continue
        assert distance.max_abs == np.abs(b - a).max()
        assert distance.mean_abs == pytest.approx(np.abs(b - a).mean(), rel=1e-12, abs=0)
        norms = np.linalg.norm(a), np.linalg.norm(b), np.linalg.norm(b - a)
        if norms[0]:
            assert distance.relative_l2 == pytest.approx(norms[2] / norms[0], rel=1e-12, abs=0)
        else:
            assert distance.relative_l2 == (None if norms[2] else 0.0)
        if norms[0] and norms[1]:
            cosine = float(a @ b) / (norms[0] * norms[1])
            assert distance.cosine == pytest.approx(cosine, rel=0, abs=1e-12)
            assert distance.cosine is not None
            assert -1 <= distance.cosine <= 1
        else:
            assert distance.cosine is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_windows_change_nothing(tmp_path: Path, dtype: str) -> None:
    left, right = values(dtype, 1, sum(PARTS)), values(dtype, 2, sum(PARTS))
    first, *rest = (
        measured(tmp_path, left, right, dtype, window_bytes=size)
        for size in (1 << 18, (1 << 18) + 1000, 1 << 20)
    )
    for other in rest:
        for one, two in zip(first, other, strict=True):
            assert one.sums.tobytes() == two.sums.tobytes()
            assert (one.counts == two.counts).all()
            assert one.largest == two.largest
    assert [len(part.sums) for part in first] == [1, 1, 0, 3, 1]


def test_what_are_no_numbers_is_counted_only(tmp_path: Path) -> None:
    left = np.arange(sum(PARTS), dtype=np.complex128)
    right = left.copy()
    right[5] += 1j
    found = measured(tmp_path, left, right, "complex128")
    assert [part.counts[0] for part in found] == [0, 1, 0, 0, 0]
    assert all(len(part.sums) == 0 for part in found)


def test_sums_do_not_depend_on_how_parts_are_cut() -> None:
    rows = np.random.default_rng(0).normal(0, 1, (1000, len(SUMS))) * 10.0 ** np.arange(-2, 3)
    none = np.zeros(len(COUNTS), dtype=np.int64)
    sums = []
    for cuts in ([], [1, 2, 500], list(range(1, 1000))):
        totals = Totals()
        for piece in np.split(rows, cuts):
            totals.add(Measured(none, piece, 0.0, 0.0))
        sums.append(totals.sums.tobytes())
    assert len(set(sums)) == 1


def test_numbers_that_float64_cannot_hold_are_left_out(tmp_path: Path) -> None:
    left, right = np.full(sum(PARTS), 1e200), np.full(sum(PARTS), -1e200)
    distance = total(measured(tmp_path, left, right, "float64")[0], 3).distance(are_numbers=True)
    assert (distance.max_abs, distance.relative_l2, distance.cosine) == (2e200, None, None)
