"""How model parallelism cuts a tensor, and how the parts of one cut are made of those of another.

A checkpoint of a job with tensor or pipeline parallelism is a set of parts of the model, one for
each model-parallel rank. A *model cut* says, for one tensor, which boxes of the whole tensor each
of these ranks has, and where in the rank's own tensor they lie. Ranks may have the same boxes
(replicated), and may have none (a stage without the layer). What a rank has is cut once more, among
its data-parallel ranks, by ZeRO; that is another cut, which `cutting` composes with this one.

Every cut of DeepSpeed's is of this kind: blocks of rows or columns, several sub-parameters in one
(query, key and value), of which some may be replicated, and blocks in any order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

import numpy as np

from streamshard.layout.boxes import BoxGrid, Ints, NotTiledError, grid_of

Shape = tuple[int, ...]

_PIECES: Final = 64
"""Pieces that are compared at a time with all of another cut."""


@dataclass(frozen=True, slots=True)
class ModelCut:
    """How one tensor is cut among model-parallel ranks; pieces are parallel arrays."""

    shape: Shape
    """Shape of the whole tensor."""
    shards: tuple[Shape | None, ...]
    """Shape on each rank; None for a rank that has no part. All have the whole tensor's count of
    dimensions. Files may hold the same elements in another shape."""
    rank: Ints
    """The rank that has each piece; in ascending order."""
    whole: Ints
    """Where each piece begins in the whole tensor, (pieces, dimensions)."""
    local: Ints
    """Where it begins in its rank's tensor."""
    sizes: Ints
    """Its lengths."""

    def __post_init__(self) -> None:
        """Check that the pieces fill each rank's tensor, and together the whole one."""
        for number, shard in enumerate(self.shards):
            mine = self.rank == number
            if shard is not None and 0 not in shard:
                grid_of(shard, self.local[mine], self.sizes[mine])
            elif mine.any():
                raise NotTiledError(f"rank {number} has pieces of a tensor, and no elements of it")
        if 0 not in self.shape:
            first = self._first_holders()
            grid_of(self.shape, self.whole[first], self.sizes[first])

    @property
    def is_whole(self) -> bool:
        """Whether each rank that has a part of the tensor has all of it."""
        return all(shard in (None, self.shape) for shard in self.shards)

    @property
    def most_holders(self) -> int:
        """Count of the ranks that have the same piece, where most have."""
        return int(self._ordinals().max(initial=0)) + 1

    def reshaped(self, shape: Shape) -> "ModelCut":
        """Return the same cut of a tensor with the same elements in another shape."""
        if shape == self.shape:
            return self
        if not self.is_whole or np.prod(shape, dtype=object) != np.prod(self.shape, dtype=object):
            raise NotTiledError(f"cut in the shape {list(self.shape)}, not in {list(shape)}")
        return whole_cut(shape, [shard is not None for shard in self.shards])

    def spread(self, over: Sequence[int | None]) -> "ModelCut":
        """Return the cut of more ranks, each of which is like one of these, or has nothing.

        `over`: of each new rank: the rank here that it is like. Each rank here is there at least
        once.
        """
        rows = [
            np.flatnonzero(self.rank == rank) if rank is not None else np.zeros(0, np.int64)
            for rank in over
        ]
        taken = np.concatenate(rows).astype(np.int64)
        return replace(
            self,
            shards=tuple(None if rank is None else self.shards[rank] for rank in over),
            rank=np.repeat(np.arange(len(over)), [len(row) for row in rows]),
            whole=self.whole[taken],
            local=self.local[taken],
            sizes=self.sizes[taken],
        )

    def _ordinals(self) -> Ints:
        """Number the ranks that have the same piece, piece by piece, from 0."""
        seen: dict[bytes, int] = {}
        ordinals = np.zeros(len(self.rank), dtype=np.int64)
        for row, key in enumerate(np.hstack([self.whole, self.sizes])):
            ordinals[row] = seen.setdefault(key.tobytes(), 0)
            seen[key.tobytes()] += 1
        return ordinals

    def _first_holders(self, choice: int = 0) -> Ints:
        """Return one row for each different piece: of the holder with this number, if there is."""
        last: dict[bytes, int] = {}
        for row, (key, number) in enumerate(
            zip(np.hstack([self.whole, self.sizes]), self._ordinals().tolist(), strict=True)
        ):
            if number <= choice:
                last[key.tobytes()] = row
        return np.array(list(last.values()), dtype=np.int64)


def whole_cut(shape: Shape, holds: Sequence[bool]) -> ModelCut:
    """Return the cut of a tensor that each rank has all of, or nothing of."""
    ranks = np.flatnonzero(holds) if 0 not in shape else np.zeros(0, np.int64)
    corner = np.zeros((len(ranks), len(shape)), np.int64)
    sizes = np.tile(np.array(shape, np.int64), (len(ranks), 1))
    return ModelCut(
        shape,
        tuple(shape if is_holder else None for is_holder in holds),
        ranks,
        corner,
        corner,
        sizes,
    )


def segments_cut(shape: Shape, dimension: int, segments: Sequence[Sequence[int] | int]) -> ModelCut:
    """Return the cut of a tensor that is several sub-tensors in a row, along one dimension.

    `segments`: of each sub-tensor: the width of each rank's part of it, or for one that every rank
    has whole its own width.

    Examples
    --------
    >>> cut = segments_cut((6, 2), 0, [[2, 1], 3])  # queries split, keys and values replicated
    >>> cut.shards, cut.rank.tolist(), cut.whole[:, 0].tolist(), cut.local[:, 0].tolist()
    (((5, 2), (4, 2)), [0, 0, 1, 1], [0, 3, 2, 3], [0, 2, 0, 1])
    """
    count = max(1 if isinstance(segment, int) else len(segment) for segment in segments)
    rows: list[tuple[int, int, int, int]] = []
    totals, at = [0] * count, 0
    for segment in segments:
        widths = [segment] * count if isinstance(segment, int) else list(segment)
        starts = [0] * count if isinstance(segment, int) else list(accumulate(widths, initial=0))
        for rank, width in enumerate(widths):
            rows += [(rank, at + starts[rank], totals[rank], width)] if width else []
            totals[rank] += width
        at += segment if isinstance(segment, int) else sum(segment)
    if at != shape[dimension]:
        raise NotTiledError(f"parts of {at} in a dimension of {shape[dimension]}")
    rows = sorted(rows) if 0 not in shape else []
    columns = np.array(rows, np.int64).reshape(-1, 4)
    corner = np.zeros((len(rows), len(shape)), np.int64)
    along = np.arange(len(shape)) == dimension
    return ModelCut(
        shape,
        tuple((*shape[:dimension], width, *shape[dimension + 1 :]) for width in totals),
        columns[:, 0],
        np.where(along, columns[:, 1:2], corner),
        np.where(along, columns[:, 2:3], corner),
        np.where(along, columns[:, 3:4], np.array(shape)),
    )


def split_cut(shape: Shape, dimension: int, widths: Sequence[int]) -> ModelCut:
    """Return the cut of a tensor of which each rank has a block of rows, or columns, in order."""
    return segments_cut(shape, dimension, [widths])


@dataclass(frozen=True, slots=True)
class Recut:
    """How one rank's tensor in a target cut is made of the ranks' tensors in a source cut."""

    grid: BoxGrid
    """The rank's tensor, in boxes whose holders are tensors of the source's ranks."""
    ranks: Ints
    """The source's rank that holds each box."""


def recut(target: ModelCut, rank: int, source: ModelCut, *, holder: int = 0) -> Recut | None:
    """Compose two cuts of one tensor; None if the target's rank has no elements of it.

    `holder`: of pieces that several of the source's ranks have: which of these to take, by its
    number. The last one, where there are fewer.
    """
    if target.shape != source.shape:
        if target.is_whole:
            target = target.reshaped(source.shape)
        else:
            source = source.reshaped(target.shape)
    shard = target.shards[rank]
    if shard is None or 0 in shard:
        return None
    pieces = np.flatnonzero(target.rank == rank)
    source_pieces = source._first_holders(holder)
    pairs = [
        _meeting(target, pieces[at : at + _PIECES], source, source_pieces)
        for at in range(0, max(1, len(pieces)), _PIECES)
    ]
    targets, sources = (np.concatenate(column) for column in zip(*pairs, strict=True))
    low = np.maximum(target.whole[targets], source.whole[sources])
    high = _ends(target, source, targets, sources)
    offsets = low - target.whole[targets] + target.local[targets]
    in_holder = low - source.whole[sources] + source.local[sources]
    ranks = source.rank[sources]
    shapes = [source.shards[number] for number in ranks.tolist()]
    lengths = np.array(shapes, dtype=np.int64).reshape(offsets.shape)
    grid = grid_of(shard, offsets, high - low, holders=(offsets - in_holder, lengths))
    return Recut(grid, ranks)


def _meeting(target: ModelCut, mine: Ints, source: ModelCut, theirs: Ints) -> tuple[Ints, Ints]:
    """Return the pairs of a piece of the target and one of the source that have elements alike."""
    one, other = (index.reshape(-1) for index in np.meshgrid(mine, theirs, indexing="ij"))
    low = np.maximum(target.whole[one], source.whole[other])
    meets = (low < _ends(target, source, one, other)).all(axis=1)
    return one[meets], other[meets]


def _ends(target: ModelCut, source: ModelCut, one: Ints, other: Ints) -> Ints:
    """Return where the common elements of each pair of pieces end."""
    ends: Ints = np.minimum(
        target.whole[one] + target.sizes[one], source.whole[other] + source.sizes[other]
    )
    return ends
