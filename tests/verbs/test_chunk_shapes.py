"""Chunk grids against slicing an array of consecutive numbers."""

import math
from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamshard.model import FILE, LogicalTensor
from streamshard.operations.convert.store_targets import chunk_of, chunk_shape

SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)
ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16])
CHUNK_BYTES = st.integers(1, 300)


def pieces(shape: tuple[int, ...], chunk: tuple[int, ...]) -> list[list[int]]:
    """List the elements of every chunk, in row-major order of the chunks."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    starts = [range(0, length, step) for length, step in zip(shape, chunk, strict=True)]
    return [
        numbers[
            tuple(slice(at, at + step) for at, step in zip(corner, chunk, strict=True))
        ].ravel().tolist()
        for corner in product(*starts)
    ]  # fmt: skip


@given(SHAPES, ITEMSIZES, CHUNK_BYTES)
def test_every_chunk_is_one_range_of_equal_length(
    shape: tuple[int, ...], itemsize: int, chunk_bytes: int
) -> None:
    chunk = chunk_shape(shape, itemsize, chunk_bytes)
    numel, step = math.prod(shape), math.prod(chunk)
    wanted = [list(range(at, min(at + step, numel))) for at in range(0, numel, step)]
    assert pieces(shape, chunk) == wanted


@given(SHAPES, ITEMSIZES, CHUNK_BYTES)
def test_no_chunk_is_larger_than_asked_for_unless_it_is_one_element(
    shape: tuple[int, ...], itemsize: int, chunk_bytes: int
) -> None:
    chunk = chunk_shape(shape, itemsize, chunk_bytes)
    assert len(chunk) == len(shape)
    assert all(length >= 1 for length in chunk)
    if math.prod(shape):
        assert math.prod(chunk) * itemsize <= max(chunk_bytes, itemsize)


@given(st.integers(0, 5000), CHUNK_BYTES)
def test_raw_bytes_are_cut_where_torch_aligns_tensors(nbytes: int, chunk_bytes: int) -> None:
    shape = (nbytes,)
    (chunk,) = chunk_of(LogicalTensor(FILE, "a", "uint8", shape), chunk_bytes)
    if nbytes <= chunk_bytes:
        assert chunk == max(nbytes, 1)
    else:
        assert chunk % 64 == 0 or chunk == nbytes
        assert chunk <= max(chunk_bytes, 64)
