"""Computes the content of a picture: how a checkpoint's parameters are cut, or would be cut.

The numbers come from the same arithmetic that reads and reshards the checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Final, Self

import numpy as np

from streamshard.drawing.picture import Half, Panel, Picture, PictureRow, Strip
from streamshard.errors import UsageError
from streamshard.formats.checkpoint import Checkpoint, ModelPart, ParamGroup
from streamshard.formats.deepspeed.cut import muon_order
from streamshard.formats.deepspeed.cut.part_cut import cut_model_part, flat_groups
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import known_degrees
from streamshard.io.entries import resolve
from streamshard.layout.bands import Band, Cut, flat_cut, shard_cut, tape_cut
from streamshard.model import ITEMSIZE, MASTER, ZeroLayout
from streamshard.operations.inspect.inspect_report import degrees_text
from streamshard.operations.inspect.ownership import sharing_ranks
from streamshard.operations.native.target_settings import require_allowed, target_settings
from streamshard.operations.source.source import Source
from streamshard.sizes import counted, show_bytes

_MOST_ROWS: Final = 32
_MOST_PANELS: Final = 8
_TAPE_ROWS: Final = 8
_MOST_UNITS: Final = 96
"""Most colours in a picture; similar ones differ by their places."""
_MOST_RUNS: Final = 2 * _MOST_UNITS
"""Most parts of one param group that are drawn."""


@dataclass(frozen=True, slots=True)
class Named:
    """The parameters that are drawn together, and their names."""

    units: tuple[str, ...]
    unit_of: dict[str, int]
    is_single: bool
    """Whether every parameter has a colour of its own."""

    @classmethod
    def of(cls, params: Sequence[str]) -> Self:
        """Give each parameter a colour; if there are too many, one to those of a common prefix."""
        if len(params) <= _MOST_UNITS:
            return cls(tuple(params), {name: i for i, name in enumerate(params)}, True)
        runs = _alike_by_name(params)
        which = np.repeat(np.arange(len(runs)), [count for _, count in runs]).tolist()
        units = tuple(key for key, _ in runs)
        return cls(units, dict(zip(params, which, strict=True)), False)

    def runs(self, names: Sequence[str]) -> list[tuple[int, list[str]]]:
        """Group consecutive parameters of the same colour: (unit, its members here).

        In round-robin order, parameters of one colour lie far apart. If there are too many groups,
        neighbours of different colours are merged, in the colour of the first.
        """
        found = [(u, list(same)) for u, same in groupby(names, key=self.unit_of.__getitem__)]
        if len(found) <= _MOST_RUNS:
            return found
        size = -(-len(found) // _MOST_RUNS)
        spans = (found[at : at + size] for at in range(0, len(found), size))
        return [(span[0][0], [name for _, some in span for name in some]) for span in spans]

    def title(self, unit: int, members: Sequence[str]) -> str:
        """Return the title of a run, with the count of its parameters."""
        if len(members) == 1:
            return members[0]
        is_one = all(self.unit_of[name] == unit for name in members)
        name = self.units[unit] if is_one else f"{members[0]} … {members[-1]}"
        return f"{name}: {len(members):,} parameters"


def _alike_by_name(params: Sequence[str]) -> list[tuple[str, int]]:
    """Group consecutive parameters by their names: (name of the group, count of parameters).

    Names are compared to the greatest depth that gives no more groups than there are colours. If
    that gives too few groups, the groups of the next depth are merged in equal numbers: a model of
    a thousand layers is drawn some layers at a time.
    """
    parts = [name.split(".") for name in params]

    def runs(depth: int) -> list[tuple[str, int]]:
        keys = (".".join(part[:depth]) for part in parts)
        return [(key, len(list(same))) for key, same in groupby(keys)]

    depth = max(map(len, parts))
    while depth and len(runs(depth)) > _MOST_UNITS:
        depth -= 1
    found = runs(depth)
    if depth and len(found) * 4 >= _MOST_UNITS:
        return found
    finer = runs(depth + 1)
    size = -(-len(finer) // _MOST_UNITS)
    spans = (finer[at : at + size] for at in range(0, len(finer), size))
    return [(f"{span[0][0]} … {span[-1][0]}", sum(count for _, count in span)) for span in spans]


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to cut a whole checkpoint."""

    checkpoint: Checkpoint
    layout: ZeroLayout
    module_dtype: str
    title: str
    source: Source | None = None
    """The source that is cut in this way; None for a cut that would be written."""


def picture_of(
    source: Source, *, world_size: int | None = None, zero_stage: int | None = None
) -> Picture:
    """Compute the content of a picture of a checkpoint.

    `world_size` and `zero_stage`: show next to it how `repartition` would cut it. If only one is
    given, the other one stays as it was saved.
    """
    if source.kind in ("dcp", "weights"):
        raise UsageError("not cut among ZeRO's ranks: nothing to draw")
    ways = [_as_it_is(source)]
    if world_size is not None or zero_stage is not None:
        ways.append(_resized(source, world_size, zero_stage))
    if not source.checkpoint.layout.stage:
        raise UsageError("saved without ZeRO (stage 0), of which nothing is cut: nothing to draw")
    places = [
        (number, place)
        for number, model_part in enumerate(source.checkpoint.model_parts)
        for place, group in enumerate(model_part.groups)
        if group.params
    ]
    panels = [_panel(ways, *where) for where in places[:_MOST_PANELS]]
    left = len(places) - len(panels)
    more = f"{left:,} more param groups, of other parts of the model or other experts, not drawn."
    return Picture(
        title=f"{resolve(source.path).name} at {source.checkpoint.tag}",
        facts=_facts(source),
        panels=tuple(panels),
        notes=(more,) if left else (),
        border=_border(source, ways, panels),
    )


def _facts(source: Source) -> str:
    masters = [tensor for tensor in source.checkpoint.tensors if tensor.state == MASTER]
    numel, nbytes = sum(t.numel for t in masters), sum(t.nbytes for t in masters)
    text = (
        f"{len(masters):,} parameters, {numel:,} elements, {show_bytes(nbytes)} of master weights"
    )
    checkpoint, degrees = source.checkpoint, known_degrees(source.checkpoint)
    parts, data = len(checkpoint.model_parts), checkpoint.layout.world_size
    shared_as = degrees_text(parts, data, degrees, checkpoint.expert_parallel)
    return f"{text}; saved by {checkpoint.ranks} ranks: {shared_as}" if shared_as else text


def _border(source: Source, ways: Sequence[_Way], panels: Sequence[Panel]) -> str:
    """Return the meaning of the lines within rows."""
    if not any(row.borders for panel in panels for half in panel.halves for row in half.rows):
        return ""
    meant = []
    if source.kind == "store":
        meant.append("chunk")
    stages = [way.layout.stage for way in ways if way.source is None or source.kind != "store"]
    meant += ["rank"] if any(stage < 3 for stage in stages) else []
    meant += ["sub-group"] if 3 in stages else []
    return f"a {' or '.join(meant)} ends"


def _as_it_is(source: Source) -> _Way:
    layout, checkpoint = source.checkpoint.layout, source.checkpoint
    title = f"As saved by {_ranks(checkpoint, layout)}, ZeRO stage {layout.stage}"
    if source.kind == "store":
        title = "In the store, one tensor after the other, cut among no ranks"
    return _Way(checkpoint, layout, checkpoint.module_dtype, title, source)


def _resized(source: Source, world_size: int | None, zero_stage: int | None) -> _Way:
    """Cut a checkpoint as `repartition` does."""
    ranks = world_size if world_size is not None else source.checkpoint.ranks
    dp_world_size = require_allowed(source.checkpoint, ranks)
    settings = target_settings(source.checkpoint, dp_world_size, zero_stage, None)
    checkpoint = muon_order.in_order_of(source.checkpoint, settings.layout.stage, source.like)
    title = f"For {_ranks(checkpoint, settings.layout)}, ZeRO stage {settings.layout.stage}"
    return _Way(checkpoint, settings.layout, settings.module_dtype, title)


def _ranks(checkpoint: Checkpoint, layout: ZeroLayout) -> str:
    kind = "data-parallel rank" if len(checkpoint.model_parts) > 1 else "rank"
    return counted(layout.world_size, kind)


def _panel(ways: Sequence[_Way], number: int, place: int) -> Panel:
    """Draw one param group in every way; a colour means the same parameters in all of them."""
    checkpoint = ways[0].checkpoint
    model_part = checkpoint.model_parts[number]
    group = model_part.groups[place]
    named = Named.of(group.params)
    drawings = (_Drawing(way, way.checkpoint.model_parts[number], place, named) for way in ways)
    title = f"Param group {group.number}"
    if group.expert_parallel > 1:
        title += f", expert rank {group.expert_rank} of {group.expert_parallel}"
    if model_part.name:
        degrees = known_degrees(checkpoint)
        part = f" ({degrees.position(number)})" if degrees is not None else ""
        title = f"{model_part.name}{part}, {title[0].lower()}{title[1:]}"
    numels = checkpoint.master_numels(model_part)
    counts = len(group.params), sum(numels[name] for name in group.params)
    title += ": " + ", ".join(map(_plural, ("parameter", "element"), counts))
    itemsize = ITEMSIZE[group.master_dtype]
    return Panel(title, named.units, itemsize, tuple(drawing.half() for drawing in drawings))


def _plural(noun: str, count: float) -> str:
    number = f"{count:,.0f}" if count == int(count) else f"{count:,.1f}"
    return f"{number} {noun}{'s' * (count != 1)}"


class _Drawing:
    """Draws one param group in one way."""

    def __init__(self, way: _Way, model_part: ModelPart, place: int, named: Named) -> None:
        self._way = way
        self._model_part = model_part
        self._place = place
        self._group: ParamGroup = model_part.groups[place]
        self._named = named
        self._numels = way.checkpoint.master_numels(model_part)
        self._ranks = sharing_ranks(self._group, way.layout)
        self._units: list[int] = []
        """The unit of every drawn run of parameters."""
        self._members: list[list[str]] = []

    def half(self) -> Half:
        """Cut the group, and describe every part."""
        is_store = self._way.source is not None and self._way.source.kind == "store"
        cut = self._tape() if is_store else self._cut()
        rows = [
            PictureRow(
                label=self._tape_label(row.first) if is_store else self._label(row.first, row.stop),
                numel=row.numel / row.mean_of,
                strips=tuple(
                    self._strip(band, cut, is_store=is_store)
                    for band in cut.bands
                    if band.row == number
                ),
                borders=tuple(at / row.mean_of for in_row, at in cut.borders if in_row == number),
            )
            for number, row in enumerate(cut.rows)
        ]
        return Half(self._way.title, self._note(cut, is_store=is_store), tuple(rows))

    def _runs(self, names: Sequence[str]) -> list[range]:
        """Group parameters that follow each other in storage and have the same colour."""
        runs, first = [], 0
        for unit, members in self._named.runs(names):
            self._units.append(unit)
            self._members.append(members)
            runs.append(range(first, first + len(members)))
            first += len(members)
        return runs

    def _cut(self) -> Cut:
        way, params = self._way, self._group.params
        if way.layout.stage < 3:
            groups = flat_groups(way.checkpoint, self._model_part, way.layout, way.module_dtype)
            flat = groups[self._place]
            stored = [params[index] for index in flat.order]
            return flat_cut(flat, self._runs(stored), _MOST_ROWS)
        numels = [self._numels[name] for name in params]
        return shard_cut(
            numels,
            self._runs(params),
            world_size=way.layout.world_size,
            most_rows=_MOST_ROWS,
            ends=self._sub_group_ends(),
        )

    def _sub_group_ends(self) -> list[int]:
        """List the parameters before which a sub-group ends."""
        way = self._way
        if way.source is None:
            units = cut_model_part(
                way.checkpoint, self._model_part, way.layout, way.module_dtype
            ).sub_groups
            return [unit.first for unit in units if unit.group == self._place and unit.first]
        index = way.checkpoint.tensor_index()
        slots = [
            int(way.source.cutting.first_piece[index[self._model_part.name, MASTER, name]])
            for name in self._group.params
        ]
        return [i for i, (one, other) in enumerate(pairwise(slots), 1) if one != other]

    def _tape(self) -> Cut:
        """Cut a store where chunks of the master weights end."""
        source, index = self._way.source, self._way.checkpoint.tensor_index()
        ends, begin = [], 0
        for name in self._group.params:
            numel = self._numels[name]
            if source is not None:
                tensor = index[self._model_part.name, MASTER, name]
                piece = int(source.cutting.piece_numel[tensor])
                ends.append(begin + np.arange(piece, numel, piece, dtype=np.int64))
            begin += numel
        numels = [self._numels[name] for name in self._group.params]
        return tape_cut(numels, np.concatenate(ends), self._runs(self._group.params), _TAPE_ROWS)

    def _label(self, first: int, stop: int) -> str:
        ranks = self._ranks[first:stop]
        if len(ranks) == 1:
            return f"rank {ranks[0]:,}"
        steps = {other - one for one, other in pairwise(ranks)}
        return f"ranks {ranks[0]:,}{'-' if steps == {1} else ', … '}{ranks[-1]:,}"

    def _tape_label(self, first: int) -> str:
        return f"from {first:,}"

    def _strip(self, band: Band, cut: Cut, *, is_store: bool) -> Strip:
        row = cut.rows[band.row]
        at, numel = band.at / row.mean_of, band.numel / row.mean_of
        where = "in the store" if is_store else self._label(row.first, row.stop)
        if row.mean_of > 1:
            where += ", each" if cut.is_exact else ", on average each"
        bytes_held = show_bytes(round(numel * ITEMSIZE[self._group.master_dtype]))
        size = f"{_plural('element', numel)}, {bytes_held} of {MASTER}"
        if band.unit is None:
            return Strip(at, numel, None, f"Padding\n{where}: {size}")
        members = self._members[band.unit]
        whole = sum(self._numels[name] for name in members)
        name, span, label = self._named.title(self._units[band.unit], members), "", ""
        if row.mean_of == 1:
            span = f"elements {band.start:,} to {band.start + band.numel:,} of {whole:,}"
            label = f"{band.start:,} to {band.start + band.numel:,}"
        else:
            span = f"of its {whole:,} elements"
        text = f"{name}\n{span}\n{where}: {size}"
        return Strip(at, numel, self._units[band.unit], text, label)

    def _note(self, cut: Cut, *, is_store: bool) -> str:
        said = []
        ranks = self._way.layout.world_size // self._group.expert_parallel
        if not is_store and len(cut.rows) < ranks:
            count = cut.rows[0].stop - cut.rows[0].first
            said.append(f"{ranks:,} ranks in {len(cut.rows)} rows")
            if cut.rows[0].mean_of == 1 and self._way.layout.stage < 3:
                said[-1] += f", {count} in each, one after the other"
            else:
                said[-1] += " of those alike" if cut.is_exact else ", each the mean of some"
        if not self._named.is_single:
            count, drawn = len(self._group.params), len(self._named.units)
            said.append(f"{count:,} parameters drawn as {drawn}, by how their names begin")
        return "; ".join(said)
