"""Which elements an index such as `tensor[10:20, ..., 3]` selects, by NumPy's rules."""

import math
from dataclasses import dataclass
from operator import index
from types import EllipsisType
from typing import Any, Final, SupportsIndex

Key = SupportsIndex | slice | EllipsisType | tuple[SupportsIndex | slice | EllipsisType, ...]
"""Valid indices of a tensor."""

_NO_INDEX: Final = (
    "indices are integers, slices and '...', not {}: read more than is needed, and index the array"
)


@dataclass(frozen=True, slots=True)
class Axis:
    """The selection in one dimension: `count` indices from `start` on, `step` apart."""

    start: int
    step: int
    """Always positive: for a negative step, elements are read in ascending order, then reversed."""
    count: int
    is_reversed: bool = False
    is_scalar: bool = False
    """Whether the selection is a single index, so that the result lacks this dimension."""


def select(key: Key, shape: tuple[int, ...]) -> tuple[Axis, ...]:
    """Return the selection that an index makes in each dimension of a shape."""
    keys: tuple[Any, ...] = key if isinstance(key, tuple) else (key,)
    dots = [number for number, part in enumerate(keys) if part is ...]
    if len(dots) > 1:
        raise IndexError("an index can have one ellipsis ('...') only")
    count = len(keys) - len(dots)
    if count > len(shape):
        raise IndexError(f"{count} indices for {len(shape)} dimensions, shape {shape}")
    at = dots[0] if dots else len(keys)
    rest = (slice(None),) * (len(shape) - count)
    whole = (*keys[:at], *rest, *keys[at + len(dots) :])
    return tuple(
        _axis(part, numel, dimension)
        for dimension, (part, numel) in enumerate(zip(whole, shape, strict=True))
    )


def _axis(part: Any, numel: int, dimension: int) -> Axis:  # noqa: ANN401
    if isinstance(part, slice):
        start, stop, step = part.indices(numel)
        count = len(range(start, stop, step))
        if step > 0:
            return Axis(start, step, count)
        return Axis(start + max(0, count - 1) * step, -step, count, is_reversed=True)
    try:
        number = index(part)
    except TypeError as error:
        raise TypeError(_NO_INDEX.format(type(part).__name__)) from error
    if isinstance(part, bool):  # Python takes a bool for an integer, NumPy for a mask
        raise TypeError(_NO_INDEX.format("bool"))
    if not -numel <= number < numel:
        raise IndexError(f"index {number} is out of range for dimension {dimension} of {numel}")
    return Axis(number % numel, 1, 1, is_scalar=True)


def rows_whole(axes: tuple[Axis, ...], shape: tuple[int, ...]) -> int:
    """Return the first dimension from which on every dimension is selected whole and in order."""
    dimension = len(shape)
    while dimension and axes[dimension - 1] == Axis(0, 1, shape[dimension - 1]):
        dimension -= 1
    return dimension


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the distance in elements between neighbours in each dimension.

    >>> strides((5, 3, 2))
    (6, 2, 1)
    """
    return tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))
