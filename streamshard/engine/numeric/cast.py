"""Conversions between float dtypes, bit for bit equal to torch's `tensor.to(dtype)`.

NaNs are the exception. They stay NaNs, but torch's bits for them depend on the processor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from streamshard.errors import UnsupportedError
from streamshard.model import ITEMSIZE

_Function = Callable[[memoryview, memoryview], None]
"""Converts source elements in the first view into target elements that fill the second."""


def _float32_to_bfloat16(source: memoryview, target: memoryview) -> None:
    """Round to nearest, ties to even; NaNs become quiet ones."""
    bits = np.frombuffer(source, dtype=np.uint32)
    result = np.frombuffer(target, dtype=np.uint16)
    carry = (bits >> 16) & 1
    carry += np.uint32(0x7FFF)
    carry += bits  # cannot wrap: only NaNs are that large, and they are overwritten
    np.right_shift(carry, 16, out=carry)
    result[:] = carry
    result[(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)] = 0x7FC0


def _by_numpy(source: str, target: str) -> _Function:
    def cast(view: memoryview, into: memoryview) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            np.frombuffer(into, dtype=target)[:] = np.frombuffer(view, dtype=source)

    return cast


def _bfloat16_to_float32(source: memoryview, target: memoryview) -> None:
    bits = np.frombuffer(target, dtype=np.uint32)
    bits[:] = np.frombuffer(source, dtype=np.uint16)
    np.left_shift(bits, 16, out=bits)


_TO_FLOAT32: Final[dict[str, _Function]] = {
    "bfloat16": _bfloat16_to_float32,
    "float16": _by_numpy("float16", "float32"),
    "float64": _by_numpy("float64", "float32"),
}
_FROM_FLOAT32: Final[dict[str, _Function]] = {
    "bfloat16": _float32_to_bfloat16,
    "float16": _by_numpy("float32", "float16"),
}
_STEP_NUMEL: Final = 1 << 14
"""Elements per cast: for larger temporary arrays, new memory would be mapped each time."""


def _by_float32(source: str, target: str) -> _Function:
    """Cast in two steps, as torch does, which for float64 rounds twice."""
    widen, narrow = _TO_FLOAT32[source], _FROM_FLOAT32[target]

    def cast(view: memoryview, into: memoryview) -> None:
        between = memoryview(bytearray(4 * _STEP_NUMEL))
        step, target_step = _STEP_NUMEL * ITEMSIZE[source], _STEP_NUMEL * ITEMSIZE[target]
        for number, at in enumerate(range(0, len(view), step)):
            piece = view[at : at + step]
            floats = between[: 4 * (len(piece) // ITEMSIZE[source])]
            widen(piece, floats)
            narrow(floats, into[number * target_step : (number + 1) * target_step])

    return cast


_CASTS: Final[dict[tuple[str, str], _Function]] = {
    **{(source, "float32"): cast for source, cast in _TO_FLOAT32.items()},
    **{("float32", target): cast for target, cast in _FROM_FLOAT32.items()},
    **{
        (source, target): _by_float32(source, target)
        for source in _TO_FLOAT32
        for target in _FROM_FLOAT32
        if source != target
    },
}


@dataclass(frozen=True, slots=True)
class Cast:
    """A conversion between two dtypes, as data: any process finds the function for it."""

    source: str
    target: str

    def __call__(self, view: memoryview, into: memoryview) -> None:
        pair = self.source, self.target
        (_CASTS.get(pair) or _WIDENINGS[pair])(view, into)

    def count_overflow(self, view: memoryview, into: memoryview) -> int:
        """Convert elements, and count the finite ones that become infinite."""
        step, made = _STEP_NUMEL * ITEMSIZE[self.source], _STEP_NUMEL * ITEMSIZE[self.target]
        overflowed = 0
        for number, at in enumerate(range(0, len(view), step)):
            piece, result = view[at : at + step], into[number * made : (number + 1) * made]
            self(piece, result)
            infinite = count_infinite(result, self.target)
            overflowed += infinite - count_infinite(piece, self.source) if infinite else 0
        return overflowed


def cast_between(source: str, target: str) -> Cast | None:
    """Find the conversion between two dtypes; None if they are equal."""
    if source == target:
        return None
    if (source, target) not in _CASTS:
        raise UnsupportedError(f"weights cannot be converted from {source} to {target}")
    return Cast(source, target)


def _bfloat16_to_float64(source: memoryview, target: memoryview) -> None:
    bits = np.frombuffer(source, dtype=np.uint16).astype(np.uint32) << 16
    with np.errstate(invalid="ignore"):
        np.frombuffer(target, dtype=np.float64)[:] = bits.view(np.float32)


_WIDENINGS: Final[dict[tuple[str, str], _Function]] = {
    ("bfloat16", "float32"): _bfloat16_to_float32,
    ("float16", "float32"): _TO_FLOAT32["float16"],
    ("bfloat16", "float64"): _bfloat16_to_float64,
    ("float16", "float64"): _by_numpy("float16", "float64"),
    ("float32", "float64"): _by_numpy("float32", "float64"),
}
"""Conversions that keep every value."""


def wider(left: str, right: str) -> str | None:
    """Return the dtype to which both dtypes can be widened without changing a value, if any.

    >>> wider("bfloat16", "float16")
    'float32'
    >>> wider("int32", "float32") is None
    True
    """
    for dtype in (left, right, "float32", "float64"):
        if all(each == dtype or (each, dtype) in _WIDENINGS for each in (left, right)):
            return dtype
    return None


def comparing_cast(source: str, target: str) -> Cast | None:
    if (source, target) in _WIDENINGS:
        return Cast(source, target)
    return cast_between(source, target)


INFINITY: Final[dict[str, tuple[type[np.unsignedinteger[Any]], int]]] = {
    "float64": (np.uint64, 0x7FF0000000000000),
    "float32": (np.uint32, 0x7F800000),
    "float16": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
}
"""Positive infinity as an integer, by its bits; all larger positive patterns are NaNs."""


def find_nans(view: memoryview, dtype: str) -> NDArray[np.bool_]:
    """Return for each element whether it is a NaN; always False for dtypes without a cast."""
    if dtype not in INFINITY:
        return np.zeros(len(view) // ITEMSIZE[dtype], dtype=bool)
    word, infinity = INFINITY[dtype]
    bits = np.frombuffer(view, dtype=word)
    found: NDArray[np.bool_] = (bits & word((1 << (8 * bits.itemsize - 1)) - 1)) > infinity
    return found


def count_infinite(view: memoryview, dtype: str) -> int:
    word, infinity = INFINITY[dtype]
    bits = np.frombuffer(view, dtype=word)
    sign = word(1 << (8 * bits.itemsize - 1))
    return int(np.count_nonzero((bits | sign) == sign | word(infinity)))
