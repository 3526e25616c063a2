"""Where every element of every logical tensor lies, and the copies that move a range of elements.

Most layouts are *regular* cuts. A tensor's elements, shifted by the position of its first element
in the sequence that was cut, fall into pieces of equal length, and piece k lies at a known place.
ZeRO-1/2 cuts a flat group into partitions, ZeRO-3 a parameter into shards, Zarr a tensor into
chunks; a tensor that is not cut is one piece. So a cutting is a few integers per tensor and one
(file, offset) per piece. Meshes of devices cut tensors into boxes instead, see `boxes`. Either way,
array arithmetic finds the fragments of any range, and no list of all fragments is ever in memory.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from streamshard.layout.zero import FlatGroup, ends_and_numels
from streamshard.model import Copies, Slot

if TYPE_CHECKING:
    from streamshard.layout.boxes import Boxes, BoxGrid

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segments:
    """Element ranges of logical tensors, each with its target offset; parallel arrays."""

    tensor: Ints
    start: Ints
    stop: Ints
    target: Ints
    """Byte offset where element `start` is written."""


@dataclass(frozen=True, eq=False, slots=True)
class Share:
    """A rank's share of the elements of tensors; zeros fill the rest of its storage."""

    tensors: Ints
    """Those that are cut among all ranks, or those that the rank has whole."""
    dtype: str
    """Of the elements in the source."""
    segments_of: Callable[..., Segments]
    """Find the segments of a `rank`, for an `itemsize` in the target; can be pickled."""
    rank: int | None
    """None for the rank whose file holds it."""
    is_cut: bool = True
    """Whether all ranks together hold each element once."""

    def segments(self, *, itemsize: int) -> Segments:
        if self.rank is None:
            raise TypeError("a share of no rank")
        return self.segments_of(rank=self.rank, itemsize=itemsize)


@dataclass(frozen=True, slots=True)
class Cutting:
    """How logical tensors are cut into pieces, and where the pieces lie; row i is tensor i."""

    origin: Ints
    """Position of the tensor's first element in the sequence that was cut into pieces."""
    piece_numel: Ints
    """Elements per piece; for boxes, elements per run, on average."""
    itemsize: Ints
    """Bytes per element."""
    lead: Ints
    """Bytes before the tensor's part of each piece, where a piece holds several tensors."""
    first_piece: Ints
    """Row of `file` and `offset` that describes piece 0."""
    file: Ints
    offset: Ints
    """Byte offset of the piece in its file."""
    boxes: "Boxes | None" = None
    """How tensors are cut that are cut into boxes; None if there are none."""
    grid: Ints | None = None
    """Row in `boxes` of each tensor, -1 for one that is not cut into boxes; None without boxes."""
    of: "Cutting | None" = None
    """Where the pieces lie, if these are not parts of files but of other logical tensors. Then
    `file` is a row of it, and `offset` counts bytes of that tensor."""

    def locate(self, segments: Segments, *, target_itemsize: int) -> Copies:
        """Find the copies that fill the given segments, one per piece that a segment crosses.

        Tensors that are cut into boxes need one per run.
        """
        copies = self._pieces_of(segments, target_itemsize)
        if self.of is None:
            return copies
        itemsize = self.of.itemsize[copies.file]
        start = copies.source // itemsize
        inner = Segments(copies.file, start, start + copies.nbytes // itemsize, copies.target)
        return self.of.locate(inner, target_itemsize=target_itemsize)

    def _pieces_of(self, segments: Segments, target_itemsize: int) -> Copies:
        keep = np.flatnonzero(segments.stop > segments.start)
        if self.boxes is None or self.grid is None:
            return self._regular(segments, keep, target_itemsize)[1]
        is_boxed = self.grid[segments.tensor[keep]] >= 0
        rows, copies = self._regular(segments, keep[~is_boxed], target_itemsize)
        if not is_boxed.any():
            return copies
        boxed_rows, boxed = self._boxed(
            self.boxes, self.grid, segments, keep[is_boxed], target_itemsize
        )
        order = np.argsort(np.concatenate([rows, boxed_rows]), kind="stable")
        return Copies(
            file=np.concatenate([copies.file, boxed.file])[order],
            source=np.concatenate([copies.source, boxed.source])[order],
            target=np.concatenate([copies.target, boxed.target])[order],
            nbytes=np.concatenate([copies.nbytes, boxed.nbytes])[order],
        )

    @classmethod
    def of_files(cls, places: Iterable[tuple[int, int, int, int]]) -> "Cutting":
        """Return where tensors lie that are each in one piece in a file.

        `places`: file, byte offset, count of elements and their size.
        """
        files, offsets, numels, itemsizes = np.array([*places], dtype=np.int64).reshape(-1, 4).T
        zeros, rows = np.zeros_like(files), np.arange(len(files))
        return cls(zeros, np.maximum(numels, 1), itemsizes, zeros, rows, files, offsets)

    def take(self, rows: Ints) -> "Cutting":
        """Return where some of the tensors lie, in this order."""
        return replace(
            self,
            origin=self.origin[rows],
            piece_numel=self.piece_numel[rows],
            itemsize=self.itemsize[rows],
            lead=self.lead[rows],
            first_piece=self.first_piece[rows],
            grid=None if self.grid is None else self.grid[rows],
        )

    def with_parts(self, files: Ints, starts: Ints, numels: Ints, itemsizes: Ints) -> "Cutting":
        """Add tensors after the others that are parts of tensors of bytes.

        `files` and `starts`: the tensor of bytes that each is a part of, and its first byte there.
        Where it lies in several pieces, none of them may end inside of an element; see
        `is_divided`.
        """
        begin, piece = self.origin[files] + starts, self.piece_numel[files]
        number = np.where(numels > 0, begin // piece, 0)
        is_whole = (numels == 0) | ((begin + numels * itemsizes - 1) // piece == number)
        lead = self.lead[files]
        return replace(
            self,
            origin=np.append(self.origin, np.where(is_whole, 0, begin // itemsizes)),
            piece_numel=np.append(
                self.piece_numel, np.where(is_whole, np.maximum(numels, 1), piece // itemsizes)
            ),
            itemsize=np.append(self.itemsize, itemsizes),
            lead=np.append(self.lead, np.where(is_whole, lead + begin - number * piece, lead)),
            first_piece=np.append(
                self.first_piece, self.first_piece[files] + np.where(is_whole, number, 0)
            ),
            grid=None if self.grid is None else np.append(self.grid, np.full_like(files, -1)),
        )

    def is_divided(
        self, files: Ints, starts: Ints, numels: Ints, itemsizes: Ints
    ) -> NDArray[np.bool_]:
        """Tell of parts of tensors of bytes whether a piece may end inside of an element."""
        begin, piece = self.origin[files] + starts, self.piece_numel[files]
        is_cut = begin // piece != (begin + np.maximum(numels * itemsizes, 1) - 1) // piece
        found: NDArray[np.bool_] = is_cut & ((begin % itemsizes != 0) | (piece % itemsizes != 0))
        return found

    def append(self, other: "Cutting", numels: Ints) -> "Cutting":
        """Add tensors of `numels` elements after the others, of a regular cutting of files."""
        if self.of is not None:
            rows, zeros = np.arange(len(numels)) + len(self.of.origin), np.zeros_like(numels)
            outer = Cutting.of_files(zip(rows, zeros, numels, other.itemsize, strict=True))
            inner = self.of.append(other, numels)
            return replace(replace(self, of=None).append(outer, numels), of=inner)
        return replace(
            self,
            origin=np.append(self.origin, other.origin),
            piece_numel=np.append(self.piece_numel, other.piece_numel),
            itemsize=np.append(self.itemsize, other.itemsize),
            lead=np.append(self.lead, other.lead),
            first_piece=np.append(self.first_piece, other.first_piece + len(self.file)),
            file=np.append(self.file, other.file),
            offset=np.append(self.offset, other.offset),
            grid=None if self.grid is None else np.append(self.grid, np.full_like(numels, -1)),
        )

    def relocate(self, rows: Ints, other: "Cutting", numels: Ints) -> "Cutting":
        """Let some tensors lie where those of another cutting do; see `append`."""
        order = np.arange(len(self.origin))
        order[rows] = len(order) + np.arange(len(rows))
        return self.append(other, numels).take(order)

    def in_files(self, numbers: Ints) -> "Cutting":
        """Return the same cutting where file k of the files has the number `numbers[k]`."""
        if self.of is not None:
            return replace(self, of=self.of.in_files(numbers))
        return replace(self, file=numbers[self.file])

    def runs(self, numels: Sequence[int]) -> Ints:
        """Count the runs of each tensor that is cut into boxes; `numels` are their elements."""
        if self.grid is None:
            return np.zeros(len(numels), dtype=np.int64)
        counts = np.asarray(numels, dtype=np.int64) // self.piece_numel + 1
        return np.where(self.grid >= 0, counts, 0)

    def pieces(self, tensors: Ints) -> Ints:
        """Count the pieces of tensors that are cut into boxes; 0 for the others."""
        if self.boxes is None or self.grid is None:
            return np.zeros_like(tensors)
        grid = self.grid[tensors]
        return np.where(grid >= 0, self.boxes.pieces[grid], 0)

    def _boxed(
        self, boxes: "Boxes", grid: Ints, segments: Segments, keep: Ints, target_itemsize: int
    ) -> tuple[Ints, Copies]:
        """Find the copies of segments of tensors in boxes, each with its segment's number."""
        tensor, start = segments.tensor[keep], segments.start[keep]
        runs = boxes.locate(grid[tensor], start, segments.stop[keep])
        row, itemsize = keep[runs.row], self.itemsize[tensor[runs.row]]
        copies = Copies(
            file=self.file[runs.piece],
            source=self.offset[runs.piece] + runs.within * itemsize,
            target=segments.target[row] + (runs.start - segments.start[row]) * target_itemsize,
            nbytes=runs.numel * itemsize,
        )
        return row, copies

    def _regular(self, segments: Segments, keep: Ints, target_itemsize: int) -> tuple[Ints, Copies]:
        """Find the copies of segments of regular cuts, each with its segment's number."""
        tensor, start = segments.tensor[keep], segments.start[keep]
        stop, target = segments.stop[keep], segments.target[keep]
        origin, piece = self.origin[tensor], self.piece_numel[tensor]
        first = (origin + start) // piece
        counts = (origin + stop - 1) // piece - first + 1
        row = np.repeat(np.arange(len(tensor)), counts)
        within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        k = first[row] + within
        piece_start = k * piece[row] - origin[row]
        lower = np.maximum(start[row], piece_start)
        upper = np.minimum(stop[row], piece_start + piece[row])
        where = self.first_piece[tensor[row]] + k
        itemsize = self.itemsize[tensor[row]]
        copies = Copies(
            file=self.file[where],
            source=self.offset[where] + self.lead[tensor[row]] + (lower - piece_start) * itemsize,
            target=target[row] + (lower - start[row]) * target_itemsize,
            nbytes=(upper - lower) * itemsize,
        )
        return keep[row], copies


class CuttingBuilder:
    """Collects tensors and the slots that hold them, in any order, into a `Cutting`."""

    def __init__(self, itemsizes: list[int]) -> None:
        count = len(itemsizes)
        self._itemsize = np.asarray(itemsizes, dtype=np.int64)
        self._origin = np.zeros(count, dtype=np.int64)
        self._piece = np.ones(count, dtype=np.int64)
        self._lead = np.zeros(count, dtype=np.int64)
        self._first = np.full(count, -1, dtype=np.int64)
        self._slots: list[Slot] = []
        self._pieces = 0
        self._grids: dict[int, BoxGrid] = {}

    def slot(self, slot: Slot) -> int:
        """Add the places of consecutive pieces; returns their number for `place`."""
        first = self._pieces
        self._slots.append(slot)
        self._pieces += len(slot.files)
        return first

    def assign(
        self, tensor: int, slot: int, *, piece_numel: int, origin: int = 0, lead: int = 0
    ) -> None:
        """Record that a tensor is cut into the pieces of a slot."""
        self._first[tensor] = slot
        self._piece[tensor] = max(1, piece_numel)
        self._origin[tensor] = origin
        self._lead[tensor] = lead

    def place(self, tensor: int, file: int, offset: int, numel: int) -> None:
        """Record that a tensor lies in one piece."""
        slot = self.slot(Slot(np.array([file]), np.array([offset]), np.array([numel])))
        self.assign(tensor, slot, piece_numel=numel)

    def place_boxes(self, tensor: int, slot: int, grid: "BoxGrid") -> None:
        """Record that a tensor is cut into boxes, which are the pieces of a slot."""
        numel = math.prod(grid.shape)
        self.assign(tensor, slot, piece_numel=numel // grid.runs)
        if not grid.is_one_holder:
            self._grids[tensor] = grid

    def missing(self) -> Ints:
        """Return the tensors without a place."""
        return np.flatnonzero(self._first < 0)

    def build(self, of: Cutting | None = None) -> Cutting:
        """Freeze what was collected; `of` is where the pieces lie, if these are of tensors."""
        empty = [np.zeros(0, dtype=np.int64)]
        boxes, grid = self._boxes()
        return Cutting(
            origin=self._origin,
            piece_numel=self._piece,
            itemsize=self._itemsize,
            lead=self._lead,
            first_piece=self._first,
            file=np.concatenate([s.files for s in self._slots] or empty),
            offset=np.concatenate([s.offsets for s in self._slots] or empty),
            boxes=boxes,
            grid=grid,
            of=of,
        )

    def _boxes(self) -> "tuple[Boxes | None, Ints | None]":
        if not self._grids:
            return None, None
        from streamshard.layout.boxes import gather  # not at the top: ZeRO cuts no boxes

        grid = np.full_like(self._first, -1)
        grid[list(self._grids)] = np.arange(len(self._grids))
        return gather(list(self._grids.values()), self._first[list(self._grids)].tolist()), grid


def coalesce(copies: Copies, *, target_itemsize: int, itemsize: int) -> Copies:
    """Merge runs that are consecutive both in one source file and in the target.

    Returns runs in order of target offset. They cover exactly the same bytes.
    """
    order = np.argsort(copies.target, kind="stable")
    file, source = copies.file[order], copies.source[order]
    target, nbytes = copies.target[order], copies.nbytes[order]
    if len(order) == 0:
        return Copies(file, source, target, nbytes)
    written = nbytes // itemsize * target_itemsize
    joined = (
        (file[1:] == file[:-1])
        & (source[1:] == source[:-1] + nbytes[:-1])
        & (target[1:] == target[:-1] + written[:-1])
    )
    heads = np.flatnonzero(np.concatenate([[True], ~joined]))
    return Copies(file[heads], source[heads], target[heads], np.add.reduceat(nbytes, heads))


def partition_segments(group: FlatGroup, rank: int, tensors: Ints, *, itemsize: int) -> Segments:
    """Return the segments that fill a rank's partition of a flat group.

    `tensors`: logical tensor of each parameter, in the param group's own order.
    """
    slices = np.asarray(group.slices(rank), dtype=np.int64).reshape(-1, 3)
    which, begin, numel = slices[:, 0], slices[:, 1], slices[:, 2]
    start = rank * group.partition_numel + begin - group.starts[which]
    return Segments(tensors[which], start, start + numel, begin * itemsize)


def shard_segments(
    numels: Ints,
    world_size: int,
    rank: int,
    tensors: Ints,
    *,
    itemsize: int,
    lasts: Ints | None = None,
) -> Segments:
    """Return the segments that fill a rank's consecutive shards of several parameters.

    `lasts`: the last tensor of each parameter; by default each is one.
    """
    if lasts is not None:
        return _shards_of_parts(numels, world_size, rank, tensors, lasts, itemsize)
    shares = -(-numels // world_size)
    start = np.minimum(rank * shares, numels)
    stop = np.minimum(start + shares, numels)
    return Segments(tensors, start, stop, (np.cumsum(shares) - shares) * itemsize)


def _shards_of_parts(
    numels: Ints, world_size: int, rank: int, tensors: Ints, lasts: Ints, itemsize: int
) -> Segments:
    """Return the segments that fill a rank's shards of parameters of several tensors each."""
    ends, sizes = ends_and_numels(numels, lasts)
    counts, shares = np.diff(lasts, prepend=-1), -(-sizes // world_size)
    # Counted from the beginning of the parameter that a tensor is a part of.
    at = np.cumsum(numels) - numels - np.repeat(ends - sizes, counts)
    first = np.repeat(rank * shares, counts)
    start = np.clip(first - at, 0, numels)
    stop = np.clip(first + np.repeat(shares, counts) - at, 0, numels)
    before = np.repeat(np.cumsum(shares) - shares, counts)
    return Segments(tensors, start, stop, (before + np.maximum(at - first, 0)) * itemsize)


def whole_segment(tensor: int, numel: int) -> Segments:
    one = np.array([tensor], dtype=np.int64)
    return Segments(one, np.zeros_like(one), np.array([numel]), np.zeros_like(one))


def clip(segments: Segments, start: int, stop: int, *, itemsize: int) -> Segments:
    """Cut segments to the target bytes `[start, stop)`; `start` becomes target offset 0.

    `start` and `stop`: byte offsets, multiples of the item size.
    """
    end = segments.target + (segments.stop - segments.start) * itemsize
    lower, upper = np.maximum(segments.target, start), np.minimum(end, stop)
    keep = np.flatnonzero(lower < upper)
    lower, upper, target = lower[keep], upper[keep], segments.target[keep]
    first = segments.start[keep] + (lower - target) // itemsize
    numel = (upper - lower) // itemsize
    return Segments(segments.tensor[keep], first, first + numel, lower - start)
