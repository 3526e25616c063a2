"""Reads two regions side by side, with one buffer for each, and compares them bit by bit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from streamshard.engine.jobs.executor import Host
from streamshard.engine.numeric.cast import find_nans
from streamshard.engine.run.region import ReadAhead, RegionFiller
from streamshard.engine.run.source_reader import SourceReader
from streamshard.engine.run.work import Region
from streamshard.model import SourceFile

Next = Callable[[int], tuple[memoryview, memoryview]]
"""Reads the next bytes of both regions, at most a window; the views from before become invalid."""


class PairReader:
    """A worker's readers and buffers for two sources."""

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
        self.window_bytes = window_bytes

    @classmethod
    def of(
        cls,
        sides: Sequence[Sequence[SourceFile]],
        window_bytes: int,
        scratch_bytes: int,
        host: Host,
    ) -> Self:
        left, right = (
            SourceReader(files, workers=host.workers, stop=host.stop, maps=True) for files in sides
        )
        sizes = {"window_bytes": window_bytes, "scratch_bytes": scratch_bytes}
        return cls(left, right, progress=host.progress, **sizes)

    def settle(self) -> None:
        for reader in self._readers:
            reader.settle()

    def close(self) -> None:
        for reader in self._readers:
            reader.close()

    def begin(self, left: Region, right: Region) -> Next:
        sides = zip((left, right), self._readers, strict=True)
        fillers = [
            RegionFiller(
                region, reader, self._scratch, ReadAhead([region.copies], reader, readers=2)
            )
            for region, reader in sides
        ]

        def read(nbytes: int) -> tuple[memoryview, memoryview]:
            left, right = (
                filler.view(nbytes, partial(_front, window))[0]
                for filler, window in zip(fillers, self._windows, strict=True)
            )
            self._progress(2 * nbytes)
            return left, right

        return read


def _front(window: memoryview, nbytes: int) -> memoryview:
    return window[:nbytes]


Ints = NDArray[np.int64]

_LOOK_NUMEL: Final = 1 << 14
"""Elements per step of the element-wise comparison, which runs only if a window differs."""


@dataclass(frozen=True, slots=True)
class RegionPair:
    left: Region
    right: Region
    numels: Sequence[int]
    """Elements of each of the consecutive parts of the regions."""
    dtype: str
    """Dtype of both regions, after any cast."""
    any_nan: bool = False
    """Whether NaNs may differ in their bits, as the NaNs of a cast depend on the processor."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Elements that differ in the part of one tensor."""

    part: int
    """Index in the pair's `numels`."""
    first: int
    """Index in the part of the first element that differs."""
    count: int


class Comparator(PairReader):
    def compare(self, pair: RegionPair) -> list[Mismatch]:
        read = self.begin(pair.left, pair.right)
        itemsize = pair.right.target_itemsize
        step = self.window_bytes // itemsize * itemsize
        starts = np.cumsum([0, *pair.numels[:-1]])
        mismatches: dict[int, Mismatch] = {}
        for at in range(0, pair.right.content_bytes, step):
            one, other = read(min(step, pair.right.content_bytes - at))
            if not _same(one, other):
                for elements in _differing(one, other, pair):
                    _add(mismatches, elements + at // itemsize, starts)
        return list(mismatches.values())


def _same(left: memoryview, right: memoryview) -> bool:
    word = np.uint64 if len(left) % 8 == 0 else np.uint8
    return not (np.frombuffer(left, dtype=word) != np.frombuffer(right, dtype=word)).any()


def _differing(left: memoryview, right: memoryview, pair: RegionPair) -> Iterator[Ints]:
    """Yield the indices of the elements that differ, in small batches to limit memory."""
    dtype, itemsize = pair.dtype, pair.right.target_itemsize
    step = _LOOK_NUMEL * itemsize
    for at in range(0, len(left), step):
        lefts, rights = left[at : at + step], right[at : at + step]
        rows = [np.frombuffer(v, dtype=np.uint8).reshape(-1, itemsize) for v in (lefts, rights)]
        differ = (rows[0] != rows[1]).any(axis=1)
        if pair.any_nan:
            differ &= ~(find_nans(lefts, dtype) & find_nans(rights, dtype))
        yield np.flatnonzero(differ) + at // itemsize


def _add(mismatches: dict[int, Mismatch], elements: Ints, starts: Ints) -> None:
    parts = np.searchsorted(starts, elements, side="right") - 1
    which, first, counts = np.unique(parts, return_index=True, return_counts=True)
    for part, index, count in zip(which.tolist(), first.tolist(), counts.tolist(), strict=True):
        before = mismatches.get(part)
        at = before.first if before else int(elements[index] - starts[part])
        mismatches[part] = Mismatch(part, at, count + (before.count if before else 0))
