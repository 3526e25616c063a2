"""Counts NaNs, infinities and zeros, and measures how large numbers are, block by block.

A block's result depends on nothing but its elements. So it does not matter which worker reads it.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from streamshard.engine.numeric.cast import INFINITY
from streamshard.health import TensorHealth, root_mean_square
from streamshard.model import ITEMSIZE

_BLOCK_NUMEL: Final = 1 << 15
"""Elements per block: its arrays fit the CPU caches."""
_BLOCK_BYTES: Final = 1 << 18
"""Most bytes of a block: the smallest window holds one."""
_EXACT: Final = 2.0**-40, 2.0**60
"""Largest magnitudes of a block whose squares are summed as float32: smaller ones would vanish,
larger ones become infinite."""

Floats = NDArray[np.floating[Any]]
_Doubles = NDArray[np.float64]
_Widening = Callable[[memoryview], _Doubles]


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
    return min(_BLOCK_NUMEL * itemsize, _BLOCK_BYTES)


def joined(parts: Iterable[Magnitudes]) -> Magnitudes:
    all_parts = [*parts]
    return Magnitudes(
        sum(part.numel for part in all_parts),
        sum(part.nans for part in all_parts),
        sum(part.infinities for part in all_parts),
        sum(part.zeros for part in all_parts),
        max((part.largest for part in all_parts), default=0.0),
        math.fsum(part.squares for part in all_parts),
    )


def health_of(total: Magnitudes) -> TensorHealth:
    finite = total.numel - total.nans - total.infinities
    rms = root_mean_square(total.squares, finite)
    counts = total.numel, total.nans, total.infinities, total.zeros
    # Only squares of float64 can exceed what a float holds.
    return TensorHealth(*counts, total.largest, rms if math.isfinite(rms) else total.largest)


def _absolute(dtype: str) -> _Widening:
    """Return a function for complex numbers: it returns how far each is from zero."""

    def widen(view: memoryview) -> _Doubles:
        with np.errstate(over="ignore", invalid="ignore"):
            return np.abs(np.frombuffer(view, dtype=dtype).astype(np.complex128))

    return widen


def _looked_up(values: _Doubles) -> _Widening:
    """Return a function for elements of one byte each, of which there are 256 values."""
    return lambda view: values[np.frombuffer(view, dtype=np.uint8)]


def _e4m3fn() -> _Doubles:
    """Return all values of the dtype without infinities, whose NaN is the largest pattern."""
    bits = np.arange(256)
    exponent, fraction = bits >> 3 & 15, bits & 7
    size = np.ldexp(fraction + 8.0 * (exponent > 0), np.maximum(exponent, 1) - 10)
    size[bits & 127 == 127] = np.nan
    values: _Doubles = np.where(bits >> 7, -size, size)
    return values


_WIDER: Final[Mapping[str, _Widening]] = {
    "complex64": _absolute("complex64"),
    "complex128": _absolute("complex128"),
    "float8_e4m3fn": _looked_up(_e4m3fn()),
    "float8_e5m2": _looked_up(
        (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float64)
    ),
}
"""Dtypes that are measured as float64 → a function that returns sizes, or values, as such."""


class Meter:
    def __init__(self, dtype: str) -> None:
        self._wider = _WIDER.get(dtype)
        if self._wider is not None:
            self._inner = Meter("float64")
            self._itemsize = ITEMSIZE[dtype]
            return
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
        step = block_bytes(self._itemsize)
        blocks = (view[at : at + step] for at in range(0, len(view), step))
        return joined(map(self._measure_block, blocks))

    def _measure_block(self, view: memoryview) -> Magnitudes:
        if self._wider is not None:
            return self._inner.measure(self._wider(view).data.cast("B"))
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
