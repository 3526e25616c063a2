"""Cuts a tensor into chunks, each of which is one contiguous range of elements."""

import math

from streamshard.layout.zero import ceil_div


def chunk_shape(shape: tuple[int, ...], itemsize: int, chunk_bytes: int) -> tuple[int, ...]:
    """Choose a chunk shape of at most `chunk_bytes` that cuts along the leading dimension.

    Chunks get nearly equal numbers of rows, so that the last chunk, which Zarr stores in full,
    needs little padding. If a single row is larger than `chunk_bytes`, the row is cut by a divisor
    of its length, so that every chunk is still one range of equal length.

    >>> chunk_shape((10, 4), 4, 64)
    (4, 4)
    >>> chunk_shape((3, 10), 4, 20)
    (1, 5)
    >>> chunk_shape((), 4, 64), chunk_shape((0, 3), 4, 64)
    ((), (1, 3))
    """
    if 0 in shape:
        return tuple(max(1, length) for length in shape)
    budget = max(1, chunk_bytes // itemsize)
    for axis, length in enumerate(shape):
        row = math.prod(shape[axis + 1 :])
        if row > budget and axis < len(shape) - 1:
            continue
        wanted = max(1, budget // row)
        rows = _even_share(length, wanted) if axis == 0 else _divisor(length, wanted)
        return (*(1,) * axis, rows, *shape[axis + 1 :])
    return ()


def _even_share(length: int, at_most: int) -> int:
    return ceil_div(length, ceil_div(length, at_most))


def _divisor(length: int, at_most: int) -> int:
    """Return the largest divisor of a length that is at most `at_most`."""
    found = 1
    for small in range(1, math.isqrt(length) + 1):
        if length % small == 0:
            found = max([found, *(d for d in (small, length // small) if d <= at_most)])
    return found


def chunk_counts(shape: tuple[int, ...], chunk: tuple[int, ...]) -> tuple[int, ...]:
    """Count the chunks along each dimension."""
    return tuple(ceil_div(length, step) for length, step in zip(shape, chunk, strict=True))
