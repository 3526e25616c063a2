"""Makes the page that `inspect` draws: the report, how parameters are cut, and where bytes lie.

The numbers come from the same arithmetic that reads and reshards the checkpoint.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, pairwise
from pathlib import PurePosixPath
from typing import Any, Final, TypeVar

import numpy as np

from streamshard.drawing.page import Document, column, page, pooled, table
from streamshard.errors import UsageError
from streamshard.formats.checkpoint import Checkpoint, ModelPart
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.cut import muon_order
from streamshard.formats.deepspeed.cut.part_cut import cut_model_part, flat_groups
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import known_degrees
from streamshard.io.entries import resolve
from streamshard.layout.cutting import Ints
from streamshard.layout.zero import ceil_div, ends_and_numels
from streamshard.model import ITEMSIZE, MASTER, MODULE, NoteKind, ZeroLayout
from streamshard.native.target_settings import require_allowed, target_settings
from streamshard.operations.inspect.file_groups import relative
from streamshard.operations.inspect.inspect_report import (
    CheckpointList,
    FileSummary,
    IncompleteCheckpoint,
    Inspection,
)
from streamshard.operations.inspect.ownership import sharing_ranks
from streamshard.registry import reader_of
from streamshard.sizes import counted
from streamshard.source.source import Source

_TAPE_ROWS: Final = 8
_MOST_COLOURS: Final = 96
"""Most colours in a param group; similar ones differ by their places."""
_MOST_CHARACTERS: Final = 1 << 21
"""Longer columns than these would make a page that is slow to open: without them, it names the
command that tells where bytes lie."""


T = TypeVar("T")


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
    meant = ["chunk"] if source.kind.is_store else []
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
        return self.source if self.source and not self.source.kind.is_of_ranks else None


def _as_it_is(source: Source) -> _Cut:
    layout, checkpoint = source.checkpoint.layout, source.checkpoint
    title = f"As saved by {_ranks(checkpoint, layout)}, ZeRO stage {layout.stage}"
    if not source.kind.is_of_ranks:
        where = "In the store, one" if source.kind.is_store else "One"
        title = f"{where} tensor after the other, cut among no ranks"
    return _Cut(checkpoint, layout, checkpoint.module_dtype, title, source)


def _resized(source: Source, world_size: int | None, zero_stage: int | None) -> _Cut:
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
    master_numels = cut.checkpoint.master_numels(model_part)
    numels = np.array([master_numels[name] for name in group.params], dtype=np.int64)
    before, ranks = np.cumsum(numels) - numels, sharing_ranks(group, layout)
    borders: list[int] = []
    chunks = None
    if cut.tape is not None:
        length, ranks = max(1, ceil_div(int(numels.sum()), _TAPE_ROWS)), []
        origin, piece, at = before, np.full_like(numels, length), np.zeros_like(numels)
        rows = [cut.checkpoint.tensor_index()[model_part.name, MASTER, name] for name in params]
        chunks = column(cut.tape.cutting.piece_numel[rows])
    elif layout.stage < 3:
        flat = flat_groups(cut.checkpoint, model_part, layout, cut.module_dtype)[place]
        length = flat.partition_numel
        origin, piece, at = flat.starts, np.full_like(numels, length), np.zeros_like(numels)
    else:
        lasts = np.cumsum(model_part.tensor_counts(group), dtype=np.int64) - 1
        ends, sizes = ends_and_numels(numels, lasts)
        counts, shares = np.diff(lasts, prepend=-1), -(-sizes // len(ranks))
        origin, piece = before - np.repeat(ends - sizes, counts), np.repeat(shares, counts)
        at, length = np.repeat(np.cumsum(shares) - shares, counts), int(shares.sum())
        borders = [int(at[end]) for end in _sub_group_ends(cut, model_part, place)]
    position = {name: number for number, name in enumerate(group.params)}
    order = np.array([position[name] for name in params], dtype=np.int64)
    count = len(ranks) or max(1, ceil_div(int(numels.sum()), length))
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


def cut_page(inspection: Inspection, source: Source, cut: Document) -> bytes:
    is_of_ranks = source.kind.is_of_ranks
    numbers = {file.path: number for number, file in enumerate(inspection.file_list)}
    listed = np.array([numbers.get(relative(source, n), -1) for n in range(len(source.files))])
    ranks = dict(zip(listed.tolist(), source.kind.ranks_of_files(source), strict=True))
    document = {
        **asdict(replace(inspection, parameters=(), file_list=())),
        "parameters": table(inspection.parameters),
        "file_list": _files(inspection.file_list, list(map(ranks.get, numbers.values())))
        if is_of_ranks
        else {},
        "kind_title": reader_of(inspection.kind).title,
        "alarms": _alarms(source),
        **cut,
    }
    if is_of_ranks:
        _add_places(document["panels"], source, listed)
    pool: dict[str, int] = {}
    pooled(document["panels"], pool)
    if sum(map(len, pool)) > _MOST_CHARACTERS:
        document["panels"] = [{**panel, "places": None} for panel in document["panels"]]
        pool.clear()
    document["panels"] = pooled(document["panels"], pool)
    document["columns"] = [*map(json.loads, pool)]
    return page(f"{resolve(source.path).name} at {inspection.tag}", document)


def unopened_page(report: CheckpointList | IncompleteCheckpoint) -> bytes:
    document: Document = {**asdict(report), "kind_title": "directory of checkpoints"}
    if isinstance(report, IncompleteCheckpoint):
        document["kind_title"] = reader_of(report.kind).title
        parsed = [names.parse(PurePosixPath(file.path).name) for file in report.file_list]
        ranks = [None if one is None else one.dp_rank for one in parsed]
        document["file_list"] = _files(report.file_list, ranks)
        document["model_parts"] = len({one.mp_rank for one in parsed if one is not None})
    return page(PurePosixPath(report.path).name, document)


def _files(files: Sequence[FileSummary], ranks: Sequence[int | None]) -> Document:
    return {**table(files), "rank": column(ranks)}


def _alarms(source: Source) -> list[str]:
    """Return those of its notes that put a checkpoint in doubt."""
    doubts = tuple(n for n in source.checkpoint.notes if n.kind is NoteKind.MIXED)
    doubted = replace(source.checkpoint, notes=doubts, dropped=None)
    return [*source.kind.remarks(source), *doubted.remarks]


def _add_places(panels: Sequence[Document], source: Source, listed: Ints) -> None:
    """Add to each param group where each state of its parameters lies.

    Element e of a parameter is in piece k = (origin + e) // piece, which has the number `slot` + k,
    at (`lead` + origin + e - k * piece) * itemsize bytes from the piece's offset. A column that the
    group's first way has as well is left out.
    """
    parts = [(p, g) for p in source.checkpoint.model_parts for g in p.groups if g.params]
    index = source.checkpoint.tensor_index()
    for panel, (model_part, group) in zip(panels, parts, strict=True):
        places = []
        states = [key for key, state in group.tensor_states.items() if state.block == 1]
        for state in (*states, MODULE):
            keys = [(model_part.name, state, name) for name in group.params]
            if all(key in index for key in keys):
                rows = np.array([index[key] for key in keys], dtype=np.int64)
                places.append(_place(source, state, rows, listed, panel["ways"][0]))
        panel["places"] = None if None in places else places


def _place(
    source: Source, state: str, rows: Ints, listed: Ints, drawn: Mapping[str, Any]
) -> Document | None:
    """Return where one state of parameters lies; None if it is not cut regularly, or too much."""
    cutting, tensors = source.cutting, source.checkpoint.tensors
    if cutting.of is not None or cutting.pieces(rows).any():
        return None
    state_tensors = [tensors[row] for row in rows.tolist()]
    numels = np.array([tensor.numel for tensor in state_tensors], dtype=np.int64)
    origin, piece = cutting.origin[rows], cutting.piece_numel[rows]
    itemsize = cutting.itemsize[rows]
    first = origin // piece
    lower = cutting.first_piece[rows] + first
    upper = np.where(numels > 0, lower + (origin + numels - 1) // piece - first + 1, lower)
    ranges = set(zip(lower.tolist(), upper.tolist(), strict=True))
    if sum(stop - start for start, stop in ranges) > _MOST_CHARACTERS:
        return None
    pieces = np.unique(np.concatenate([np.arange(*ends) for ends in ranges]))
    columns = {"origin": origin, "piece": piece, "lead": cutting.lead[rows] // itemsize}
    packed = {name: column(values) for name, values in columns.items()}
    aliases = {"origin": "origin", "piece": "piece", "lead": "at"}
    return {
        "state": state,
        "dtype": state_tensors[0].dtype,
        "itemsize": int(itemsize[0]),
        "slot": column(np.searchsorted(pieces, lower) - first),
        "file": column(listed[cutting.file[pieces]]),
        "offset": column(cutting.offset[pieces]),
        **{name: values for name, values in packed.items() if values != drawn[aliases[name]]},
    }
