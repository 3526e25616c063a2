"""Counts NaNs, infinities and zeros, and measures how large numbers are, block by block.

A block's result depends on nothing but its elements. So it does not matter which worker reads it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from streamshard.engine.numeric.cast import INFINITY
from streamshard.health import TensorHealth, root_mean_square

_BLOCK_NUMEL: Final = 1 << 15
"""Elements per block: its arrays fit the CPU caches."""
_EXACT: Final = 2.0**-40, 2.0**60
"""Largest magnitudes of a block whose squares are summed as float32: smaller ones would vanish,
larger ones become infinite."""

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """What was found in some elements; such results can be joined."""

    numel: int = 0
    nans: int = 0
    infinities: int = 0
    zeros: int = 0
    largest: float = 0.0
    squares: float = 0.0
    """Sum of the squares of the finite elements."""


def block_bytes(itemsize: int) -> int:
    """Return the size of a block; what is measured in several steps is to be cut at blocks."""
    return _BLOCK_NUMEL * itemsize


def joined(parts: Iterable[Magnitudes]) -> Magnitudes:
    """Return what was found in consecutive parts."""
    known = [*parts]
    return Magnitudes(
        sum(part.numel for part in known),
        sum(part.nans for part in known),
        sum(part.infinities for part in known),
        sum(part.zeros for part in known),
        max((part.largest for part in known), default=0.0),
        math.fsum(part.squares for part in known),
    )


def health_of(found: Magnitudes) -> TensorHealth:
    """Return what was found, as reports and manifests have it."""
    finite = found.numel - found.nans - found.infinities
    rms = root_mean_square(found.squares, finite)
    counts = found.numel, found.nans, found.infinities, found.zeros
    # Only squares of float64 can exceed what a float holds.
    return TensorHealth(*counts, found.largest, rms if math.isfinite(rms) else found.largest)


class Meter:
    """Measures elements of one dtype."""

    def __init__(self, dtype: str) -> None:
        self._word, self._infinity = INFINITY[dtype]
        self._dtype = dtype
        self._itemsize = np.dtype(self._word).itemsize
        self._sign = self._word(1 << (8 * self._itemsize - 1))
        self._signed = np.dtype(f"i{self._itemsize}")
        self._floats = np.empty(_BLOCK_NUMEL, dtype=np.float32)
        self._squares = np.empty(_BLOCK_NUMEL, dtype=np.float32)
        self._wide = np.empty(_BLOCK_NUMEL, dtype=np.float64)
        self._is_zero = np.empty(_BLOCK_NUMEL, dtype=np.bool_)

    def measure(self, view: memoryview) -> Magnitudes:
        """Measure the elements in a view, from its first block to its last."""
        step = block_bytes(self._itemsize)
        blocks = (view[at : at + step] for at in range(0, len(view), step))
        return joined(map(self._measure_block, blocks))

    def _measure_block(self, view: memoryview) -> Magnitudes:
        bits = np.frombuffer(view, dtype=self._word)
        numbers = self._numbers(view)
        # The largest positive pattern, and of the negative ones: all of NaNs exceed infinity.
        top = max(int(bits.view(self._signed).max()), int(bits.max()) - int(self._sign))
        nans = infinities = 0
        if top >= self._infinity:
            size = bits & ~self._sign
            nans = int(np.count_nonzero(size > self._infinity))
            infinities = int(np.count_nonzero(size == self._infinity))
            numbers = numbers[size < self._infinity]
            finite = size[size < self._infinity]
            top = int(finite.max(initial=0))
        zeros = int(np.count_nonzero(np.equal(numbers, 0, out=self._is_zero[: len(numbers)])))
        largest = self._value(top)
        return Magnitudes(
            len(bits), nans, infinities, zeros, largest, self._sum_squares(numbers, largest)
        )

    def _numbers(self, view: memoryview) -> Floats:
        """Return the elements as floats that NumPy computes with quickly."""
        if self._dtype in ("float32", "float64"):
            return np.frombuffer(view, dtype=self._dtype)
        count = len(view) // self._itemsize
        floats = self._floats[:count]
        if self._dtype == "bfloat16":
            bits = floats.view(np.uint32)
            bits[:] = np.frombuffer(view, dtype=np.uint16)
            np.left_shift(bits, 16, out=bits)
        else:
            with np.errstate(invalid="ignore"):
                floats[:] = np.frombuffer(view, dtype=np.float16)
        return floats

    def _value(self, size: int) -> float:
        """Return the number with the bits of a magnitude."""
        if self._dtype == "bfloat16":
            return float(np.array([size << 16], dtype=np.uint32).view(np.float32)[0])
        return float(np.array([size], dtype=self._word).view(self._dtype)[0])

    def _sum_squares(self, numbers: Floats, largest: float) -> float:
        if not largest:
            return 0.0
        is_exact = numbers.dtype == np.float32 and _EXACT[0] < largest < _EXACT[1]
        room = (self._squares if is_exact else self._wide)[: len(numbers)]
        with np.errstate(over="ignore", under="ignore"):
            np.multiply(numbers, numbers, out=room, dtype=room.dtype)
            return float(room.sum())  # by NumPy's pairwise summation
