"""Makes one source of two: the job of START, with the training of SRC in it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import PurePosixPath
from typing import Final

from streamshard.engine.run.phases import Progress
from streamshard.errors import DisagreementError, UnsupportedError
from streamshard.formats import pretrained
from streamshard.formats.checkpoint import GRAFT_RECORD, OtherFile, ParamGroup
from streamshard.formats.dcp.dcp_writer import value_item
from streamshard.grafting.assembly import Assembly, Dicts, States, with_part_files
from streamshard.grafting.job_state import grafted_state
from streamshard.grafting.origins import UNSAVED, Inventory, Origin, Shape, names_of, origins_of
from streamshard.grafting.pieces import SCRATCH_BYTES, Leading, Piece, Pieces
from streamshard.grafting.record import Checkpointed, GraftRecord, RuleCount
from streamshard.grafting.requirements import (
    STEP,
    is_part,
    require_alike,
    require_read,
    require_same_settings,
    require_whole_rows,
    require_zeros,
    uncorrected,
)
from streamshard.grafting.rules import DROP, WARM, Rules
from streamshard.grafting.schedules import Origins, Parts, grafted_scheduler_file, scheduler_files
from streamshard.layout.memory_plan import MemoryPlan
from streamshard.model import FILE, ITEMSIZE, MASTER, LogicalTensor, Note
from streamshard.sizes import show_bytes, some_of
from streamshard.source.degree_change import DerivedSource
from streamshard.source.source import Source

_SECOND: Final = ("exp_avg_sq", "max_exp_avg_sq")


def grafted(
    source: Source, start: Source, rules: Rules
) -> tuple[DerivedSource, Mapping[str, RuleCount]]:
    """Return START's job with SRC's training, and what each rule made."""
    require_alike(source, start, is_fresh=rules.is_fresh)
    sides = [with_part_files(side) for side in (source, start)]
    for side in sides:
        require_read(side.source)
    job = _ByRules(sides[0].source, sides[1].source, rules)
    graft, computed = job.grafted()
    checks = [side.check for side in sides if side.check is not None]

    def check(memory: MemoryPlan, progress: Progress) -> Sequence[str]:
        """Compare copies, and find what the second moments of warm parameters begin with."""
        for pieces in computed:
            pieces.find_means()
        return [note for check in checks for note in check(memory, progress)]

    needed = check if checks or job.means else None
    return DerivedSource(source=graft, original=source, check=needed), job.counts


class _ByRules(Assembly):
    """Settings, and what describes the model, are START's; what a training made is SRC's."""

    def __init__(self, source: Source, start: Source, rules: Rules) -> None:
        super().__init__(source, start)
        self._rules = rules
        self.means: dict[tuple[str, str, str], tuple[Leading, ...]] = {}
        """Part, state and name of what is warm → what its elements are the mean of."""
        self._schedulers = scheduler_files(source, start)
        self._notes: list[str] = []
        self.counts: dict[str, RuleCount] = {}
        self._groups: Origins = ()
        """Of the last model part: the param groups of SRC that those of START go on from."""

    def grafted(self) -> tuple[Source, Sequence[Pieces]]:
        """Return START's job, and what of it is computed."""
        old, new, start = self.old, self.new, self.start
        parts, files = self.parts(), self._files()
        if leading := {part for of in self.means.values() for part in of}:
            size = sum(numel * ITEMSIZE[old.tensors[row].dtype] for row, numel in leading)
            self._notes.append(f"Means for what is warm are found first, in {show_bytes(size)}.")
        checkpoint = replace(
            new,
            tag=old.tag,
            model_parts=parts,
            layers=self.layers(),
            files=files,
            notes=(*old.notes, *new.notes, *map(Note, dict.fromkeys(self._notes))),
            accelerate_step=old.accelerate_step,
            saved_ranks=old.ranks,
        )
        placed, computed = self.placed(checkpoint)
        graft = replace(
            placed,
            path=start.path,
            kind=start.kind,
            details=start.details,
            facts=start.facts,
            reference=None,
            repeats=(),
            codec_bytes=max(self.source.codec_bytes, start.codec_bytes) + SCRATCH_BYTES,
        )
        return graft, computed

    # Who says what

    def origins(self, parts: Sequence[Parts]) -> Sequence[Mapping[str, Origin]]:
        both = [(Inventory.of(self.old, old), Inventory.of(self.new, new)) for old, new in parts]
        by_part = origins_of(both, self._rules)
        for sides, origins in zip(both, by_part, strict=True):
            require_whole_rows(origins, self.start)
            self._tell(*sides, origins)
        return by_part

    def states(
        self, parts: Parts, group: ParamGroup, origins: Mapping[str, Origin]
    ) -> tuple[int | None, States]:
        """Return the param group of SRC that a group goes on from, and its states.

        A group that keeps none, on any expert rank, has those that START's optimizer began with.
        """
        old, new = parts
        owner = {name: one for one in old.groups for name in one.params}
        whole = (one for one in new.groups if one.number == group.number)
        members = {name: origins[name] for one in whole for name in one.params}
        sources = [owner[o.source] for o in members.values() if o.source and o.state == MASTER]
        for dtype in sorted({one.master_dtype for one in sources} - {group.master_dtype}):
            self._notes.append(
                f"Master weights are {dtype} in SRC, and {group.master_dtype} in START: they are "
                "cast, and so are their states when the engine loads them."
            )
        kept = {n: owner[str(o.source)] for n, o in members.items() if o.keeps_states}
        if not kept:
            return sources[0].number if self._rules.is_fresh and sources else None, group.states
        first = next(iter(kept.values()))
        for other in kept.values():
            if other.documents != first.documents:
                steps = " and ".join(str((g.states or {}).get(STEP)) for g in (first, other))
                message = f"param group {group.number} of START joins parameters whose optimizer"
                message = f"{message} keeps different steps or states in SRC (steps {steps}). Give"
                raise DisagreementError(
                    f"{message} them param groups of their own in START", path=self.start.path
                )
        require_same_settings(old, first, new, group)
        new_members = [n for n, o in members.items() if n not in kept or o.rows is not None]
        if first.states is not None and new_members:
            require_zeros(group, first)
            warm = [name for name in new_members if origins[name].is_warm]
            for name in warm:
                of = [name] if name in kept else [*kept]
                self._warm(new.name, name, of, origins, first)
            if len(warm) < len(new_members):
                self._notes += uncorrected(new, group)
        return first.number, first.states

    def _warm(
        self, part: str, name: str, of: Iterable[str], origins: Mapping[str, Origin],
        group: ParamGroup,
    ) -> None:  # fmt: skip
        """Note which tensors' kept elements the second moment of a parameter is the mean of."""
        seconds = [key for key in group.cut_states if key in _SECOND]
        if not seconds:
            message = f"'{name}' is warm, and its optimizer keeps no second moment; leave the word"
            raise UnsupportedError(f"{message} '{WARM}' out", path=self.source.path)
        masters = [self.new.tensors[self.start_index[part, MASTER, other]] for other in of]
        for key in seconds:
            kept = (self.kept(key, origins[master.name], master) for master in masters)
            self.means[part, key, name] = tuple(kept)

    def state(self, tensor: LogicalTensor, origin: Origin) -> Sequence[Piece]:
        """Return the pieces of an optimizer's state: SRC's, START's, or those of one value."""
        key = tensor.model_part, tensor.state, tensor.name
        fill = Piece(tensor.numel, mean_of=self.means.get(key, ()))
        if not origin.keeps_states:
            return [self.start_piece(tensor) if key in self.start_index else fill]
        (kept,) = super().state(tensor, origin)
        rest = replace(fill, numel=tensor.numel - kept.numel)
        return [kept, rest] if rest.numel else [kept]

    def training_state(self, parts: Parts, groups: Origins) -> Dicts:
        self._groups = groups
        state = grafted_state(
            *parts,
            groups,
            fresh=self._rules.is_fresh,
            scheduler_of_start=self._rules.scheduler_of_start,
            config=self.new.config,
            scheduler_file=next(iter(self._schedulers.values()), None),
        )
        self._notes += state.notes
        return state.model_state, state.optimizer_file

    # Files

    def _files(self) -> tuple[OtherFile, ...]:
        """Add the other files: START's configs and tokenizer, all else of SRC's."""
        old, new = self.old.files, self.new.files
        of_start = {file.path: file for file in new if _describes_model(file.path)}
        left_out = {file.path for file in old if _describes_model(file.path)}
        of_source = {file.path: file for file in old if file.path not in left_out}
        of_source.pop(str(self.old.graft_record), None)
        if left_out := left_out - of_start.keys():
            self._notes.append(
                f"Left out, as they describe the model of SRC, and START has none: "
                f"{some_of(sorted(left_out))}."
            )
        for path in [*of_source]:
            if path not in self._schedulers:
                self._add_copy(self.index["", FILE, path])
            elif not self._add_scheduler(path):
                del of_source[path]
        for path in of_start:
            self._add_copy(self.first + self.start_index["", FILE, path])
        path = f"{self.old.tag}/{GRAFT_RECORD}"
        self._add_file(path, self._record().to_json())
        return (*of_source.values(), *of_start.values(), OtherFile(path, 0o644))

    def _add_copy(self, row: int) -> None:
        tensor = self.union.checkpoint.tensors[row]
        self.add(tensor, [Piece(tensor.numel, row)])

    def _add_scheduler(self, path: str) -> bool:
        """Add the file of a scheduler, unless the job is to begin with one of its own."""
        parts = self.old.model_parts[-1], self.new.model_parts[-1]
        of_start = self._rules.scheduler_of_start
        state = grafted_scheduler_file(
            self._schedulers[path], parts, self._groups, scheduler_of_start=of_start
        )
        if state is None:
            self._notes.append(f"{path} is left out: the job begins with the scheduler it makes.")
        else:
            self._add_file(path, value_item(state))
        return state is not None

    def _add_file(self, path: str, data: bytes) -> None:
        tensor = LogicalTensor(FILE, path, "uint8", (len(data),))
        self.add(tensor, [Piece(len(data), data=data)])

    # What is said of it

    def _tell(self, source: Inventory, start: Inventory, origins: Mapping[str, Origin]) -> None:
        for label, names in names_of(origins).items():
            self._count(label, [start.shapes[name] for name in names])
        if dropped := [shape for n, shape in source.shapes.items() if self._rules.drops(n)]:
            self._count(DROP, dropped)
        before, after = source.shapes, start.shapes
        cut = {n: o.source for n, o in origins.items() if o.rows is not None and o.source}
        counts = {name: before[old][0] - after[name][0] for name, old in cut.items()}
        fewer = [f"{count:,} of '{name}'" for name, count in counts.items() if count > 0]
        if fewer:
            self._notes.append(
                f"Rows that START does not have, and that are dropped: {some_of(fewer)}."
            )
        unsaved = sorted(name for name, origin in origins.items() if origin.label == UNSAVED)
        if unsaved:
            self._notes.append(f"SRC did not save these, so they are START's: {some_of(unsaved)}.")

    def _count(self, label: str, shapes: Sequence[Shape]) -> None:
        """Add tensors to those of a rule; each model-parallel part has some."""
        before = self.counts.get(label, RuleCount(0, 0))
        elements = before.elements + sum(map(prod, shapes))
        self.counts[label] = RuleCount(before.tensors + len(shapes), elements)

    def _record(self) -> GraftRecord:
        step = self.old.model_parts[0].model_state.get("global_steps")
        step = step if isinstance(step, int) else None
        source = Checkpointed(str(self.source.path), self.old.tag, step)
        start = Checkpointed(str(self.start.path), self.new.tag, None)
        rules = self._rules
        return GraftRecord(tuple(rules.lines), rules.is_fresh, source, start, self.counts)


def _describes_model(path: str) -> bool:
    """Tell whether a file describes a model: its weights, its config, its tokenizer."""
    is_of_model = pretrained.holds_weights(PurePosixPath(path).name) or is_part(path)
    return pretrained.comes_along(path) or is_of_model or path == pretrained.ADAPTER_CONFIG
