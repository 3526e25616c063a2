"""Boxes that Megatron's distributed optimizer flattened and cut: `fully_sharded_model_space`.

By `dist_checkpointing/strategies/torch.py` of megatron-core 0.13.1 and 0.15.3; 0.16 saves no such
tensors. A tensor of [X, Y] in boxes of [x, y] is listed as one of [X / x, Y / y, x * y], and an
item holds a range of a flattened box.
"""

import math
from collections.abc import Iterator

import numpy as np

from streamshard.errors import CorruptFileError
from streamshard.formats.dcp.item_reader import TensorPlaces
from streamshard.formats.dcp.metadata_reader import SavedItems, SavedTensor
from streamshard.formats.pickle.inert import show
from streamshard.model import ITEMSIZE

Shape = tuple[int, ...]


def unflattened(
    name: str, saved: SavedTensor, places: TensorPlaces, shape: Shape
) -> tuple[SavedTensor, TensorPlaces]:
    """Return a tensor in its own shape, cut into the boxes that make up the ranges."""
    counts = saved.shape[:-1]
    box = tuple(length // max(1, count) for length, count in zip(shape, counts, strict=False))
    evenly = tuple(length * count for length, count in zip(box, counts, strict=False))
    if len(counts) != len(shape) or evenly != shape or math.prod(box) != saved.shape[-1]:
        message = f"{show(name)} of {show(shape)} is said to be flattened to {show(saved.shape)}"
        raise CorruptFileError(message)
    rows: list[tuple[Shape, Shape, int, int]] = []
    columns = saved.offsets.tolist(), saved.sizes.tolist()
    for item, ((*where, start), (*_, numel)) in enumerate(zip(*columns, strict=True)):
        corner = tuple(at * length for at, length in zip(where, box, strict=True))
        for offset, sizes, first in _boxes_of_range(box, start, start + numel):
            begin = tuple(a + b for a, b in zip(corner, offset, strict=True))
            rows.append((begin, sizes, item, first - start))
    items = np.array([row[2] for row in rows], dtype=np.int64)
    within = np.array([row[3] for row in rows], dtype=np.int64)
    corners, lengths = (
        np.array([row[k] for row in rows], dtype=np.int64).reshape(len(rows), len(shape))
        for k in (0, 1)
    )
    held = SavedItems(saved.items.file[items], saved.items.offset[items], saved.items.nbytes[items])
    found = places.offset[items] + within * ITEMSIZE[saved.dtype]
    tensor = SavedTensor(saved.dtype, shape, corners, lengths, held)
    return tensor, TensorPlaces(places.file[items], found)


def _boxes_of_range(box: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape, int]]:
    """Divide a range of the elements of a box into boxes: where, of which lengths, first element.

    >>> list(_boxes_of_range((3, 4), 2, 9))
    [((0, 2), (1, 2), 2), ((1, 0), (1, 4), 4), ((2, 0), (1, 1), 8)]
    """
    if len(box) == 1:
        yield (start,), (stop - start,), start
        return
    row = math.prod(box[1:])
    at = start
    while at < stop:
        number, inside = divmod(at, row)
        if inside or stop - at < row:  # a part of a row
            end = min((number + 1) * row, stop)
            for offset, sizes, found in _boxes_of_range(box[1:], inside, end - number * row):
                yield (number, *offset), (1, *sizes), found + number * row
        else:
            count = (stop - at) // row
            end = at + count * row
            yield (number, *[0] * (len(box) - 1)), (count, *box[1:]), at
        at = end
