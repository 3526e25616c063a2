"""Measures the numeric distance of two regions, block by block, with one buffer for each.

The result of a block depends only on its elements, not on the windows or on the worker.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from streamshard.engine.scan.region_pair import PairReader, RegionPair
from streamshard.model import ITEMSIZE

Floats = NDArray[np.float64]

BLOCK_NUMEL: Final = 1 << 15
"""Elements per block: three float64 arrays of this length about fit the CPU caches."""
SUMS: Final = ("difference", "squared_difference", "squared_left", "squared_right", "product")
"""Sums over the elements that are finite on both sides; the difference is the absolute one."""
COUNTS: Final = ("changed", "nan_left", "nan_right", "inf_left", "inf_right", "finite")
"""Counts of elements: with different bits, NaN, infinite, and finite on both sides."""

_NUMERIC: Final = frozenset(d for d in ITEMSIZE if not d.startswith(("complex", "float8", "q")))
"""Dtypes whose elements are real numbers that streamshard can convert to float64."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The result for one part."""

    counts: NDArray[np.int64]
    """Counts in the order of `COUNTS`."""
    sums: Floats
    """One row per block, with columns in the order of `SUMS`."""
    largest: float
    """Largest absolute difference among elements that are finite on both sides."""
    peak: float
    """Largest magnitude on the left among these, in the blocks that differ."""


class Measurer(PairReader):
    def measure(self, pair: RegionPair) -> list[Measured]:
        meter = _Meter()
        counts = np.zeros((len(pair.numels), len(COUNTS)), dtype=np.int64)
        sums: list[list[Floats]] = [[] for _ in pair.numels]
        largest, peaks = ([0.0] * len(pair.numels) for _ in range(2))
        for part, left, right in self._blocks(pair):
            distance = meter.measure(left, right, pair)
            counts[part] += distance.counts
            sums[part].append(distance.sums)
            largest[part] = max(largest[part], distance.largest)
            peaks[part] = max(peaks[part], distance.peak)
        none = np.zeros((0, len(SUMS)))
        return [
            Measured(counts[part], np.concatenate([none, *sums[part]]), largest[part], peaks[part])
            for part in range(len(pair.numels))
        ]

    def _blocks(self, pair: RegionPair) -> Iterator[tuple[int, memoryview, memoryview]]:
        """Yield (part, left block, right block); each read fills a window with blocks."""
        read = self.begin(pair.left, pair.right)
        itemsize = pair.left.target_itemsize
        for window in self._in_windows(pair.numels, itemsize):
            one, other = read(sum(size for _, size in window))
            at = 0
            for part, size in window:
                yield part, one[at : at + size], other[at : at + size]
                at += size

    def _in_windows(self, numels: Sequence[int], itemsize: int) -> Iterator[list[tuple[int, int]]]:
        """Yield as many blocks as fit a window: (part, bytes)."""
        window: list[tuple[int, int]] = []
        room = self.window_bytes
        # Only blocks of 16-byte elements may exceed the smallest window; they are never summed,
        # so that shorter blocks change no result.
        block = min(BLOCK_NUMEL, room // itemsize)
        for part, numel in enumerate(numels):
            for start in range(0, numel, block):
                size = min(block, numel - start) * itemsize
                if size > room:
                    yield window
                    window, room = [], self.window_bytes
                window.append((part, size))
                room -= size
        if window:
            yield window


class _Meter:
    def __init__(self) -> None:
        self._floats = [np.empty(BLOCK_NUMEL) for _ in range(3)]

    def measure(self, left: memoryview, right: memoryview, pair: RegionPair) -> Measured:
        itemsize = pair.left.target_itemsize
        differ = _differing(left, right, itemsize)
        counts = np.zeros(len(COUNTS), dtype=np.int64)
        if pair.dtype not in _NUMERIC or itemsize != ITEMSIZE[pair.dtype]:
            counts[0] = 0 if differ is None else np.count_nonzero(differ)
            return Measured(counts, np.zeros((0, len(SUMS))), 0.0, 0.0)
        with np.errstate(all="ignore"):  # numbers may be of any size, and NaNs of any kind
            lefts = self._widened(left, pair.dtype, 0)
            rights = lefts if differ is None else self._widened(right, pair.dtype, 1)
            sums, *most = self._sums(lefts, rights)
            if np.isfinite(sums).all():
                counts[5] = len(lefts)
            else:  # almost always because an element is not finite
                if differ is not None and pair.any_nan:
                    differ &= ~(np.isnan(lefts) & np.isnan(rights))
                counts[1:] = _count(lefts, rights)
                finite = np.isfinite(lefts) & np.isfinite(rights)
                lefts, rights = lefts[finite], rights[finite]
                sums, *most = self._sums(lefts, rights)
        counts[0] = 0 if differ is None else np.count_nonzero(differ)
        return Measured(counts, sums[np.newaxis], *most)

    def _widened(self, view: memoryview, dtype: str, number: int) -> Floats:
        if dtype == "bfloat16":
            bits = np.frombuffer(view, dtype=np.uint16).astype(np.uint32)
            values = np.left_shift(bits, 16, out=bits).view(np.float32)
        else:
            values = np.frombuffer(view, dtype=dtype)
        floats = self._floats[number][: len(values)]
        floats[:] = values
        return floats

    def _sums(self, left: Floats, right: Floats) -> tuple[Floats, float, float]:
        """Return the sums, by NumPy's pairwise summation, the largest difference, and the peak."""
        room, sums = self._floats[2][: len(left)], np.zeros(len(SUMS))
        sums[2] = np.multiply(left, left, out=room).sum()
        if left is right:
            sums[3] = sums[4] = sums[2]
            return sums, 0.0, 0.0
        sums[3] = np.multiply(right, right, out=room).sum()
        sums[4] = np.multiply(left, right, out=room).sum()
        peak = float(np.abs(left, out=room).max(initial=0.0))
        np.subtract(right, left, out=room)
        np.abs(room, out=room)
        sums[0] = room.sum()
        largest = float(room.max(initial=0.0))
        sums[1] = np.multiply(room, room, out=room).sum()
        return sums, largest, peak


def _differing(left: memoryview, right: memoryview, itemsize: int) -> NDArray[np.bool_] | None:
    """Return for each element whether its bits differ; None if no bits differ."""
    word = np.dtype(f"u{itemsize}" if itemsize in (1, 2, 4, 8) else "u1")
    differ = np.frombuffer(left, dtype=word) != np.frombuffer(right, dtype=word)
    if not differ.any():
        return None
    found: NDArray[np.bool_] = differ.reshape(-1, itemsize // word.itemsize).any(axis=1)
    return found


def _count(one: Floats, other: Floats) -> list[int]:
    tests = (np.isnan, one), (np.isnan, other), (np.isinf, one), (np.isinf, other)
    found = [int(np.count_nonzero(test(values))) for test, values in tests]
    return [*found, int(np.count_nonzero(np.isfinite(one) & np.isfinite(other)))]
