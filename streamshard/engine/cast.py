"""Conversions between float dtypes, bit for bit what torch's `tensor.to(dtype)` gives.

But for NaNs, which stay NaNs: torch's own bits for them depend on the processor's instructions.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamshard.engine.work import Cast
from streamshard.errors import UnsupportedError
from streamshard.model import ITEMSIZE


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


def _float32_to_float16(source: memoryview, target: memoryview) -> None:
    with np.errstate(over="ignore"):
        np.frombuffer(target, dtype=np.float16)[:] = np.frombuffer(source, dtype=np.float32)


def _bfloat16_to_float32(source: memoryview, target: memoryview) -> None:
    bits = np.frombuffer(target, dtype=np.uint32)
    bits[:] = np.frombuffer(source, dtype=np.uint16)
    np.left_shift(bits, 16, out=bits)


_CASTS: dict[tuple[str, str], Cast] = {
    ("float32", "bfloat16"): _float32_to_bfloat16,
    ("float32", "float16"): _float32_to_float16,
    ("bfloat16", "float32"): _bfloat16_to_float32,
}


def cast_between(source: str, target: str) -> Cast | None:
    """Find the conversion between two dtypes; None where there is nothing to convert.

    Raises
    ------
    UnsupportedError
        The conversion is not known.
    """
    if source == target:
        return None
    if (source, target) not in _CASTS:
        raise UnsupportedError(f"weights cannot be converted from {source} to {target}")
    return _CASTS[source, target]


_INFINITY: dict[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "float32": (np.uint32, 0x7F800000),
    "float16": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
}
"""The integers that have the bits of positive infinity, above which there are only NaNs."""


def find_nans(view: memoryview, dtype: str) -> NDArray[np.bool_]:
    """Tell of every element whether it is a NaN; of other dtypes than a cast's none is."""
    if dtype not in _INFINITY:
        return np.zeros(len(view) // ITEMSIZE[dtype], dtype=bool)
    word, infinity = _INFINITY[dtype]
    bits = np.frombuffer(view, dtype=word)
    found: NDArray[np.bool_] = (bits & word((1 << (8 * bits.itemsize - 1)) - 1)) > infinity
    return found
