"""Compares two regions bit by bit, through a buffer for each."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from streamshard.engine.numeric.cast import find_nans
from streamshard.engine.run.work import Region
from streamshard.engine.scan.region_pair import PairReader

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


class Comparator(PairReader):
    """Compares what a worker reads."""

    def compare(self, comparison: Comparison) -> list[Mismatch]:
        """Read both regions, and say which parts differ."""
        read = self.begin(comparison.left, comparison.right)
        itemsize = comparison.right.target_itemsize
        step = self.window_bytes // itemsize * itemsize
        found: dict[int, Mismatch] = {}
        for at in range(0, comparison.right.content_bytes, step):
            one, other = read(min(step, comparison.right.content_bytes - at))
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
