"""Computes what a page draws: how a checkpoint's parameters are cut, or would be cut.

The numbers come from the same arithmetic that reads and reshards the checkpoint.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Final, TypeVar

import numpy as np

from streamshard.drawing.page import Document, column
from streamshard.errors import UsageError
from streamshard.formats.checkpoint import Checkpoint, ModelPart
from streamshard.formats.deepspeed.cut import muon_order
from streamshard.formats.deepspeed.cut.part_cut import cut_model_part, flat_groups
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import known_degrees
from streamshard.layout.zero import ceil_div, ends_and_numels
from streamshard.model import ITEMSIZE, MASTER, ZeroLayout
from streamshard.operations.inspect.ownership import sharing_ranks
from streamshard.operations.native.target_settings import require_allowed, target_settings
from streamshard.operations.source.source import Source
from streamshard.sizes import counted

T = TypeVar("T")

_TAPE_ROWS: Final = 8
_MOST_COLOURS: Final = 96
"""Most colours in a param group; similar ones differ by their places."""


def cut_of(
    source: Source, *, world_size: int | None = None, zero_stage: int | None = None
) -> Document:
    """Describe how a checkpoint is cut: a panel for each param group, and what borders mean.

    `world_size` and `zero_stage`: describe too how `repartition` would cut it. If only one is
    given, the other one stays as it was saved.
    """
    if source.checkpoint.foreign:
        raise UsageError("not cut among ZeRO's ranks: nothing to draw")
    cuts = [_as_it_is(source)]
    if world_size is not None or zero_stage is not None:
        cuts.append(_resized(source, world_size, zero_stage))
    if not source.checkpoint.layout.stage:
        raise UsageError("saved without ZeRO (stage 0), of which nothing is cut: nothing to draw")
    panels = [
        _panel(cuts, number, place)
        for number, model_part in enumerate(source.checkpoint.model_parts)
        for place, group in enumerate(model_part.groups)
        if group.params
    ]
    meant = ["chunk"] if source.kind == "store" else []
    meant += ["sub-group"] if any(way["borders"] for p in panels for way in p["ways"]) else []
    return {"border": f"a {' or '.join(meant)} ends" if meant else "", "panels": panels}


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a whole checkpoint is cut."""

    checkpoint: Checkpoint
    layout: ZeroLayout
    module_dtype: str
    title: str
    source: Source | None = None
    """The source that is cut in this way; None for a cut that would be written."""

    @property
    def tape(self) -> Source | None:
        """The source, if no ranks cut it: then it is drawn as a tape that is wrapped into rows."""
        return self.source if self.source and not self.source.is_of_ranks else None


def _as_it_is(source: Source) -> _Cut:
    layout, checkpoint = source.checkpoint.layout, source.checkpoint
    title = f"As saved by {_ranks(checkpoint, layout)}, ZeRO stage {layout.stage}"
    if not source.is_of_ranks:
        where = "In the store, one" if source.kind == "store" else "One"
        title = f"{where} tensor after the other, cut among no ranks"
    return _Cut(checkpoint, layout, checkpoint.module_dtype, title, source)


def _resized(source: Source, world_size: int | None, zero_stage: int | None) -> _Cut:
    """Cut a checkpoint as `repartition` does."""
    ranks = world_size if world_size is not None else source.checkpoint.ranks
    dp_world_size = require_allowed(source.checkpoint, ranks)
    settings = target_settings(source.checkpoint, dp_world_size, zero_stage, None)
    checkpoint = muon_order.in_order_of(source.checkpoint, settings.layout.stage, source.like)
    title = f"For {_ranks(checkpoint, settings.layout)}, ZeRO stage {settings.layout.stage}"
    return _Cut(checkpoint, settings.layout, settings.module_dtype, title)


def _ranks(checkpoint: Checkpoint, layout: ZeroLayout) -> str:
    kind = "data-parallel rank" if len(checkpoint.model_parts) > 1 else "rank"
    return counted(layout.world_size, kind)


def _panel(cuts: Sequence[_Cut], number: int, place: int) -> Document:
    """Describe one param group in every way; a colour means the same parameters in all of them."""
    checkpoint = cuts[0].checkpoint
    model_part = checkpoint.model_parts[number]
    group = model_part.groups[place]
    title = f"Param group {group.number}"
    if group.expert_parallel > 1:
        title += f", expert rank {group.expert_rank} of {group.expert_parallel}"
    if model_part.name:
        degrees = known_degrees(checkpoint)
        part = f" ({degrees.position(number)})" if degrees is not None else ""
        title = f"{model_part.name}{part}, {title[0].lower()}{title[1:]}"
    numels = checkpoint.master_numels(model_part)
    total = sum(numels[name] for name in group.params)
    title += f": {counted(len(group.params), 'parameter')}, {counted(total, 'element')}"
    runs = _alike_by_name(group.params)
    note = f"{len(group.params):,} parameters drawn as {len(runs)}, by how their names begin"
    return {
        "title": title,
        "count": len(group.params),
        "note": note if len(runs) < len(group.params) else "",
        "colours": [name for name, _ in runs],
        "colour": column(np.repeat(np.arange(len(runs)), [count for _, count in runs])),
        "itemsize": ITEMSIZE[group.master_dtype],
        "ways": [
            _way(cut, cut.checkpoint.model_parts[number], place, group.params) for cut in cuts
        ],
    }


def _alike_by_name(params: Sequence[str]) -> list[tuple[str, int]]:
    """Group consecutive parameters that have one colour: (name of the group, their count).

    If there are too many for a colour each, names are compared to the greatest depth that gives no
    more groups than there are colours. If that gives too few groups, the groups of the next depth
    are merged in equal numbers: a model of a thousand layers is drawn some layers at a time.
    """
    if len(params) <= _MOST_COLOURS:
        return [(name, 1) for name in params]
    parts = [name.split(".") for name in params]

    def runs(depth: int) -> list[tuple[str, int]]:
        keys = (".".join(part[:depth]) for part in parts)
        return [(key, len(list(same))) for key, same in groupby(keys)]

    depth = max(map(len, parts))
    while depth and len(runs(depth)) > _MOST_COLOURS:
        depth -= 1
    found = runs(depth)
    if depth and len(found) * 4 >= _MOST_COLOURS:
        return found
    finer = runs(depth + 1)
    spans = _chunked(finer, _MOST_COLOURS)
    return [(f"{span[0][0]} … {span[-1][0]}", sum(count for _, count in span)) for span in spans]


def _chunked(found: Sequence[T], most: int) -> list[Sequence[T]]:
    """Put neighbours together, so many that at most `most` groups are left."""
    size = -(-len(found) // most)
    return [found[at : at + size] for at in range(0, len(found), size)]


def _way(cut: _Cut, model_part: ModelPart, place: int, params: Sequence[str]) -> Document:
    """Cut a param group into rows; the columns are in the order of `params`.

    A row is a rank, or a piece of a tape, which has no ranks. A parameter whose first element is
    element `origin` of a sequence that is cut every `piece` elements has its part in row k at `at`,
    or further right in the row where it begins. `borders` are where sub-groups end in every row.
    """
    group, layout = model_part.groups[place], cut.layout
    numels = cut.checkpoint.master_numels(model_part)
    own = np.array([numels[name] for name in group.params], dtype=np.int64)
    before, ranks = np.cumsum(own) - own, sharing_ranks(group, layout)
    borders: list[int] = []
    chunks = None
    if cut.tape is not None:
        length, ranks = max(1, ceil_div(int(own.sum()), _TAPE_ROWS)), []
        origin, piece, at = before, np.full_like(own, length), np.zeros_like(own)
        rows = [cut.checkpoint.tensor_index()[model_part.name, MASTER, name] for name in params]
        chunks = column(cut.tape.cutting.piece_numel[rows])
    elif layout.stage < 3:
        flat = flat_groups(cut.checkpoint, model_part, layout, cut.module_dtype)[place]
        length = flat.partition_numel
        origin, piece, at = flat.starts, np.full_like(own, length), np.zeros_like(own)
    else:
        lasts = np.cumsum(model_part.tensor_counts(group), dtype=np.int64) - 1
        ends, sizes = ends_and_numels(own, lasts)
        counts, shares = np.diff(lasts, prepend=-1), -(-sizes // len(ranks))
        origin, piece = before - np.repeat(ends - sizes, counts), np.repeat(shares, counts)
        at, length = np.repeat(np.cumsum(shares) - shares, counts), int(shares.sum())
        borders = [int(at[end]) for end in _sub_group_ends(cut, model_part, place)]
    position = {name: number for number, name in enumerate(group.params)}
    order = np.array([position[name] for name in params], dtype=np.int64)
    count = len(ranks) or max(1, ceil_div(int(own.sum()), length))
    return {
        "title": cut.title,
        "rows": count,
        "length": length,
        "ranks": column(ranks),
        "borders": column(borders),
        "origin": column(origin[order]),
        "piece": column(np.maximum(piece, 1)[order]),
        "at": column(at[order]),
        "chunks": chunks,
    }


def _sub_group_ends(cut: _Cut, model_part: ModelPart, place: int) -> Iterator[int]:
    """Yield the parameters before which a sub-group ends."""
    if cut.source is None:
        sub_groups = cut_model_part(
            cut.checkpoint, model_part, cut.layout, cut.module_dtype
        ).sub_groups
        yield from (unit.first for unit in sub_groups if unit.group == place and unit.first)
        return
    index, cutting = cut.checkpoint.tensor_index(), cut.source.cutting
    names = model_part.groups[place].params
    slots = [int(cutting.first_piece[index[model_part.name, MASTER, name]]) for name in names]
    yield from (i for i, (one, other) in enumerate(pairwise(slots), 1) if one != other)
