"""Where every element of every logical tensor lies, and the copies that move a range of elements.

Every layout that this project knows is a *regular* cut. A tensor's elements, shifted by the
position of its first element in the sequence that was cut, fall into pieces of equal length, and
piece k lies at a known place. ZeRO-1/2 cuts a flat group into partitions, ZeRO-3 a parameter into
shards, Zarr a tensor into chunks; a tensor that is not cut is one piece. So a cutting is a few
integers per tensor and one (file, offset) per piece. Array arithmetic finds the fragments of any
range, and no list of all fragments is ever in memory.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamshard.layout.zero import FlatGroup
from streamshard.model import Copies, Slot

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segments:
    """Element ranges of logical tensors, each with its target offset; parallel arrays."""

    tensor: Ints
    start: Ints
    stop: Ints
    target: Ints
    """Byte offset where element `start` is written."""


@dataclass(frozen=True, slots=True)
class Cutting:
    """How logical tensors are cut into pieces, and where the pieces lie; row i is tensor i."""

    origin: Ints
    """Position of the tensor's first element in the sequence that was cut into pieces."""
    piece_numel: Ints
    """Elements per piece."""
    itemsize: Ints
    """Bytes per element."""
    lead: Ints
    """Bytes before the tensor's part of each piece, where a piece holds several tensors."""
    first_piece: Ints
    """Row of `file` and `offset` that describes piece 0."""
    file: Ints
    offset: Ints
    """Byte offset of the piece in its file."""

    def locate(self, segments: Segments, *, target_itemsize: int) -> Copies:
        """Find the copies that fill the given segments, one per piece that a segment crosses."""
        keep = np.flatnonzero(segments.stop > segments.start)
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
        return Copies(
            file=self.file[where],
            source=self.offset[where] + self.lead[tensor[row]] + (lower - piece_start) * itemsize,
            target=target[row] + (lower - start[row]) * target_itemsize,
            nbytes=(upper - lower) * itemsize,
        )


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

    def slot(self, slot: Slot) -> int:
        """Add the places of consecutive pieces; returns their number for `place`."""
        first = self._pieces
        self._slots.append(slot)
        self._pieces += len(slot.files)
        return first

    def place(
        self, tensor: int, slot: int, *, piece_numel: int, origin: int = 0, lead: int = 0
    ) -> None:
        """Record that a tensor is cut into the pieces of a slot."""
        self._first[tensor] = slot
        self._piece[tensor] = max(1, piece_numel)
        self._origin[tensor] = origin
        self._lead[tensor] = lead

    def missing(self) -> Ints:
        """Return the tensors without a place."""
        return np.flatnonzero(self._first < 0)

    def build(self) -> Cutting:
        """Freeze what was collected."""
        empty = [np.zeros(0, dtype=np.int64)]
        return Cutting(
            origin=self._origin,
            piece_numel=self._piece,
            itemsize=self._itemsize,
            lead=self._lead,
            first_piece=self._first,
            file=np.concatenate([s.files for s in self._slots] or empty),
            offset=np.concatenate([s.offsets for s in self._slots] or empty),
        )


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

    Parameters
    ----------
    tensors
        Logical tensor of each parameter, in the param group's own order.
    """
    slices = np.asarray(group.cut(rank).slices, dtype=np.int64).reshape(-1, 3)
    which, begin, numel = slices[:, 0], slices[:, 1], slices[:, 2]
    start = rank * group.partition_numel + begin - group.starts[which]
    return Segments(tensors[which], start, start + numel, begin * itemsize)


def owned_segments(group: FlatGroup, rank: int, tensors: Ints, *, itemsize: int) -> Segments:
    """Return the segments of a state that a rank keeps whole for each parameter it owns a part of.

    Parameters
    ----------
    tensors
        Logical tensor of each parameter, in the param group's own order.
    """
    owned = np.asarray(group.owned(rank), dtype=np.int64)
    numels = group.numels[owned]
    return Segments(
        tensors[owned], np.zeros_like(numels), numels, (np.cumsum(numels) - numels) * itemsize
    )


def shard_segments(
    numels: Ints, world_size: int, rank: int, tensors: Ints, *, itemsize: int
) -> Segments:
    """Return the segments that fill a rank's consecutive shards of several parameters."""
    shares = -(-numels // world_size)
    start = np.minimum(rank * shares, numels)
    stop = np.minimum(start + shares, numels)
    return Segments(tensors, start, stop, (np.cumsum(shares) - shares) * itemsize)


def whole_segment(tensor: int, numel: int) -> Segments:
    """Return the segment that fills a region with one whole tensor."""
    one = np.array([tensor], dtype=np.int64)
    return Segments(one, np.zeros_like(one), np.array([numel]), np.zeros_like(one))


def clip(segments: Segments, start: int, stop: int, *, itemsize: int) -> Segments:
    """Cut segments to the target bytes `[start, stop)`; `start` becomes target offset 0.

    Parameters
    ----------
    start, stop
        Byte offsets, multiples of the item size.
    """
    end = segments.target + (segments.stop - segments.start) * itemsize
    lower, upper = np.maximum(segments.target, start), np.minimum(end, stop)
    keep = np.flatnonzero(lower < upper)
    lower, upper, target = lower[keep], upper[keep], segments.target[keep]
    first = segments.start[keep] + (lower - target) // itemsize
    numel = (upper - lower) // itemsize
    return Segments(segments.tensor[keep], first, first + numel, lower - start)
