"""Finds out which rank holds which elements of which tensor, and where in its files.

All numbers come from a source's `Cutting`, which resharding uses too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from streamshard.errors import Option, UsageError
from streamshard.formats.checkpoint import Checkpoint, ModelPart, ModuleEntry, ParamGroup
from streamshard.layout.cutting import whole_segment
from streamshard.model import ITEMSIZE, MASTER, MODULE, ZeroLayout
from streamshard.operations.inspect.file_groups import list_files, relative
from streamshard.operations.inspect.inspect_report import (
    FileSummary,
    HeldRange,
    OwnedPartition,
    OwnedPiece,
    ParameterDetail,
    ParameterSummary,
    RankDetail,
)
from streamshard.sizes import show_ranks, some_of
from streamshard.source.source import Source

Ints = NDArray[np.int64]
_NAMES_SHOWN: Final = 5


def sharing_ranks(group: ParamGroup, layout: ZeroLayout) -> list[int]:
    """List the data-parallel ranks that share a group, in the order of its partitions."""
    return [*layout.sharing_ranks(group.expert_parallel, group.expert_rank)]


def _pieces_of(source: Source, tensors: Ints) -> tuple[Ints, Ints]:
    """Return the first and the last piece of each tensor; for an empty tensor, the first twice."""
    cutting, held = source.cutting, source.checkpoint.tensors
    numels = np.array([held[tensor].numel for tensor in tensors.tolist()], dtype=np.int64)
    origin, piece = cutting.origin[tensors], cutting.piece_numel[tensors]
    first, last = origin // piece, (origin + np.maximum(numels, 1) - 1) // piece
    boxes = cutting.pieces(tensors)
    return first, np.where(boxes, boxes - 1, last)


def _trained(source: Source) -> Iterator[tuple[int, int, Sequence[int], int, int]]:
    """Yield of each trained parameter how its master weights are cut.

    That is their number among the tensors, the number of the param group, the data-parallel ranks
    that share the group in the order of its partitions, and the first and the last piece, which in
    a source of ranks tell the first and the last rank.
    """
    checkpoint, index = source.checkpoint, source.checkpoint.tensor_index()
    groups = [(part, group) for part in checkpoint.model_parts for group in part.groups]
    for number, (part, group) in enumerate(groups):
        rows = np.array([index[part.name, MASTER, n] for n in group.params], dtype=np.int64)
        sharing = sharing_ranks(group, checkpoint.layout)
        columns = (column.tolist() for column in (rows, *_pieces_of(source, rows)))
        for row, first, last in zip(*columns, strict=True):
            yield row, number, sharing, first, last


def ranks_of(source: Source) -> dict[int, tuple[int, tuple[int, ...] | None]]:
    """Return index of a parameter's master weights → (param group, ranks that hold some of them).

    The ranks are data-parallel ranks; they are None for a source that ZeRO did not cut.
    """
    return {
        row: (group, tuple(sharing[first : last + 1]) if source.kind.is_of_ranks else None)
        for row, group, sharing, first, last in _trained(source)
    }


def parameter_summaries(source: Source) -> Iterator[ParameterSummary]:
    for row, group, sharing, first, last in _trained(source):
        tensor = source.checkpoint.tensors[row]
        yield ParameterSummary(
            name=tensor.name,
            shape=tensor.shape,
            numel=tensor.numel,
            group=group,
            pieces=last - first + 1,
            first_rank=sharing[first] if source.kind.is_of_ranks else None,
            last_rank=sharing[last] if source.kind.is_of_ranks else None,
        )


def parameter_details(source: Source, patterns: Sequence[str]) -> tuple[ParameterDetail, ...]:
    if not patterns:
        return ()
    # Not at the top: few look at single tensors.
    from streamshard.formats.name_patterns import is_named

    tensors = list(_named(source.checkpoint))
    names = [one.name for one in tensors]
    for pattern in patterns:
        if not any(is_named(name, [pattern]) for name in names):
            option = Option("params", [pattern])
            raise UsageError(f"{option}: {_no_such_name(pattern, names)}")
    index, ranks = source.checkpoint.tensor_index(), source.kind.ranks_of_files(source)
    return tuple(
        _detail(source, one, index, ranks) for one in tensors if is_named(one.name, patterns)
    )


@dataclass(frozen=True, slots=True)
class _Named:
    """A tensor of the model."""

    model_part: ModelPart
    name: str
    entry: ModuleEntry | None
    """None for a parameter that the module does not list."""
    group: int | None
    param_group: ParamGroup | None


def _named(checkpoint: Checkpoint) -> Iterator[_Named]:
    """Yield the trained parameters group by group, then the other tensors of the module."""
    number = 0
    for model_part in checkpoint.model_parts:
        entries = {entry.name: entry for entry in model_part.module if entry.kind != "extra"}
        for group in model_part.groups:
            for name in group.params:
                yield _Named(model_part, name, entries.pop(name, None), number, group)
            number += 1
        for name, entry in entries.items():
            yield _Named(model_part, name, entry, None, None)


def _no_such_name(pattern: str, names: Sequence[str]) -> str:
    from difflib import get_close_matches  # only a mistake needs it

    near = get_close_matches(pattern, names, _NAMES_SHOWN, 0.4)
    ordered = [*near, *(name for name in names if name not in near)]
    listed = some_of(ordered, len(near) or _NAMES_SHOWN)
    return f"no tensor of the model has such a name; there are {listed}"


def _detail(
    source: Source,
    model_tensor: _Named,
    index: Mapping[tuple[str, str, str], int],
    ranks: Sequence[int | None],
) -> ParameterDetail:
    tensors = source.checkpoint.tensors
    kept = [*(model_tensor.param_group.tensor_states if model_tensor.param_group else ()), MODULE]
    rows = {
        state: index[model_tensor.model_part.name, state, model_tensor.name]
        for state in kept
        if (model_tensor.model_part.name, state, model_tensor.name) in index
    }
    entry = model_tensor.entry
    shape = tensors[next(iter(rows.values()))].shape if rows else entry.shape if entry else ()
    return ParameterDetail(
        name=model_tensor.name,
        model_part=model_tensor.model_part.name,
        kind=entry.kind if entry and not model_tensor.param_group else "param",
        alias_of=entry.alias_of if entry and entry.kind == "alias" else None,
        shape=shape,
        numel=int(np.prod(shape, dtype=np.int64)),
        group=model_tensor.group,
        states={state: tensors[tensor].dtype for state, tensor in rows.items()},
        pieces=tuple(
            piece
            for state, tensor in rows.items()
            for piece in _pieces(source, state, tensor, ranks)
        ),
    )


def _pieces(
    source: Source, state: str, tensor: int, ranks: Sequence[int | None]
) -> Iterator[OwnedPiece]:
    """Yield the places of one tensor's elements, in order of the elements."""
    held = source.checkpoint.tensors[tensor]
    itemsize = ITEMSIZE[held.dtype]
    copies = source.cutting.locate(whole_segment(tensor, held.numel), target_itemsize=itemsize)
    columns = copies.file, copies.source, copies.target, copies.nbytes
    for file, offset, at, nbytes in zip(*(c.tolist() for c in columns), strict=True):
        start, stop = at // itemsize, (at + nbytes) // itemsize
        yield OwnedPiece(state, ranks[file], relative(source, file), start, stop, offset)


def rank_detail(source: Source, rank: int) -> RankDetail:
    layout, option = source.checkpoint.layout, Option("rank", rank)
    if not source.kind.is_of_ranks:
        what, pieces = ("a store", "chunks") if source.kind.is_store else ("this", "pieces")
        message = f"{option}: {what} is not cut among ranks of ZeRO, so there is none to look"
        raise UsageError(f"{message} at; {Option('params')} shows the {pieces}")
    if not layout.stage:
        message = f"{option}: saved without ZeRO (stage 0), where every rank holds everything"
        raise UsageError(f"{message}; {Option('params')} shows where the tensors lie")
    if not 0 <= rank < layout.world_size:
        message = f"{option}: it has data-parallel {show_ranks(range(layout.world_size))}"
        raise UsageError(message)
    ranks = source.kind.ranks_of_files(source)
    own = {relative(source, number) for number, held in enumerate(ranks) if held == rank}
    files: list[FileSummary] = [file for file in list_files(source) if file.path in own]
    return RankDetail(rank, tuple(files), tuple(_partitions(source, rank)))


def _partitions(source: Source, rank: int) -> Iterator[OwnedPartition]:
    layout, index = source.checkpoint.layout, source.checkpoint.tensor_index()
    first = 0
    for model_part in source.checkpoint.model_parts:
        for place, sharer in model_part.held_by(rank, layout):
            group = model_part.groups[place]
            rows = {
                key: np.array([index[model_part.name, key, n] for n in group.params], np.int64)
                for key, state in model_part.kept_states(group, layout).items()
                if state.block == 1 and not state.is_whole
            }
            if group.params:
                yield from _parts_of_group(source, group, first + place, sharer, rows)
        first += len(model_part.groups)


def _parts_of_group(
    source: Source, group: ParamGroup, number: int, sharer: int, rows: Mapping[str, Ints]
) -> Iterator[OwnedPartition]:
    """Yield a rank's partition of a group, or its partition of each sub-group."""
    cutting, masters = source.cutting, rows[MASTER]
    numels = np.array([source.checkpoint.tensors[row].numel for row in masters.tolist()])
    is_cut_alone = source.checkpoint.layout.stage == 3
    slots, lead = cutting.first_piece[masters], cutting.lead[masters]
    # The parameters of one sub-group lie in the same pieces, one after the other.
    borders = np.flatnonzero(np.diff(slots)) + 1 if is_cut_alone else np.zeros(0, np.int64)
    for unit, members in enumerate(np.split(np.arange(len(masters)), borders)):
        tensors = masters[members]
        piece, origin = cutting.piece_numel[tensors], cutting.origin[tensors]
        start = np.clip(sharer * piece - origin, 0, numels[members])
        stop = np.clip((sharer + 1) * piece - origin, 0, numels[members])
        # At stages 1 and 2, `origin` is a parameter's place in the flat group, from which the place
        # of the partition is subtracted.
        at = lead[members] // cutting.itemsize[tensors] + start - (sharer * piece - origin)
        total = int(piece.sum()) if is_cut_alone else int(piece[0])
        indices = np.flatnonzero(stop > start)
        indices = indices[np.argsort(at[indices], kind="stable")]
        columns = (numels[members], start, stop, at)
        where = {
            state: cutting.first_piece[row[members[0]]] + sharer for state, row in rows.items()
        }
        yield OwnedPartition(
            group=number,
            sub_group=unit if is_cut_alone else None,
            numel=total,
            padding=total - int((stop - start).sum()),
            file=relative(source, int(cutting.file[where[MASTER]])),
            offsets={state: int(cutting.offset[row]) for state, row in where.items()},
            ranges=tuple(
                HeldRange(group.params[members[i]], *(int(column[i]) for column in columns))
                for i in indices.tolist()
            ),
        )
