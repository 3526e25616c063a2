"""Tensors cut into boxes at any places, against NumPy's own slices of them."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from streamshard.layout.boxes import BoxGrid, NotTiledError, grid_of
from streamshard.layout.cutting import Cutting, CuttingBuilder, Segments
from streamshard.model import Slot
from tests.layout.simulate import HEADER, apply

Box = tuple[tuple[int, int], ...]
SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@dataclass(frozen=True)
class Tiled:
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    @property
    def grid(self) -> BoxGrid:
        return grid_of(self.shape, *arrays(self.boxes, len(self.shape)))


def arrays(boxes: tuple[Box, ...], dimensions: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    ranges = np.array(boxes, dtype=np.int64).reshape(len(boxes), dimensions, 2)
    return ranges[:, :, 0], ranges[:, :, 1] - ranges[:, :, 0]


@st.composite
def tilings(draw: st.DrawFn) -> Tiled:
    """Split a tensor, then one of its parts, and so on: tilings that are no grids, too."""
    shape = draw(SHAPES)
    boxes: list[Box] = [tuple((0, length) for length in shape)]
    for _ in range(draw(st.integers(0, 8))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        wide = [d for d, (low, high) in enumerate(box) if high - low > 1]
        if not wide:
            boxes.append(box)
            continue
        axis = draw(st.sampled_from(wide))
        low, high = box[axis]
        at = draw(st.integers(low + 1, high - 1))
        boxes += [(*box[:axis], part, *box[axis + 1 :]) for part in ((low, at), (at, high))]
    return Tiled(shape, tuple(draw(st.permutations(boxes))))


def values(number: int, shape: tuple[int, ...]) -> NDArray[np.int64]:
    return np.arange(math.prod(shape), dtype=np.int64).reshape(shape) + 1_000_000 * number


def lay(tensors: list[Tiled]) -> tuple[Cutting, list[bytes]]:
    """Put each box of each tensor into a file of its own."""
    builder = CuttingBuilder([8] * len(tensors))
    disk: list[bytes] = []
    for number, tiled in enumerate(tensors):
        first, held = len(disk), values(number, tiled.shape)
        for box in tiled.boxes:
            part = held[tuple(slice(low, high) for low, high in box)]
            disk.append(b"\xee" * HEADER + np.ascontiguousarray(part).tobytes())
        count = len(tiled.boxes)
        files = np.arange(first, first + count)
        slot = Slot(files, np.full(count, HEADER), np.zeros(count, dtype=np.int64))
        builder.place_boxes(number, builder.slot(slot), tiled.grid)
    return builder.build(), disk


@given(st.lists(tilings(), min_size=1, max_size=3), st.data())
def test_ranges_of_several_tensors_come_back(tensors: list[Tiled], data: st.DataObject) -> None:
    cutting, disk = lay(tensors)
    rows, expected, at = [], b"", 0
    for _ in range(data.draw(st.integers(1, 5))):
        number = data.draw(st.integers(0, len(tensors) - 1))
        numel = math.prod(tensors[number].shape)
        start = data.draw(st.integers(0, numel))
        stop = data.draw(st.integers(start, numel))
        rows.append((number, start, stop, at))
        expected += values(number, tensors[number].shape).reshape(-1)[start:stop].tobytes()
        at += (stop - start) * 8
    segments = Segments(*np.array(rows, dtype=np.int64).T)
    copies = cutting.locate(segments, target_itemsize=8)
    assert np.all(np.diff(copies.target) > 0), "in the order of the segments"
    region, touched = apply(copies, disk, len(expected))
    assert region == expected
    assert touched.tolist() == [1] * len(expected)


@given(tilings())
def test_edges_and_runs(tiled: Tiled) -> None:
    grid = tiled.grid
    held = np.full(grid.shape, -1)
    for number, box in enumerate(tiled.boxes):
        held[tuple(slice(low, high) for low, high in box)] = number
    cells = [np.repeat(np.arange(len(e) - 1), np.diff(e)) for e in grid.edges]
    numbers = np.ravel_multi_index(np.ix_(*cells), [len(e) - 1 for e in grid.edges])
    assert grid.cells[numbers].reshape(-1).tolist() == held.reshape(-1).tolist()


def test_a_mesh_cut_along_its_rows_has_one_run_per_box() -> None:
    rows = tuple(((low, low + 2), (0, 100)) for low in range(0, 10, 2))
    assert grid_of((10, 100), *arrays(rows, 2)).runs == 5


@given(tilings(), st.data())
def test_boxes_that_do_not_tile_are_refused(tiled: Tiled, data: st.DataObject) -> None:
    box = data.draw(st.sampled_from(tiled.boxes))
    kind = data.draw(st.sampled_from(["gap", "overlap", "outside"]))
    boxes = list(tiled.boxes)
    if kind == "gap":
        boxes.remove(box)
    elif kind == "overlap" or not box:
        boxes.append(box)
    else:
        axis = data.draw(st.integers(0, len(box) - 1))
        moved = (box[axis][0], tiled.shape[axis] + 1)
        boxes[boxes.index(box)] = (*box[:axis], moved, *box[axis + 1 :])
    with pytest.raises(NotTiledError):
        grid_of(tiled.shape, *arrays(tuple(boxes), len(tiled.shape)))


def test_messages_have_the_numbers() -> None:
    def refused(*boxes: Box) -> str:
        with pytest.raises(NotTiledError) as caught:
            grid_of((4, 6), *arrays(boxes, 2))
        return str(caught.value)

    top = ((0, 2), (0, 6))
    assert refused(top) == "no box holds its element [2, 0]"
    assert refused(top, ((1, 4), (0, 6))) == (
        "the box at [0, 0] of [2, 6] and the box at [1, 0] of [3, 6] overlap"
    )
    assert refused(top, ((2, 5), (0, 6))) == "the box at [2, 0] of [3, 6] reaches out of [4, 6]"


def test_boxes_that_make_too_many_cells_are_refused() -> None:
    steps = tuple(((k, k + 1), (k, k + 1)) for k in range(5000))
    with pytest.raises(NotTiledError, match="5,000 boxes whose edges cut it into 25,000,000 cells"):
        grid_of((5000, 5000), *arrays(steps, 2))
