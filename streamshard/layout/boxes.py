"""Tensors that are cut into boxes: along several dimensions, at places without a rule.

Boxes of one tensor need not be alike. But the edges of all of them, drawn through the whole tensor,
cut it into *cells* like a grid whose lines are not evenly spaced, and each cell belongs to one box.
Within a cell, the elements along the last dimension that is cut lie side by side, with all that is
in the dimensions after it: that is a *run*. So a tensor is a sequence of runs in the order of its
elements, and array arithmetic finds the runs of any range, and the place of each in its box.

A box is a tensor of its own, or a part of a larger one, its *holder*: then its elements lie in the
holder row by row, with those of others between them.

Nothing here knows whose boxes they are: tensor parallelism cuts like this, and so do saved meshes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_MOST_CELLS_PER_BOX: Final = 64
"""More cells for each box than any mesh of devices makes: a mesh makes one."""
_CELLS_ALLOWED: Final = 4096
"""So many cells are fine, however few boxes there are."""
_LIMIT: Final = 1 << 62
"""Elements and positions stay below this, so that sums of two fit 64 bits."""


class NotTiledError(ValueError):
    """Boxes overlap, leave a gap, or reach out of their tensor; the message has the numbers."""


@dataclass(frozen=True, slots=True)
class BoxGrid:
    """One tensor, cut into boxes that fill it and do not overlap."""

    shape: tuple[int, ...]
    offsets: Ints
    """Where each box begins; one row per box, one column per dimension."""
    sizes: Ints
    """Lengths of each box."""
    lower: Ints
    """Where the holder of each box begins, in the coordinates of the tensor; may be negative."""
    lengths: Ints
    """Lengths of each box's holder."""
    edges: tuple[Ints, ...]
    """All edges of boxes in each dimension, from 0 to the length."""
    cells: Ints
    """The box of each cell, the last dimension fastest."""

    @property
    def runs(self) -> int:
        last = self.last_cut
        return math.prod(self.shape[:last]) * (len(self.edges[last]) - 1)

    @property
    def last_cut(self) -> int:
        """The last dimension that is cut, in the tensor or in a holder; the first, if none is."""
        cut = [d for d, edges in enumerate(self.edges) if len(edges) > 2]
        cut += np.flatnonzero((self.lengths != self.shape).any(axis=0)).tolist()
        return max(cut, default=0)

    @property
    def is_one_holder(self) -> bool:
        """Whether the tensor is a single box that is its own holder."""
        return len(self.offsets) == 1 and bool((self.lengths == self.shape).all())


def grid_of(
    shape: Sequence[int],
    offsets: Ints,
    sizes: Ints,
    *,
    holders: tuple[Ints, Ints] | None = None,
) -> BoxGrid:
    """Check that boxes tile a tensor that has elements, and return the grid that they make.

    `offsets` and `sizes`: one row per box, one column per dimension. No box is empty.
    `holders`: where each box's holder begins, and its lengths; by default each box is its own.

    Examples
    --------
    >>> grid = grid_of((2, 3), np.array([[0, 0], [0, 2]]), np.array([[2, 2], [2, 1]]))
    >>> grid.runs, [edges.tolist() for edges in grid.edges], grid.cells.tolist()
    (4, [[0, 2], [0, 2, 3]], [0, 1])
    """
    if not shape:  # a single element, in one dimension of length 1
        shape = (1,)
        offsets, sizes = np.zeros((len(offsets), 1), np.int64), np.ones((len(sizes), 1), np.int64)
        holders = None
    lower, holder_sizes = (offsets, sizes) if holders is None else holders
    lengths = np.asarray(shape, dtype=np.int64)
    ends = offsets + sizes
    for box in np.flatnonzero(((lower > offsets) | (lower + holder_sizes < ends)).any(axis=1))[:1]:
        raise NotTiledError(f"{_shown(offsets, sizes, box)} reaches out of its holder")
    for box in np.flatnonzero(((offsets < 0) | (sizes < 1) | (ends > lengths)).any(axis=1))[:1]:
        raise NotTiledError(f"{_shown(offsets, sizes, box)} reaches out of {list(shape)}")
    edges = tuple(
        np.unique(np.concatenate([[0, length], offsets[:, d], ends[:, d]]))
        for d, length in enumerate(shape)
    )
    counts = [len(each) - 1 for each in edges]
    most = max(_CELLS_ALLOWED, _MOST_CELLS_PER_BOX * len(offsets))
    if math.prod(counts) > most:
        message = f"{len(offsets):,} boxes whose edges cut it into {math.prod(counts):,} cells"
        raise NotTiledError(f"{message}: no mesh of devices cuts like that")
    # A cell is the product of an interval per dimension, and boxes begin and end at its edges.
    first = np.stack([np.searchsorted(e, offsets[:, d]) for d, e in enumerate(edges)], axis=1)
    stop = np.stack([np.searchsorted(e, ends[:, d]) for d, e in enumerate(edges)], axis=1)
    cells = np.full(counts, -1, dtype=np.int64)
    spans = zip(first.tolist(), stop.tolist(), strict=True)
    for box, (low, high) in enumerate(spans):
        inside = tuple(map(slice, low, high))
        taken = cells[inside].max()
        if taken >= 0:
            one, other = _shown(offsets, sizes, int(taken)), _shown(offsets, sizes, box)
            raise NotTiledError(f"{one} and {other} overlap")
        cells[inside] = box
    for gap in np.argwhere(cells < 0)[:1].tolist():
        where = [int(edges[d][cell]) for d, cell in enumerate(gap)]
        raise NotTiledError(f"no box holds its element {where}")
    return BoxGrid(tuple(shape), offsets, sizes, lower, holder_sizes, edges, cells.reshape(-1))


def _shown(offsets: Ints, sizes: Ints, box: int) -> str:
    return f"the box at {offsets[box].tolist()} of {sizes[box].tolist()}"


@dataclass(frozen=True, slots=True)
class BoxRuns:
    """BoxRuns of elements, each in one box; parallel arrays."""

    row: Ints
    """Index of the range that asked for the run."""
    piece: Ints
    """Row of the box among all pieces."""
    start: Ints
    """First element, in the order of the tensor's elements."""
    numel: Ints
    within: Ints
    """First element, in the order of the elements of the box's holder."""


@dataclass(frozen=True, slots=True)
class Boxes:
    """Grids of several tensors, as arrays; row i is grid i.

    All grids have as many dimensions as the one with most: dimensions of length 1 come before the
    others' own.
    """

    shape: Ints
    """(grids, dimensions)"""
    counts: Ints
    """Cells along each dimension, (grids, dimensions)."""
    edge: Ints
    """Index in `edges` of the first edge, (grids, dimensions)."""
    edges: Ints
    """All edges; those of each dimension are shifted by `shift`, so that all are ascending."""
    shift: Ints
    """(grids, dimensions)"""
    first_cell: Ints
    """Index in `cells` of each grid's first cell."""
    cells: Ints
    """Row in `lower` and `lengths` of the box of each cell."""
    last_cut: Ints
    """See `BoxGrid.last_cut`."""
    piece: Ints
    """Row of each box among all pieces."""
    lower: Ints
    """Where each box's holder begins, (boxes, dimensions)."""
    lengths: Ints
    """Lengths of each box's holder, (boxes, dimensions)."""
    pieces: Ints
    """Count of each grid's boxes."""

    def locate(self, grid: Ints, start: Ints, stop: Ints) -> BoxRuns:
        """Find the runs of ranges that are not empty; row i asks for elements of grid `grid[i]`."""
        unit, counts = self._unit(grid), self._at_last_cut(self.counts, grid)
        length = unit * self._at_last_cut(self.shape, grid)
        first = start // length * counts + self._cell_at(grid, start % length // unit)
        last = (stop - 1) // length * counts + self._cell_at(grid, (stop - 1) % length // unit)
        number = last - first + 1
        row = np.repeat(np.arange(len(grid)), number)
        k = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(number) - number, number)
        grid, unit, counts, length = grid[row], unit[row], counts[row], length[row]
        edge = self._at_last_cut(self.edge, grid) + k % counts
        shift, before = self._at_last_cut(self.shift, grid), k // counts * length
        lower = np.maximum(start[row], before + (self.edges[edge] - shift) * unit)
        upper = np.minimum(stop[row], before + (self.edges[edge + 1] - shift) * unit)
        box, within = self._place(grid, lower)
        return BoxRuns(row, self.piece[box], lower, upper - lower, within)

    def _unit(self, grid: Ints) -> Ints:
        """Count the elements after the last dimension that is cut."""
        behind = np.arange(self.shape.shape[1]) > self.last_cut[grid][:, None]
        product: Ints = np.where(behind, self.shape[grid], 1).prod(axis=1)
        return product

    def _at_last_cut(self, values: Ints, grid: Ints) -> Ints:
        return values[grid, self.last_cut[grid]]

    def _cell_at(self, grid: Ints, index: Ints) -> Ints:
        last = self.last_cut[grid]
        return self._cell(grid, last, index)

    def _cell(self, grid: Ints, dimension: Ints | int, index: Ints) -> Ints:
        wanted = index + self.shift[grid, dimension]
        found = np.searchsorted(self.edges, wanted, side="right") - 1
        cell: Ints = found - self.edge[grid, dimension]
        return cell

    def _place(self, grid: Ints, element: Ints) -> tuple[Ints, Ints]:
        """Return the box that has each element, and the element's number in the box's holder."""
        indices: list[Ints] = []
        quotient, cell, step = element, np.zeros_like(element), np.ones_like(element)
        for dimension in reversed(range(self.shape.shape[1])):
            length = self.shape[grid, dimension]
            indices.append(quotient % length)
            quotient = quotient // length
            cell += step * self._cell(grid, dimension, indices[-1])
            step = step * self.counts[grid, dimension]
        box = self.cells[self.first_cell[grid] + cell]
        within, step = np.zeros_like(element), np.ones_like(element)
        for dimension, index in zip(reversed(range(len(indices))), indices, strict=True):
            within += step * (index - self.lower[box, dimension])
            step = step * self.lengths[box, dimension]
        return box, within


def gather(grids: Sequence[BoxGrid], first_pieces: Sequence[int]) -> Boxes:
    """Join grids into arrays.

    `first_pieces`: of each grid: row of its first box among all pieces. The others follow.
    """
    most = max(len(grid.shape) for grid in grids)
    edges, shifts, at = [], [], 0
    for grid in grids:
        for own in (*[np.array([0, 1])] * (most - len(grid.shape)), *grid.edges):
            edges.append(own + at)
            shifts.append(at)
            at += int(own[-1]) + 1
            if at > _LIMIT:
                raise NotTiledError("tensors of more elements than can be counted")
    lead = [most - len(grid.shape) for grid in grids]
    counts = np.array([len(each) - 1 for each in edges], dtype=np.int64).reshape(-1, most)
    boxes = np.array([len(grid.offsets) for grid in grids], dtype=np.int64)
    first_box = np.cumsum(boxes) - boxes
    cells = [grid.cells + first for grid, first in zip(grids, first_box.tolist(), strict=True)]
    numbers = np.array([len(each) for each in cells], dtype=np.int64)
    pieces = [np.arange(n) + at for n, at in zip(boxes.tolist(), first_pieces, strict=True)]
    return Boxes(
        shape=np.array(
            [(1,) * more + grid.shape for grid, more in zip(grids, lead, strict=True)], np.int64
        ),
        counts=counts,
        edge=(np.cumsum(counts + 1) - (counts + 1).reshape(-1)).reshape(-1, most),
        edges=np.concatenate(edges).astype(np.int64),
        shift=np.array(shifts, dtype=np.int64).reshape(-1, most),
        first_cell=np.cumsum(numbers) - numbers,
        cells=np.concatenate(cells),
        last_cut=np.array([g.last_cut + more for g, more in zip(grids, lead, strict=True)]),
        piece=np.concatenate(pieces),
        lower=_padded([g.lower for g in grids], lead, 0),
        lengths=_padded([g.lengths for g in grids], lead, 1),
        pieces=boxes,
    )


def _padded(rows: Sequence[Ints], lead: Sequence[int], value: int) -> Ints:
    """Put columns before those of each array, so that all have equally many; join them."""
    both = zip(rows, lead, strict=True)
    return np.concatenate(
        [np.pad(own, ((0, 0), (more, 0)), constant_values=value) for own, more in both]
    ).astype(np.int64)
