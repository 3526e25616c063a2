"""Compares two regions bit by bit, through a buffer for each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from streamshard.engine.cast import find_nans
from streamshard.engine.files import SourceReader
from streamshard.engine.region import RegionFiller
from streamshard.engine.work import Region

Ints = NDArray[np.int64]

_LOOK_NUMEL: Final = 1 << 14
"""Elements that are looked at one by one at a time, where a window is not the same."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two regions whose content should be the same."""

    left: Region
    right: Region
    starts: Ints
    """Elements at which the tensors begin of which the regions hold parts; the first is 0."""
    dtype: str
    """Of the elements of both, after any cast."""
    any_nan: bool = False
    """Whether NaNs may differ in their bits, as those of a cast do from processor to processor."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Elements of one tensor's part that are not the same."""

    part: int
    """Index in the comparison's `starts`."""
    first: int
    """Index of the first in the part."""
    count: int


class Comparator:
    """A worker's readers and buffers."""

    def __init__(
        self,
        left: SourceReader,
        right: SourceReader,
        *,
        window_bytes: int,
        scratch_bytes: int,
        progress: Callable[[int], None],
    ) -> None:
        self._readers = left, right
        self._windows = [memoryview(bytearray(window_bytes)) for _ in self._readers]
        self._scratch = memoryview(bytearray(scratch_bytes))
        self._progress = progress

    def close(self) -> None:
        """Close all files."""
        for reader in self._readers:
            reader.close()

    def compare(self, comparison: Comparison) -> list[Mismatch]:
        """Read both regions, and say which parts differ."""
        regions = comparison.left, comparison.right
        both = zip(regions, self._readers, strict=True)
        left, right = (RegionFiller(region, reader, self._scratch) for region, reader in both)
        itemsize = comparison.right.target_itemsize
        step = len(self._windows[0]) // itemsize * itemsize
        found: dict[int, Mismatch] = {}
        for at in range(0, comparison.right.content_bytes, step):
            count = min(step, comparison.right.content_bytes - at)
            one, other = (window[:count] for window in self._windows)
            left.fill(one)
            right.fill(other)
            self._progress(2 * count)
            if not _same(one, other):
                for elements in _differing(one, other, comparison):
                    _add(found, elements + at // itemsize, comparison.starts)
        return list(found.values())


def _same(left: memoryview, right: memoryview) -> bool:
    word = np.uint64 if len(left) % 8 == 0 else np.uint8
    return not (np.frombuffer(left, dtype=word) != np.frombuffer(right, dtype=word)).any()


def _differing(left: memoryview, right: memoryview, comparison: Comparison) -> Iterator[Ints]:
    """Yield the indices of the elements that differ, a few at a time: they take many bytes each."""
    dtype, itemsize = comparison.dtype, comparison.right.target_itemsize
    step = _LOOK_NUMEL * itemsize
    for at in range(0, len(left), step):
        one, other = left[at : at + step], right[at : at + step]
        rows = [np.frombuffer(v, dtype=np.uint8).reshape(-1, itemsize) for v in (one, other)]
        differ = (rows[0] != rows[1]).any(axis=1)
        if comparison.any_nan:
            differ &= ~(find_nans(one, dtype) & find_nans(other, dtype))
        yield np.flatnonzero(differ) + at // itemsize


def _add(found: dict[int, Mismatch], elements: Ints, starts: Ints) -> None:
    """Count the elements to the parts that they are of."""
    parts = np.searchsorted(starts, elements, side="right") - 1
    which, first, counts = np.unique(parts, return_index=True, return_counts=True)
    for part, index, count in zip(which.tolist(), first.tolist(), counts.tolist(), strict=True):
        before = found.get(part)
        at = before.first if before else int(elements[index] - starts[part])
        found[part] = Mismatch(part, at, count + (before.count if before else 0))
