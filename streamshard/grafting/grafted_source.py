"""Makes one source of two: the job of START, with the training of SRC in it."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from math import prod
from pathlib import PurePosixPath
from typing import Final

import numpy as np

from streamshard.engine.numeric.cast import Cast
from streamshard.errors import DisagreementError, Option, UnsupportedError, UsageError
from streamshard.formats import pretrained
from streamshard.formats.checkpoint import GRAFT_RECORD, ModelPart, OtherFile, ParamGroup
from streamshard.formats.deepspeed.read.model_part import optimizer_tensors
from streamshard.formats.deepspeed.states import State
from streamshard.formats.torch.tree_copy import renumbered
from streamshard.grafting.job_state import grafted_state
from streamshard.grafting.origins import Inventory, Origin, dropped_rows, names_of, origins_of
from streamshard.grafting.pieces import SCRATCH_BYTES, Array, Given, Piece, Pieces
from streamshard.grafting.record import Checkpointed, GraftRecord, RuleCount
from streamshard.grafting.requirements import (
    STEP,
    require_alike,
    require_same_settings,
    require_zeros,
    uncorrected,
)
from streamshard.grafting.rules import WARM, Rules
from streamshard.grafting.scheduler_files import content_of, scheduler_files
from streamshard.model import FILE, ITEMSIZE, MASTER, MODULE, LogicalTensor, Note
from streamshard.sizes import show_bytes, some_of
from streamshard.source.source import Source
from streamshard.source.source_access import SourceAccess

_SECOND: Final = ("exp_avg_sq", "max_exp_avg_sq")


@dataclass(frozen=True)
class Graft:
    """Two checkpoints that become one."""

    source: Source
    start: Source
    rules: Rules
    is_fresh: bool

    def grafted(self) -> "Grafted":
        """Return START's job with SRC's training."""
        require_alike(self.source, self.start, is_fresh=self.is_fresh)
        return _Assembly(self).grafted()


@dataclass(frozen=True)
class Grafted:
    """START's job with SRC's training."""

    source: Source
    notes: tuple[str, ...]
    """What comes from where."""
    both: Source
    """All tensors of SRC and START, of which it is made."""
    warm: Sequence[Pieces]
    """Those that are filled with means."""

    def find_means(self) -> None:
        """Find what the second moments of warm parameters begin with."""
        with closing(SourceAccess(self.both)) as access:

            def read(tensor: int, start: int, out: Array, cast: Cast | None) -> None:
                access.fill(out, tensor, start, cast)

            for pieces in self.warm:
                pieces.find_means(read)


class _Assembly:
    """The tensors of a graft, with the places of their elements."""

    def __init__(self, graft: Graft) -> None:
        self._graft = graft
        self._old, self._new = graft.source.checkpoint, graft.start.checkpoint
        self._first = len(self._old.tensors)
        """Number of START's first tensor among those of both."""
        start = graft.start
        self._both = graft.source.append(self._new.tensors, start.cutting, start.files)
        self._index = self._old.tensor_index()
        self._start_index = self._new.tensor_index()
        self._tensors: list[LogicalTensor] = []
        self._rows: list[int] = []
        """The tensor of both that each one is; of those that are made, any."""
        self._made: dict[str, list[tuple[int, Sequence[Piece]]]] = {}
        """Dtype → tensors that are made, with their pieces."""
        self._all_pieces: list[Pieces] = []
        self._means: dict[tuple[str, str], tuple[tuple[int, str, int], ...]] = {}
        """State and name of what is warm → what its elements are the mean of."""
        self._given: list[tuple[int, bytes]] = []
        self._scheduler_files = scheduler_files(graft.source, start)
        self._parts = self._old.model_parts[0], self._new.model_parts[0]
        self._numbers: list[int | None] = []
        self._old_part = ""
        self._shapes: Mapping[str, tuple[int, ...]] = {}
        """Of the part that is put together now: its name in SRC, START's trained tensors."""
        self._notes: list[str] = []
        self._counts: dict[str, list[int]] = {}

    def grafted(self) -> Grafted:
        parts = [
            self._part(old, new)
            for old, new in zip(self._old.model_parts, self._new.model_parts, strict=True)
        ]
        kept = tuple(map(self._with_blobs, parts))
        files = self._files()
        checkpoint = replace(
            self._new,
            tag=self._old.tag,
            tensors=tuple(self._tensors),
            model_parts=kept,
            files=files,
            notes=(*self._old.notes, *self._new.notes, *map(Note, self._notes)),
            accelerate_step=self._old.accelerate_step,
        )
        start = self._graft.start
        made = self._placed(self._both.take(self._rows, checkpoint))
        codec_bytes = max(self._graft.source.codec_bytes, start.codec_bytes)
        made = replace(
            made,
            path=start.path,
            kind=start.kind,
            details=start.details,
            facts=start.facts,
            like=None,
            reference=None,
            repeats=(),
            codec_bytes=codec_bytes + (SCRATCH_BYTES if self._made or self._given else 0),
        )
        notes = [self._record().table]
        warm = [pieces for pieces in self._all_pieces if pieces.mean_bytes]
        if warm:
            size = show_bytes(sum(pieces.mean_bytes for pieces in warm))
            notes.append(f"Means for what is warm are found first, in {size}.")
        return Grafted(made, tuple(notes), self._both, warm)

    # The tensors

    def _part(self, old: ModelPart, new: ModelPart) -> ModelPart:
        inventories = Inventory.of(self._old, old), Inventory.of(self._new, new)
        if self._graft.is_fresh:
            inventories = replace(inventories[0], bare=frozenset()), inventories[1]
        self._old_part, self._shapes = old.name, inventories[1].trained
        origins = origins_of(*inventories, self._graft.rules)
        self._require_whole_rows(origins)
        numbers: list[int | None] = [None] * len(new.hyper_parameters)
        groups = []
        for group in new.groups:
            numbers[group.number], states = self._states(old, new, group, origins)
            groups.append(replace(group, states=states))
        for tensor in optimizer_tensors(groups, self._shapes, new.name):
            self._add(tensor, self._trained(tensor, origins[tensor.name]))
        for tensor in self._new.tensors:
            if tensor.state == MODULE and tensor.model_part == new.name:
                self._add(tensor, self._untrained(tensor, origins.get(tensor.name)))
        self._tell(*inventories, origins)
        files = new.model_state, new.optimizer_file
        model, optimizer = renumbered(files, lambda row: row + self._first)
        start = replace(new, model_state=model, optimizer_file=optimizer)
        state = grafted_state(
            old,
            start,
            numbers,
            fresh=self._graft.is_fresh,
            scheduler_of_start=self._graft.rules.scheduler_of_start,
            config=self._new.config,
            beside=next(iter(self._scheduler_files.values()), None),
        )
        self._parts, self._numbers = (old, start), numbers
        self._notes += state.notes
        return replace(
            start,
            groups=tuple(groups),
            model_state=state.model_state,
            optimizer_file=state.optimizer_file,
        )

    def _require_whole_rows(self, origins: Mapping[str, Origin]) -> None:
        """Refuse rows of tensors that may be cut among parts, where they begin elsewhere then."""
        name = next((n for n, origin in origins.items() if origin.rows is not None), None)
        if name is not None and len(self._new.model_parts) > 1:
            message = f"'{name}' has another count of rows, which tensor parallelism may have cut"
            message = f"{message}: take SRC and START to one part first, with 'streamshard"
            raise UnsupportedError(
                f"{message} repartition' and {Option('tensor_parallel', 1)}",
                path=self._graft.start.path,
            )

    def _states(
        self, old: ModelPart, new: ModelPart, group: ParamGroup, origins: Mapping[str, Origin]
    ) -> tuple[int | None, Mapping[str, State] | None]:
        """Return the param group of SRC that a group goes on from, and its states.

        A group that keeps none has those that START's optimizer began with.
        """
        owner = {name: one for one in old.groups for name in one.params}
        taken = [origins[name].source for name in group.params if origins[name].state == MASTER]
        sources = [owner[name] for name in taken if name is not None]
        if not sources:
            return None, group.states
        number = sources[0].number
        kept = {
            name: owner[str(origins[name].source)]
            for name in group.params
            if origins[name].keeps_states
        }
        if self._graft.is_fresh or not kept:
            return number if self._graft.is_fresh else None, group.states
        first, *others = {id(one): one for one in kept.values()}.values()
        for one in others:
            if one.documents != first.documents:
                steps = " and ".join(str((g.states or {}).get(STEP)) for g in (first, one))
                message = f"param group {group.number} of START joins parameters whose optimizer"
                message = f"{message} keeps different steps or states in SRC (steps {steps}). Give"
                raise DisagreementError(
                    f"{message} them param groups of their own in START",
                    path=self._graft.start.path,
                )
        require_same_settings(old, first, new, group)
        begun = [n for n in group.params if n not in kept or origins[n].rows is not None]
        if first.states is not None and begun:
            require_zeros(group, first)
            warm = [name for name in begun if origins[name].is_warm]
            for name in warm:
                self._warm(name, group, origins, first)
            if len(warm) < len(begun):
                self._notes += uncorrected(new, group)
        return first.number, first.states

    def _warm(
        self,
        name: str,
        group: ParamGroup,
        origins: Mapping[str, Origin],
        like: ParamGroup,
    ) -> None:
        """Note what the second moment of a parameter begins as the mean of."""
        seconds = [key for key in like.cut_states if key in _SECOND]
        if not seconds:
            message = f"'{name}' is warm, and its optimizer keeps no second moment; leave the word"
            raise UnsupportedError(f"{message} '{WARM}' out", path=self._graft.source.path)
        of = [name] if origins[name].keeps_states else group.params
        kept = [(other, origins[other]) for other in of if origins[other].keeps_states]
        for key in seconds:
            self._means[key, name] = tuple(
                self._kept(key, origin, self._shapes[other]) for other, origin in kept
            )

    def _kept(self, state: str, origin: Origin, shape: tuple[int, ...]) -> tuple[int, str, int]:
        """Return what is kept of a state: tensor, dtype, and count of leading elements."""
        row = self._index[self._old_part, state, str(origin.source)]
        return row, self._old.tensors[row].dtype, _kept_numel(origin, shape)

    def _trained(self, tensor: LogicalTensor, origin: Origin) -> Sequence[Piece]:
        fill = Piece(tensor.numel, mean_of=self._means.get((tensor.state, tensor.name), ()))
        if tensor.state == MASTER:
            if origin.source is None:
                return [self._start_piece(tensor)]
            return self._pieces(tensor, origin)
        if self._graft.is_fresh or not origin.keeps_states:
            is_begun = (tensor.model_part, tensor.state, tensor.name) in self._start_index
            return [self._start_piece(tensor)] if is_begun else [fill]
        row, dtype, numel = self._kept(tensor.state, origin, tensor.shape)
        kept, rest = Piece(numel, row, dtype), tensor.numel - numel
        return [kept, replace(fill, numel=rest)] if rest else [kept]

    def _untrained(self, tensor: LogicalTensor, origin: Origin | None) -> Sequence[Piece]:
        if origin is None or origin.source is None:
            return [self._start_piece(tensor)]
        return self._pieces(tensor, origin)

    def _pieces(self, tensor: LogicalTensor, origin: Origin) -> Sequence[Piece]:
        """Return a weight of SRC, and further rows of START's."""
        row = self._index[self._old_part, origin.state, str(origin.source)]
        there = self._old.tensors[row]
        if there.dtype != tensor.dtype and "float" not in there.dtype + tensor.dtype:
            message = f"'{tensor.name}' is {there.dtype} in SRC and {tensor.dtype} in START; give"
            raise UsageError(f"{message} 'new {tensor.name}'")
        numel = _kept_numel(origin, tensor.shape)
        kept = Piece(numel, row, there.dtype)
        if numel == tensor.numel:
            return [kept]
        return [kept, replace(self._start_piece(tensor), numel=tensor.numel - numel, first=numel)]

    def _start_piece(self, tensor: LogicalTensor) -> Piece:
        row = self._start_index[tensor.model_part, tensor.state, tensor.name]
        return Piece(tensor.numel, self._first + row, tensor.dtype)

    def _add(self, tensor: LogicalTensor, pieces: Sequence[Piece]) -> None:
        """Add a tensor: as it lies in a file, if it is one whole tensor, or made of pieces."""
        one, number = pieces[0], len(self._tensors)
        is_as_it_is = len(pieces) == 1 and one.tensor >= 0 and one.dtype == tensor.dtype
        # A tensor with fewer rows ends early, which no cutting minds.
        self._tensors.append(tensor)
        self._rows.append(one.tensor if is_as_it_is else 0)
        if not is_as_it_is:
            self._made.setdefault(tensor.dtype, []).append((number, pieces))

    def _placed(self, made: Source) -> Source:
        """Let the tensors that are made lie where their pieces are put together."""
        file = self._both.files[0]
        for dtype, tensors in self._made.items():
            numbers = [number for number, _ in tensors]
            numels = [self._tensors[number].numel for number in numbers]
            starts = np.cumsum([0, *numels], dtype=np.int64)[:-1] * ITEMSIZE[dtype]
            pieces = [piece for _, pieces in tensors for piece in pieces]
            decoder = Pieces.of(self._both.cutting, pieces, dtype)
            self._all_pieces.append(decoder)
            made = made.relocate(
                numbers, replace(file, decoder=decoder, recorded=None), starts.tolist()
            )
        for number, data in self._given:
            made = made.relocate([number], replace(file, decoder=Given(data), recorded=None), [0])
        return made

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

    def _files(self) -> tuple[OtherFile, ...]:
        """Add the other files: START's configs and tokenizer, all else of SRC's."""
        found, left_out = [], []
        start = {file.path: file for file in self._new.files if _describes_model(file.path)}
        for first, checkpoint in ((0, self._old), (self._first, self._new)):
            modes = {file.path: file for file in checkpoint.files}
            for number, tensor in enumerate(checkpoint.tensors):
                if tensor.state != FILE or (first and tensor.name not in start):
                    continue
                if not first and _describes_model(tensor.name):
                    left_out += [tensor.name] * (tensor.name not in start)
                elif tensor.name in self._scheduler_files:
                    found += self._scheduler_file(tensor.name, modes[tensor.name])
                elif PurePosixPath(tensor.name).name != GRAFT_RECORD:
                    self._tensors.append(tensor)
                    self._rows.append(first + number)
                    found.append(modes[tensor.name])
        if left_out:
            self._notes.append(
                f"Left out, as they describe the model of SRC, and START has none: "
                f"{some_of(left_out)}."
            )
        path = f"{self._old.tag}/{GRAFT_RECORD}"
        self._give(path, self._record().to_json())
        return (*found, OtherFile(path, 0o644))

    def _scheduler_file(self, path: str, file: OtherFile) -> list[OtherFile]:
        """Add the file of a scheduler, unless the job is to begin with one of its own."""
        data = content_of(
            self._scheduler_files[path],
            self._parts,
            self._numbers,
            scheduler_of_start=self._graft.rules.scheduler_of_start,
        )
        if data is None:
            self._notes.append(f"{path} is left out: the job begins with the scheduler it makes.")
            return []
        self._give(path, data)
        return [file]

    def _give(self, path: str, data: bytes) -> None:
        """Add a file of bytes."""
        self._given.append((len(self._tensors), data))
        self._tensors.append(LogicalTensor(FILE, path, "uint8", (len(data),)))
        self._rows.append(0)

    # What is said of it

    def _tell(self, source: Inventory, start: Inventory, origins: Mapping[str, Origin]) -> None:
        shapes = {**start.trained, **start.untrained}
        for label, names in names_of(origins).items():
            counts = self._counts.setdefault(label, [0, 0])
            counts[0] += len(names)
            counts[1] += sum(prod(shapes[name]) for name in names)
        dropped = [name for name in source.names if self._graft.rules.drops(name)]
        if dropped:
            counts = self._counts.setdefault("drop", [0, 0])
            counts[0] += len(dropped)
            counts[1] += sum(prod({**source.trained, **source.untrained}[n]) for n in dropped)
        fewer = [f"{count:,} of '{name}'" for name, count in dropped_rows(source, start, origins)]
        if fewer:
            self._notes.append(
                f"Rows that START does not have, and that are dropped: {some_of(fewer)}."
            )
        unsaved = sorted(name for name in start.untrained if source.leaves_out(name, start))
        if unsaved:
            self._notes.append(f"SRC did not save these, so they are START's: {some_of(unsaved)}.")

    def _record(self) -> GraftRecord:
        graft, step = self._graft, self._old.model_parts[0].model_state.get("global_steps")
        step = step if isinstance(step, int) else None
        source = Checkpointed(str(graft.source.path), self._old.tag, step)
        start = Checkpointed(str(graft.start.path), self._new.tag, None)
        counts = {label: RuleCount(*both) for label, both in self._counts.items()}
        return GraftRecord(tuple(graft.rules.lines), graft.is_fresh, source, start, counts)


def _kept_numel(origin: Origin, shape: tuple[int, ...]) -> int:
    """Count the leading elements of a tensor that come from SRC."""
    return prod(shape if origin.rows is None else (origin.rows, *shape[1:]))


def _describes_model(path: str) -> bool:
    """Tell whether a file describes a model: its weights, its config, its tokenizer."""
    is_weights = pretrained.holds_weights(PurePosixPath(path).name)
    return pretrained.comes_along(path) or is_weights or path == pretrained.ADAPTER_CONFIG
