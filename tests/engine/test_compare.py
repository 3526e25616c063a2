"""Regions side by side: every difference is found where it is, through any window."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamshard.engine.run.work import Region
from streamshard.engine.scan.region_pair import Comparator, Mismatch, RegionPair
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
