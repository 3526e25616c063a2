"""Makes one source of two: the job of START, with the training of SRC in it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import PurePosixPath
from typing import Final

import numpy as np

from streamshard.errors import DisagreementError, UnsupportedError, UsageError
from streamshard.formats import pretrained
from streamshard.formats.checkpoint import GRAFT_RECORD, ModelPart, OtherFile, ParamGroup
from streamshard.formats.dcp.dcp_writer import value_item
from streamshard.formats.deepspeed.read.model_part import optimizer_tensors
from streamshard.formats.deepspeed.states import State
from streamshard.formats.torch.tree_copy import renumbered
from streamshard.grafting.job_state import grafted_state
from streamshard.grafting.origins import (
    Inventory,
    Origin,
    Shape,
    dropped_rows,
    names_of,
    origins_of,
)
from streamshard.grafting.pieces import SCRATCH_BYTES, Leading, Piece, Pieces
from streamshard.grafting.record import Checkpointed, GraftRecord, RuleCount
from streamshard.grafting.requirements import (
    STEP,
    require_alike,
    require_same_settings,
    require_whole_rows,
    require_zeros,
    uncorrected,
)
from streamshard.grafting.rules import DROP, WARM, Rules
from streamshard.grafting.schedules import Origins, grafted_scheduler_file, scheduler_files
from streamshard.model import FILE, ITEMSIZE, MASTER, MODULE, LogicalTensor, Note
from streamshard.sizes import show_bytes, some_of
from streamshard.source.source import Source

_SECOND: Final = ("exp_avg_sq", "max_exp_avg_sq")


@dataclass(frozen=True)
class Grafted:
    """START's job with SRC's training."""

    source: Source
    counts: Mapping[str, RuleCount]
    notes: Sequence[str]
    warm: Sequence[Pieces]
    """Those that are filled with means."""

    def find_means(self, *_: object) -> None:
        """Find what the second moments of warm parameters begin with."""
        for pieces in self.warm:
            pieces.find_means()


def grafted(source: Source, start: Source, rules: Rules, *, is_fresh: bool) -> Grafted:
    """Return START's job with SRC's training."""
    require_alike(source, start, is_fresh=is_fresh)
    return _Assembly(source, start, rules, is_fresh=is_fresh).grafted()


class _Assembly:
    """The tensors of a graft, with the places of their elements."""

    def __init__(self, source: Source, start: Source, rules: Rules, *, is_fresh: bool) -> None:
        self._source, self._start = source, start
        self._rules, self._is_fresh = rules, is_fresh
        self._old, self._new = source.checkpoint, start.checkpoint
        self._first = len(self._old.tensors)
        """Number of START's first tensor among those of both."""
        self._both = source.append(self._new.tensors, start.cutting, start.files)
        self._index, self._start_index = self._old.tensor_index(), self._new.tensor_index()
        self._tensors: list[LogicalTensor] = []
        self._rows: list[int] = []
        """The tensor of both that each one is; of those that are made, any."""
        self._made: dict[str, list[tuple[int, Sequence[Piece]]]] = {}
        """Dtype → tensors that are made, with their pieces."""
        self._means: dict[tuple[str, str], tuple[Leading, ...]] = {}
        """State and name of what is warm → what its elements are the mean of."""
        self._schedulers = scheduler_files(source, start)
        self._old_part = ""
        self._shapes: Mapping[str, Shape] = {}
        """Of the part that is put together now: its name in SRC, START's trained tensors."""
        self._notes: list[str] = []
        self._counts: dict[str, RuleCount] = {}

    def grafted(self) -> Grafted:
        origins: Origins = ()
        parts = []
        for old, new in zip(self._old.model_parts, self._new.model_parts, strict=True):
            part, origins = self._part(old, new)
            parts.append(part)
        parts = [self._with_blobs(part) for part in parts]
        files = self._files(origins)
        checkpoint = replace(
            self._new,
            tag=self._old.tag,
            tensors=tuple(self._tensors),
            model_parts=tuple(parts),
            files=files,
            notes=(*self._old.notes, *self._new.notes, *map(Note, self._notes)),
            accelerate_step=self._old.accelerate_step,
        )
        start = self._start
        placed, made = self._placed(self._both.take(self._rows, checkpoint))
        source = replace(
            placed,
            path=start.path,
            kind=start.kind,
            details=start.details,
            facts=start.facts,
            like=None,
            reference=None,
            repeats=(),
            codec_bytes=max(self._source.codec_bytes, start.codec_bytes) + SCRATCH_BYTES,
        )
        warm = [pieces for pieces in made if pieces.mean_bytes]
        size = show_bytes(sum(pieces.mean_bytes for pieces in warm))
        notes = [f"Means for what is warm are found first, in {size}."] if warm else []
        return Grafted(source, self._counts, notes, warm)

    # The tensors

    def _part(self, old: ModelPart, new: ModelPart) -> tuple[ModelPart, Origins]:
        """Return a part without the places of its blobs, and where its param groups come from."""
        inventories = Inventory.of(self._old, old), Inventory.of(self._new, new)
        if self._is_fresh:
            inventories = replace(inventories[0], bare=frozenset()), inventories[1]
        self._old_part, self._shapes = old.name, inventories[1].trained
        origins = origins_of(*inventories, self._rules)
        if len(self._new.model_parts) > 1:
            require_whole_rows(origins, self._start)
        numbers: list[int | None] = [None] * len(new.hyper_parameters)
        groups = []
        for group in new.groups:
            numbers[group.number], states = self._states(old, new, group, origins)
            groups.append(replace(group, states=states))
        for tensor in optimizer_tensors(groups, self._shapes, new.name):
            self._add(tensor, self._trained(tensor, origins[tensor.name]))
        for tensor in self._new.tensors:
            if tensor.state == MODULE and tensor.model_part == new.name:
                self._add(tensor, self._weight(tensor, origins.get(tensor.name)))
        self._tell(*inventories, origins)
        files = new.model_state, new.optimizer_file
        model, optimizer = renumbered(files, lambda row: row + self._first)
        state = grafted_state(
            old,
            replace(new, model_state=model, optimizer_file=optimizer),
            numbers,
            fresh=self._is_fresh,
            scheduler_of_start=self._rules.scheduler_of_start,
            config=self._new.config,
            beside=next(iter(self._schedulers.values()), None),
        )
        self._notes += state.notes
        model, optimizer = state.model_state, state.optimizer_file
        made = replace(new, groups=tuple(groups), model_state=model, optimizer_file=optimizer)
        return made, numbers

    def _states(
        self, old: ModelPart, new: ModelPart, group: ParamGroup, origins: Mapping[str, Origin]
    ) -> tuple[int | None, Mapping[str, State] | None]:
        """Return the param group of SRC that a group goes on from, and its states.

        A group that keeps none has those that START's optimizer began with.
        """
        owner = {name: one for one in old.groups for name in one.params}
        members = {name: origins[name] for name in group.params}
        sources = [owner[o.source] for o in members.values() if o.source and o.state == MASTER]
        kept = {n: owner[str(o.source)] for n, o in members.items() if o.keeps_states}
        if self._is_fresh or not kept:
            return sources[0].number if self._is_fresh and sources else None, group.states
        first = next(iter(kept.values()))
        for other in kept.values():
            if other.documents != first.documents:
                steps = " and ".join(str((g.states or {}).get(STEP)) for g in (first, other))
                message = f"param group {group.number} of START joins parameters whose optimizer"
                message = f"{message} keeps different steps or states in SRC (steps {steps}). Give"
                raise DisagreementError(
                    f"{message} them param groups of their own in START", path=self._start.path
                )
        require_same_settings(old, first, new, group)
        begun = [n for n, o in members.items() if n not in kept or o.rows is not None]
        if first.states is not None and begun:
            require_zeros(group, first)
            warm = [name for name in begun if origins[name].is_warm]
            for name in warm:
                self._warm(name, [name] if name in kept else [*kept], origins, first)
            if len(warm) < len(begun):
                self._notes += uncorrected(new, group)
        return first.number, first.states

    def _warm(
        self, name: str, of: Iterable[str], origins: Mapping[str, Origin], like: ParamGroup
    ) -> None:
        """Note which tensors' kept elements the second moment of a parameter is the mean of."""
        seconds = [key for key in like.cut_states if key in _SECOND]
        if not seconds:
            message = f"'{name}' is warm, and its optimizer keeps no second moment; leave the word"
            raise UnsupportedError(f"{message} '{WARM}' out", path=self._source.path)
        for key in seconds:
            self._means[key, name] = tuple(
                self._kept(key, origins[other], self._shapes[other]) for other in of
            )

    def _kept(self, state: str, origin: Origin, shape: Shape) -> Leading:
        """Return what comes from SRC."""
        row = self._index[self._old_part, state, str(origin.source)]
        return row, origin.kept_numel(shape)

    def _trained(self, tensor: LogicalTensor, origin: Origin) -> Sequence[Piece]:
        """Return the pieces of a master weight, or of a state of it."""
        if tensor.state == MASTER:
            return self._weight(tensor, origin)
        fill = Piece(tensor.numel, mean_of=self._means.get((tensor.state, tensor.name), ()))
        if self._is_fresh or not origin.keeps_states:
            is_begun = (tensor.model_part, tensor.state, tensor.name) in self._start_index
            return [self._start_piece(tensor)] if is_begun else [fill]
        row, numel = self._kept(tensor.state, origin, tensor.shape)
        kept, rest = Piece(numel, row), replace(fill, numel=tensor.numel - numel)
        return [kept, rest] if rest.numel else [kept]

    def _weight(self, tensor: LogicalTensor, origin: Origin | None) -> Sequence[Piece]:
        """Return the pieces of a weight: SRC's, and further rows of START's."""
        if origin is None or origin.source is None:
            return [self._start_piece(tensor)]
        row, numel = self._kept(origin.state, origin, tensor.shape)
        dtype = self._old.tensors[row].dtype
        if dtype != tensor.dtype and "float" not in dtype + tensor.dtype:
            message = f"'{tensor.name}' is {dtype} in SRC and {tensor.dtype} in START; give"
            raise UsageError(f"{message} 'new {tensor.name}'")
        rest = replace(self._start_piece(tensor), numel=tensor.numel - numel, first=numel)
        return [Piece(numel, row), rest] if rest.numel else [Piece(numel, row)]

    def _start_piece(self, tensor: LogicalTensor) -> Piece:
        row = self._start_index[tensor.model_part, tensor.state, tensor.name]
        return Piece(tensor.numel, self._first + row)

    def _add(self, tensor: LogicalTensor, pieces: Sequence[Piece]) -> None:
        """Add a tensor: as it lies in a file, if it is one whole tensor, or made of pieces."""
        row = pieces[0].tensor if len(pieces) == 1 else None
        if row is None or self._both.checkpoint.tensors[row].dtype != tensor.dtype:
            self._made.setdefault(tensor.dtype, []).append((len(self._tensors), pieces))
            row = 0
        # A tensor with fewer rows ends early, which no cutting minds.
        self._tensors.append(tensor)
        self._rows.append(row)

    def _placed(self, source: Source) -> tuple[Source, list[Pieces]]:
        """Let the tensors that are made lie where their pieces are put together."""
        made = []
        for dtype, tensors in self._made.items():
            numbers = [number for number, _ in tensors]
            numels = [self._tensors[number].numel for number in numbers]
            starts = np.cumsum([0, *numels], dtype=np.int64)[:-1] * ITEMSIZE[dtype]
            pieces = [piece for _, pieces in tensors for piece in pieces]
            made.append(Pieces.of(self._both, pieces, dtype))
            file = replace(self._both.files[0], decoder=made[-1], recorded=None)
            source = source.relocate(numbers, file, starts.tolist())
        return source, made

    # Blobs and files

    def _with_blobs(self, part: ModelPart) -> ModelPart:
        """Add the storages that are left in the training state, behind the other tensors."""
        first = len(self._tensors)

        def number_of(row: int) -> int:
            number = len(self._tensors)
            blob = self._both.checkpoint.tensors[row]
            self._tensors.append(replace(blob, name=str(number - first), model_part=part.name))
            self._rows.append(row)
            return number

        model, optimizer = renumbered((part.model_state, part.optimizer_file), number_of)
        return replace(part, model_state=model, optimizer_file=optimizer)

    def _files(self, origins: Origins) -> tuple[OtherFile, ...]:
        """Add the other files: START's configs and tokenizer, all else of SRC's."""
        found, left_out = [], []
        start = {file.path for file in self._new.files if _describes_model(file.path)}
        for first, checkpoint in ((0, self._old), (self._first, self._new)):
            modes = {file.path: file for file in checkpoint.files}
            for number, tensor in enumerate(checkpoint.tensors):
                if tensor.state != FILE or (first and tensor.name not in start):
                    continue
                if not first and _describes_model(tensor.name):
                    left_out += [tensor.name] * (tensor.name not in start)
                elif tensor.name in self._schedulers:
                    found += [modes[tensor.name]] * self._add_scheduler(tensor.name, origins)
                elif PurePosixPath(tensor.name).name != GRAFT_RECORD:
                    self._add(tensor, [Piece(tensor.numel, first + number)])
                    found.append(modes[tensor.name])
        if left_out:
            self._notes.append(
                f"Left out, as they describe the model of SRC, and START has none: "
                f"{some_of(left_out)}."
            )
        path = f"{self._old.tag}/{GRAFT_RECORD}"
        self._add_file(path, self._record().to_json())
        return (*found, OtherFile(path, 0o644))

    def _add_scheduler(self, path: str, origins: Origins) -> bool:
        """Add the file of a scheduler, unless the job is to begin with one of its own."""
        parts = self._old.model_parts[-1], self._new.model_parts[-1]
        of_start = self._rules.scheduler_of_start
        state = grafted_scheduler_file(
            self._schedulers[path], parts, origins, scheduler_of_start=of_start
        )
        if state is None:
            self._notes.append(f"{path} is left out: the job begins with the scheduler it makes.")
        else:
            self._add_file(path, value_item(state))
        return state is not None

    def _add_file(self, path: str, data: bytes) -> None:
        tensor = LogicalTensor(FILE, path, "uint8", (len(data),))
        self._add(tensor, [Piece(len(data), data=data)])

    # What is said of it

    def _tell(self, source: Inventory, start: Inventory, origins: Mapping[str, Origin]) -> None:
        for label, names in names_of(origins).items():
            self._count(label, [start.shapes[name] for name in names])
        if dropped := [shape for n, shape in source.shapes.items() if self._rules.drops(n)]:
            self._count(DROP, dropped)
        fewer = [f"{count:,} of '{name}'" for name, count in dropped_rows(source, start, origins)]
        if fewer:
            self._notes.append(
                f"Rows that START does not have, and that are dropped: {some_of(fewer)}."
            )
        unsaved = sorted(name for name in start.untrained if source.leaves_out(name, start))
        if unsaved:
            self._notes.append(f"SRC did not save these, so they are START's: {some_of(unsaved)}.")

    def _count(self, label: str, shapes: Sequence[Shape]) -> None:
        """Add tensors to those of a rule; each model-parallel part has some."""
        before = self._counts.get(label, RuleCount(0, 0))
        elements = before.elements + sum(map(prod, shapes))
        self._counts[label] = RuleCount(before.tensors + len(shapes), elements)

    def _record(self) -> GraftRecord:
        step = self._old.model_parts[0].model_state.get("global_steps")
        step = step if isinstance(step, int) else None
        source = Checkpointed(str(self._source.path), self._old.tag, step)
        start = Checkpointed(str(self._start.path), self._new.tag, None)
        rules = tuple(self._rules.lines)
        return GraftRecord(rules, self._is_fresh, source, start, self._counts)


def _describes_model(path: str) -> bool:
    """Tell whether a file describes a model: its weights, its config, its tokenizer."""
    is_weights = pretrained.holds_weights(PurePosixPath(path).name)
    return pretrained.comes_along(path) or is_weights or path == pretrained.ADAPTER_CONFIG
