"""Computes the content of a picture: how a checkpoint's parameters are cut, or would be cut.

The numbers come from the same arithmetic that reads and reshards the checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Final, Self, TypeVar

import numpy as np

from streamshard.drawing.page import page
from streamshard.drawing.picture import Panel, Picture, PictureRow, Side, Strip
from streamshard.drawing.svg import svg
from streamshard.errors import Option, TargetError, TargetExistsError, UsageError
from streamshard.formats.checkpoint import Checkpoint, ModelPart, ParamGroup
from streamshard.formats.deepspeed.cut import muon_order
from streamshard.formats.deepspeed.cut.part_cut import cut_model_part, flat_groups
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import known_degrees
from streamshard.io.changes import remove_file, write_durably
from streamshard.io.entries import is_directory, is_file, lexists, resolve
from streamshard.io.files import target_errors
from streamshard.layout.bands import Band, Cut, Row, flat_cut, shard_cut, tape_cut
from streamshard.model import ITEMSIZE, MASTER, ZeroLayout
from streamshard.operations.inspect.inspect_report import FileSummary, degrees_text
from streamshard.operations.inspect.ownership import sharing_ranks
from streamshard.operations.native.target_settings import require_allowed, target_settings
from streamshard.operations.source.source import Source
from streamshard.operations.transfer.target import partial_of, require_separate
from streamshard.sizes import counted, show_bytes

_OVERWRITE: Final = Option("overwrite", True)


@dataclass(frozen=True, slots=True)
class PictureFiles:
    """The pictures to write, and their paths."""

    svg: Path | None
    html: Path | None
    overwrite: bool

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files to write."""
        return tuple(path for path in (self.svg, self.html) if path is not None)

    def require_free(self) -> None:
        """Refuse files that exist, unless they may be replaced."""
        if len(set(self.paths)) < len(self.paths):
            raise UsageError(f"{self.svg}: cannot be {Option('svg')} and {Option('html')} at once")
        for path in self.paths:
            with target_errors(path):
                if not is_directory(path.parent):
                    message = f"{path}: there is no directory {path.parent}; make it first"
                    raise TargetError(message)
                if lexists(path) and not self.overwrite:
                    raise TargetExistsError(f"{path}: exists; use {_OVERWRITE} to replace it")
                if lexists(path) and not is_file(path):
                    message = f"{path}: is not a file, so {_OVERWRITE} will not replace it"
                    raise TargetExistsError(message)

    def draw(
        self, source: Source, world_size: int | None, zero_stage: int | None
    ) -> tuple[FileSummary, ...]:
        """Draw a checkpoint, and how it would be resized; write complete files or none."""
        for path in self.paths:
            require_separate(source.path, source.files, path)
        picture = _picture_of(source, world_size=world_size, zero_stage=zero_stage)
        made = [(self.svg, svg), (self.html, page)]
        return tuple(_write(path, draw(picture)) for path, draw in made if path is not None)


def _write(path: Path, text: str) -> FileSummary:
    data = text.encode()
    with target_errors(path):
        try:
            write_durably(path, data, partial_of(path))
        except BaseException:
            remove_file(partial_of(path), missing_ok=True)
            raise
    return FileSummary(str(path), len(data))


T = TypeVar("T")

_MOST_ROWS: Final = 32
_MOST_PANELS: Final = 8
_TAPE_ROWS: Final = 8
_MOST_COLOURS: Final = 96
"""Most colours in a picture; similar ones differ by their places."""
_MOST_RUNS: Final = 2 * _MOST_COLOURS
"""Most parts of one param group that are drawn."""


@dataclass(frozen=True, slots=True)
class _Colours:
    """The colours of the parameters, and their names: that of a parameter, or of some together."""

    names: tuple[str, ...]
    colour_of: dict[str, int]
    is_single: bool
    """Whether every parameter has a colour of its own."""

    @classmethod
    def of(cls, params: Sequence[str]) -> Self:
        """Give each parameter a colour; if there are too many, one to those of a common prefix."""
        if len(params) <= _MOST_COLOURS:
            return cls(tuple(params), {name: i for i, name in enumerate(params)}, True)
        runs = _alike_by_name(params)
        which = np.repeat(np.arange(len(runs)), [count for _, count in runs]).tolist()
        names = tuple(key for key, _ in runs)
        return cls(names, dict(zip(params, which, strict=True)), False)

    def runs(self, params: Sequence[str]) -> list[tuple[int, list[str]]]:
        """Group consecutive parameters of the same colour: (colour, its parameters here).

        In round-robin order, parameters of one colour lie far apart. If there are too many groups,
        neighbours of different colours are merged, in the colour of the first.
        """
        found = [(c, list(same)) for c, same in groupby(params, key=self.colour_of.__getitem__)]
        if len(found) <= _MOST_RUNS:
            return found
        spans = _chunked(found, _MOST_RUNS)
        return [(span[0][0], [name for _, some in span for name in some]) for span in spans]

    def title(self, colour: int, params: Sequence[str]) -> str:
        """Return the title of a run, with the count of its parameters."""
        if len(params) == 1:
            return params[0]
        is_one = all(self.colour_of[name] == colour for name in params)
        name = self.names[colour] if is_one else f"{params[0]} … {params[-1]}"
        return f"{name}: {len(params):,} parameters"


def _chunked(found: Sequence[T], most: int) -> list[Sequence[T]]:
    """Put neighbours together, so many that at most `most` groups are left."""
    size = -(-len(found) // most)
    return [found[at : at + size] for at in range(0, len(found), size)]


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
    while depth and len(runs(depth)) > _MOST_COLOURS:
        depth -= 1
    found = runs(depth)
    if depth and len(found) * 4 >= _MOST_COLOURS:
        return found
    finer = runs(depth + 1)
    spans = _chunked(finer, _MOST_COLOURS)
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


def _picture_of(
    source: Source, *, world_size: int | None = None, zero_stage: int | None = None
) -> Picture:
    """Compute the content of a picture of a checkpoint.

    `world_size` and `zero_stage`: show next to it how `repartition` would cut it. If only one is
    given, the other one stays as it was saved.
    """
    if source.checkpoint.foreign:
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
    if not any(row.borders for panel in panels for side in panel.sides for row in side.rows):
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
    colours = _Colours.of(group.params)
    drawings = (_Drawing(way, way.checkpoint.model_parts[number], place, colours) for way in ways)
    title = f"Param group {group.number}"
    if group.expert_parallel > 1:
        title += f", expert rank {group.expert_rank} of {group.expert_parallel}"
    if model_part.name:
        degrees = known_degrees(checkpoint)
        part = f" ({degrees.position(number)})" if degrees is not None else ""
        title = f"{model_part.name}{part}, {title[0].lower()}{title[1:]}"
    numels = checkpoint.master_numels(model_part)
    counts = len(group.params), sum(numels[name] for name in group.params)
    title += f": {counted(counts[0], 'parameter')}, {counted(counts[1], 'element')}"
    itemsize = ITEMSIZE[group.master_dtype]
    return Panel(title, colours.names, itemsize, tuple(drawing.side() for drawing in drawings))


def _elements(count: float) -> str:
    return counted(int(count), "element") if count == int(count) else f"{count:,.1f} elements"


class _Drawing:
    """Draws one param group in one way."""

    def __init__(self, way: _Way, model_part: ModelPart, place: int, colours: _Colours) -> None:
        self._way = way
        self._store = way.source if way.source and way.source.kind == "store" else None
        """The source, if it is a store, which is drawn as one tape."""
        self._model_part = model_part
        self._place = place
        self._group: ParamGroup = model_part.groups[place]
        self._colours = colours
        self._numels = way.checkpoint.master_numels(model_part)
        self._ranks = sharing_ranks(self._group, way.layout)
        self._drawn: list[tuple[int, list[str]]] = []
        """Colour and parameters of every run that is drawn."""

    def side(self) -> Side:
        """Cut the group, and describe every part."""
        cut = self._tape(self._store) if self._store else self._cut()
        rows = [
            PictureRow(
                label=f"from {row.first:,}" if self._store else self._label(row),
                numel=row.numel / row.mean_of,
                strips=tuple(self._strip(band, cut) for band in cut.bands if band.row == number),
                borders=tuple(at / row.mean_of for in_row, at in cut.borders if in_row == number),
            )
            for number, row in enumerate(cut.rows)
        ]
        return Side(self._way.title, self._note(cut), tuple(rows))

    def _runs(self, names: Sequence[str]) -> list[range]:
        """Group parameters that follow each other in storage and have the same colour."""
        runs, first = [], 0
        for colour, params in self._colours.runs(names):
            self._drawn.append((colour, params))
            runs.append(range(first, first + len(params)))
            first += len(params)
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

    def _tape(self, store: Source) -> Cut:
        """Cut a store where chunks of the master weights end."""
        index, ends, begin = self._way.checkpoint.tensor_index(), [], 0
        numels = [self._numels[name] for name in self._group.params]
        for name, numel in zip(self._group.params, numels, strict=True):
            tensor = index[self._model_part.name, MASTER, name]
            piece = int(store.cutting.piece_numel[tensor])
            ends.append(begin + np.arange(piece, numel, piece, dtype=np.int64))
            begin += numel
        return tape_cut(numels, np.concatenate(ends), self._runs(self._group.params), _TAPE_ROWS)

    def _label(self, row: Row) -> str:
        ranks = self._ranks[row.first : row.stop]
        if len(ranks) == 1:
            return f"rank {ranks[0]:,}"
        steps = {other - one for one, other in pairwise(ranks)}
        return f"ranks {ranks[0]:,}{'-' if steps == {1} else ', … '}{ranks[-1]:,}"

    def _strip(self, band: Band, cut: Cut) -> Strip:
        row = cut.rows[band.row]
        at, numel = band.at / row.mean_of, band.numel / row.mean_of
        where = "in the store" if self._store else self._label(row)
        if row.mean_of > 1:
            where += ", each" if cut.is_exact else ", on average each"
        bytes_held = show_bytes(round(numel * ITEMSIZE[self._group.master_dtype]))
        size = f"{_elements(numel)}, {bytes_held} of {MASTER}"
        if band.unit is None:
            return Strip(at, numel, None, f"Padding\n{where}: {size}")
        colour, params = self._drawn[band.unit]
        whole = sum(self._numels[name] for name in params)
        name, span, label = self._colours.title(colour, params), "", ""
        if row.mean_of == 1:
            span = f"elements {band.start:,} to {band.start + band.numel:,} of {whole:,}"
            label = f"{band.start:,} to {band.start + band.numel:,}"
        else:
            span = f"of its {whole:,} elements"
        text = f"{name}\n{span}\n{where}: {size}"
        return Strip(at, numel, colour, text, label)

    def _note(self, cut: Cut) -> str:
        notes = []
        ranks = self._way.layout.world_size // self._group.expert_parallel
        if not self._store and len(cut.rows) < ranks:
            count = cut.rows[0].stop - cut.rows[0].first
            notes.append(f"{ranks:,} ranks in {len(cut.rows)} rows")
            if cut.rows[0].mean_of == 1 and self._way.layout.stage < 3:
                notes[-1] += f", {count} in each, one after the other"
            else:
                notes[-1] += " of those alike" if cut.is_exact else ", each the mean of some"
        if not self._colours.is_single:
            count, drawn = len(self._group.params), len(self._colours.names)
            notes.append(f"{count:,} parameters drawn as {drawn}, by how their names begin")
        return "; ".join(notes)
