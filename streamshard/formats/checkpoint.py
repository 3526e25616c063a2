"""A checkpoint without its partitioning: readers return it, writers start from it."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from streamshard.errors import CorruptFileError, Option, lacking
from streamshard.formats.deepspeed import ds_config, names
from streamshard.formats.deepspeed.ds_versions import Version, dotted, version_in
from streamshard.formats.deepspeed.states import Elementwise, Masters, State, rare_kinds
from streamshard.formats.pickle.inert import Node
from streamshard.formats.pickle.node_checks import danger_in
from streamshard.layout.cutting import Cutting
from streamshard.model import (
    FILE,
    ITEMSIZE,
    MASTER,
    Computed,
    LogicalTensor,
    Note,
    NoteKind,
    Repeat,
    SourceFile,
    ZeroLayout,
)

GRAFT_RECORD: Final = "graft.json"
"""Name of the file in the tag directory that says what was grafted."""
LIKE: Final = Option("like", what="the checkpoint")
"""What messages call a reference checkpoint: another one, which supplies what the source lacks."""


def _remark(note: Note) -> str:
    """Return a note's text. What is assumed of dumps may be given, which no file can say."""
    if note.kind is not NoteKind.ASSUMED:
        return note.text
    return f"{note.text} For that, {lacking('ds_config')}."


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """One param group of the optimizer, with the states of its parameters."""

    params: tuple[str, ...]
    """Parameter names in the optimizer's order."""
    master_dtype: str
    states: Mapping[str, State] | None
    """By their keys; None before the first step. Empty if they cannot be cut."""
    number: int = 0
    """Index of the group in the optimizer. A group of experts is listed once per expert rank."""
    expert_parallel: int = 1
    """Count of expert ranks; each has its own experts in this group. 1 without experts."""
    expert_rank: int = 0

    @property
    def cut_states(self) -> dict[str, Elementwise]:
        """Those with a tensor for each parameter, in the optimizer's order."""
        return {k: cut for k, state in (self.states or {}).items() if (cut := state.cut)}

    @property
    def tensor_states(self) -> dict[str, Elementwise]:
        """All that have a tensor for each parameter, the master weights first."""
        return {MASTER: Elementwise(self.master_dtype), **self.cut_states}

    @property
    def common_states(self) -> dict[str, State]:
        """Those with one value for all parameters."""
        return {k: state for k, state in (self.states or {}).items() if state.cut is None}

    @property
    def documents(self) -> dict[str, tuple[Node, ...]] | None:
        """What stands for the states in stores; equal for equal states."""
        if self.states is None:
            return None
        return {key: state.document() for key, state in self.states.items()}

    def objection(self, numels: Mapping[str, int], layout: ZeroLayout) -> str | None:
        """Say why a layout cannot cut the states; None if it can.

        `numels`: elements of each parameter, by name.
        """
        ranks, states = layout.world_size // self.expert_parallel, self.cut_states.values()
        objections = (state.objection(self.number, numels, layout, ranks) for state in states)
        return next(filter(None, objections), None)


@dataclass(frozen=True, slots=True)
class ModuleEntry:
    """One entry of the module's state dict."""

    name: str
    kind: str
    """`param` (trained), `frozen`, `weight` (either of these: stage 0 does not record which),
    `buffer`, `alias` (another name of a tied parameter), `loose` (in no param group), `extra` (not
    a dense tensor), or `excluded` (another name of a frozen weight that `exclude_frozen_parameters`
    left out)."""
    dtype: str
    shape: tuple[int, ...]
    """For an excluded weight in stage 3: the placeholder's, as no file records the real shape."""
    alias_of: str = ""
    """The name that an `alias` or `excluded` entry is tied to."""
    paused: bool = False
    """Whether a trained parameter was frozen when the checkpoint was saved. DeepSpeed then saves it
    both as one that is trained and as one that is frozen."""

    @property
    def held_as(self) -> str:
        """The name under which the entry's values are stored."""
        return self.alias_of if self.kind == "alias" else self.name


def require_tied_to_weights(entries: Sequence[ModuleEntry]) -> None:
    """Refuse aliases of a name that is not a tensor of the module."""
    own = {entry.name for entry in entries if entry.kind not in ("alias", "extra")}
    for entry in entries:
        if entry.kind == "alias" and entry.alias_of not in own:
            message = f"'{entry.name}' is said to be tied to '{entry.alias_of}'"
            raise CorruptFileError(f"{message}, which is not a tensor of its own")


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A file that is copied without being read."""

    path: str
    """Relative to the run directory, with forward slashes."""
    mode: int
    """Permission bits."""


@dataclass(frozen=True, slots=True)
class LayerFile:
    """A file of a pipeline layer, whose tensors are logical tensors of the modules."""

    name: str
    """Of the file, in the tag directory."""
    state: Node
    """The layer's state dict, whose storages are `Whole` tensors. None if it is not known which
    logical tensors the file has."""


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A part of the model that one data-parallel group of ranks trains.

    Tensor and pipeline parallelism create several model parts, numbered by `mp_rank`; without them
    there is one.
    """

    name: str
    """Empty if there is one model part, else unique, such as `mp_rank_01`."""
    groups: tuple[ParamGroup, ...]
    """In the optimizer's order, the expert ranks of one group next to each other. Empty at stage 0,
    whose files do not record which parameter a state belongs to."""
    module: tuple[ModuleEntry, ...]
    model_state: Mapping[str, Node]
    """The model file's dict. Entries that depend on the partitioning are empty, and storages refer
    to blobs."""
    optimizer_file: Mapping[str, Node]
    """The optimizer file's dict, stripped in the same way. Empty at stage 0, where the model file
    holds the optimizer's state."""
    param_ids: Mapping[str, int]
    """ZeRO-3's `ds_id` of each parameter whose id is known from the files."""

    @property
    def wrapped_optimizer(self) -> Mapping[str, Node]:
        """State dict of the optimizer that ZeRO wraps: its hyper-parameters, without states."""
        state = self.optimizer_file[names.OPTIMIZER]
        wrapped: Mapping[str, Node] = state.get(names.BASE_OPTIMIZER) or state[names.OPTIMIZER]
        return wrapped

    @property
    def hyper_parameters(self) -> Sequence[Mapping[str, Node]]:
        """Those of each param group, by its number; none at stage 0."""
        found: Sequence[Mapping[str, Node]]
        found = self.wrapped_optimizer["param_groups"] if self.groups else []
        return found

    def with_hyper_parameters(self, groups: Sequence[Mapping[str, Node]]) -> Self:
        """Return it with those of other param groups."""
        state = self.optimizer_file[names.OPTIMIZER]
        key = names.BASE_OPTIMIZER if state.get(names.BASE_OPTIMIZER) else names.OPTIMIZER
        state = {**state, key: {**state[key], "param_groups": [*groups]}}
        return replace(self, optimizer_file={**self.optimizer_file, names.OPTIMIZER: state})

    @property
    def trains_experts(self) -> bool:
        """Whether some param group is of experts, each of which has a file of its own."""
        return any(map(names.is_of_experts, self.hyper_parameters))

    def is_muon(self, group: ParamGroup) -> bool:
        """Tell whether DeepSpeed's Muon trains a group, and not its auxiliary Adam."""
        return self.hyper_parameters[group.number].get(names.IS_MUON) is True

    def kept_states(self, group: ParamGroup, layout: ZeroLayout) -> dict[str, Elementwise]:
        """Return a group's tensor states as ranks of a layout keep them."""
        options, kept = self.hyper_parameters[group.number], group.tensor_states
        for key in group.cut_states:
            for kind in rare_kinds(key):
                kept[key] = kind.kept(key, kept[key], options, layout)
        if not layout.bf16_optimizer:
            kept[MASTER] = Masters(group.master_dtype)
        return kept

    def serialized(self, group: ParamGroup) -> tuple[str, ...]:
        """Return a group's parameter names as in the files: each expert rank counts from 0."""
        first = (g for g in self.groups if g.number == group.number and g.expert_rank == 0)
        return tuple(name for name, _ in self._parameters(next(first)))

    def tensor_counts(self, group: ParamGroup) -> tuple[int, ...]:
        """Return how many of a group's tensors, next to each other, each parameter in the files is.

        It is one, except where AutoEP fuses experts.
        """
        return tuple(count for _, count in self._parameters(group))

    def fuses(self, group: ParamGroup) -> bool:
        """Tell whether each parameter of a group is several tensors, as AutoEP's experts are."""
        if not group.params or names.fused_expert_of(group.params[0]) is None:
            return False
        return names.is_of_experts(self.hyper_parameters[group.number])

    def _parameters(self, group: ParamGroup) -> Iterable[tuple[str, int]]:
        return names.parameters(group.params) if self.fuses(group) else zip(group.params, repeat(1))

    def held_by(self, rank: int, layout: ZeroLayout) -> list[tuple[int, int]]:
        """List a data-parallel rank's groups: (index in `groups`, rank among those sharing it)."""
        places = []
        for index, group in enumerate(self.groups):
            expert_rank, sharer = layout.expert_place(rank, group.expert_parallel)
            if expert_rank == group.expert_rank:
                places.append((index, sharer))
        return places


@dataclass(frozen=True, slots=True)
class Uncut:
    """Optimizer states that cannot be cut for other ranks, so that the ranks' files are kept."""

    why: str
    """Says also what to do."""
    files: tuple[str, ...]
    """The files of the ranks' optimizers, which are among the other files of the checkpoint."""
    path: Path | None = None
    """The file that shows it; None if another source was made of the files."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """Optimizer states that were dropped on request. No job can resume from the rest."""

    at: str
    """Time in UTC, in ISO 8601."""
    why: str
    states: tuple[str, ...]
    """Names of the dropped states."""

    def __str__(self) -> str:
        """Return which states were dropped, when and why.

        >>> str(Dropped("2026-12-24T04:00:00+00:00", "by hand", ("exp_avg", "step")))
        'its optimizer states (exp_avg, step) were dropped on 2026-12-24 by hand'
        """
        states = ", ".join(self.states)
        return f"its optimizer states ({states}) were dropped on {self.at[:10]} {self.why}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One saved step of a training run, as logical tensors and inert training state."""

    tag: str
    layout: ZeroLayout
    """How the source was partitioned: its provenance, and the default for a target."""
    tensors: tuple[LogicalTensor, ...]
    model_parts: tuple[ModelPart, ...]
    module_dtype: str
    files: tuple[OtherFile, ...]
    notes: tuple[Note, ...] = ()
    """Facts that the user should know about how the checkpoint was read."""
    is_bf16: bool = False
    """Whether bf16 was on in the engine. The file names show it."""
    accelerate_step: int | None = None
    """`Accelerator.step`, which Accelerate saves with each rank's random state."""
    dropped: Dropped | None = None
    """States that were dropped on request; None if the checkpoint is complete."""
    uncut: Uncut | None = None
    """States that cannot be cut; None if all are logical tensors and values."""
    foreign: str = ""
    """What it is, if it is not of DeepSpeed: then it holds no training state of an engine."""
    saved_ranks: int | None = None
    """Count of the ranks that saved its files, where it was re-cut or grafted; else None."""
    layers: tuple[LayerFile, ...] = ()
    """Files of a pipeline's layers. Empty without a pipeline, and where these are among `files`."""
    unrecorded: tuple[str, ...] = ()
    """What a job needs that neither its files nor the config of a job tell, if it is foreign."""

    @property
    def graft_record(self) -> str | None:
        """Path of the file that says what was grafted into it, if anything was."""
        path = f"{self.tag}/{GRAFT_RECORD}"
        return path if any(file.path == path for file in self.files) else None

    @property
    def remarks(self) -> tuple[str, ...]:
        """Return the texts of the notes. The first one says if states are not read."""
        return (*self.unread, *map(_remark, self.notes), *self.warnings)

    @property
    def unread(self) -> tuple[str, ...]:
        """Say why the optimizer's states, or some of them, are not read; empty if they are."""
        if self.dropped is not None:
            return (f"Weights only: {self.dropped}. No job can resume from it.",)
        if self.uncut is None:
            return ()
        what = "Not all of the optimizer's state can be cut for other ranks"
        return (f"{what}: {self.uncut.path or self.tag}: {self.uncut.why}.",)

    @property
    def largest_block(self) -> int:
        """Elements of the largest block of which an optimizer state has one scale; 1 if of none."""
        groups = (group for model_part in self.model_parts for group in model_part.groups)
        states = (state for group in groups for state in group.cut_states.values())
        return max((state.block for state in states), default=1)

    def objection(self, layout: ZeroLayout) -> str | None:
        """Say why a layout cannot cut the optimizer's states; None if it can."""
        for part in self.model_parts:
            for group, shapes in zip(part.groups, self.group_shapes(part), strict=True):
                numels = {name: math.prod(shape) for name, shape in shapes.items()}
                if objection := group.objection(numels, layout):
                    return objection
        return None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return a warning if the training state has names that run something when loaded."""
        kept = [
            (part.model_state, part.optimizer_file, [group.documents for group in part.groups])
            for part in self.model_parts
        ]
        return danger_in([kept, [layer.state for layer in self.layers]])

    @property
    def is_dumps(self) -> bool:
        """Whether this is the optimizer alone, read from raw per-rank dumps."""
        return not self.model_parts[0].model_state

    @property
    def expert_parallel(self) -> int:
        """Smallest count of data-parallel ranks that hold all experts; 1 without experts.

        Without ZeRO no group tells it, but each of these ranks has an optimizer file
        (`_save_moe_checkpoint` of `deepspeed/runtime/engine.py`, 0.19.8).
        """
        if not self.layout.stage:
            prefix = f"{self.tag}/{names.WHOLE_EXPERT_OPTIMIZER}"
            ends = (f.path.removeprefix(prefix) for f in self.files if f.path.startswith(prefix))
            return max(1, len({end.partition("_")[0] for end in ends}))
        return math.lcm(
            *(g.expert_parallel for model_part in self.model_parts for g in model_part.groups)
        )

    @property
    def has_muon(self) -> bool:
        """Whether DeepSpeed's Muon trains some of it."""
        return any(part.is_muon(group) for part in self.model_parts for group in part.groups)

    @property
    def has_auto_experts(self) -> bool:
        """Whether it was trained with AutoEP."""
        return any(part.model_state.get(names.AUTO_EXPERTS) for part in self.model_parts)

    @property
    def replicas(self) -> int:
        """Count of ranks that hold the same partition. One of them saves it."""
        return ds_config.sequence_replicas(self.config, self.layout.world_size, self.ds_version)

    @property
    def ranks(self) -> int:
        ranks = self.layout.world_size * len(self.model_parts) * self.replicas
        return ranks if self.saved_ranks is None else self.saved_ranks

    @property
    def config(self) -> Mapping[str, Any]:
        """The DeepSpeed config in the files; empty if they have none."""
        first = self.model_parts[0]
        return ds_config.config_in(first.optimizer_file or first.model_state)

    @property
    def ds_version(self) -> Version | None:
        """The version of DeepSpeed that saved it; None if the files do not say."""
        first = self.model_parts[0]
        state = first.optimizer_file.get(names.OPTIMIZER)
        return version_in(first.optimizer_file, first.model_state, state)

    def of_version(self, version: Version | None) -> Self:
        """Return it as if that version of DeepSpeed had saved it, as which its files are read."""
        if version in (None, self.ds_version):
            return self
        model_parts = [
            replace(
                part,
                model_state=_with_version(part.model_state, version),
                optimizer_file=_with_version(part.optimizer_file, version),
            )
            for part in self.model_parts
        ]
        return replace(self, model_parts=tuple(model_parts))

    def tensor_index(self) -> dict[tuple[str, str, str], int]:
        """Return (model part, state, name) → index in `tensors`."""
        return {(t.model_part, t.state, t.name): i for i, t in enumerate(self.tensors)}

    def master_shapes(self, model_part: ModelPart) -> dict[str, tuple[int, ...]]:
        """Return the shape of a model part's trained parameters, by name."""
        mine = (t for t in self.tensors if t.state == MASTER and t.model_part == model_part.name)
        return {t.name: t.shape for t in mine}

    def group_shapes(self, model_part: ModelPart) -> list[dict[str, tuple[int, ...]]]:
        """Return the parameter shapes of each group of a model part, in the group's order."""
        shapes = self.master_shapes(model_part)
        return [{name: shapes[name] for name in group.params} for group in model_part.groups]

    def master_numels(self, model_part: ModelPart) -> dict[str, int]:
        """Return the element count of a model part's trained parameters, by name."""
        shapes = self.master_shapes(model_part)
        return {name: math.prod(shape) for name, shape in shapes.items()}


def _with_version(entries: Mapping[str, Node], version: Version) -> dict[str, Node]:
    """Replace the version that a file's dict records, if it records one."""
    replaced = dict(entries)
    if names.DS_VERSION in entries:
        replaced[names.DS_VERSION] = dotted(version)
    state = entries.get(names.OPTIMIZER)
    if isinstance(state, dict) and names.DS_VERSION in state:
        replaced[names.OPTIMIZER] = _with_version(state, version)
    return replaced


@dataclass(frozen=True, slots=True)
class Reading:
    """A checkpoint as a reader returns it: its content, and the place of every element."""

    checkpoint: Checkpoint
    cutting: Cutting
    files: tuple[SourceFile, ...]
    """The files that the cutting refers to."""
    repeats: tuple[Repeat, ...] = ()
    """Copies that other ranks have of what is read."""

    def take(
        self, rows: Sequence[int], checkpoint: Checkpoint, left_out: Collection[int] = ()
    ) -> Self:
        """Return some of the tensors, which are the checkpoint's; files `left_out` have none."""
        kept = [number for number in range(len(self.files)) if number not in left_out]
        numbers = np.full(len(self.files), -1)
        numbers[kept] = np.arange(len(kept))
        cutting = self.cutting.take(np.array(rows, dtype=np.int64)).in_files(numbers)
        files = tuple(self.files[number] for number in kept)
        return replace(self, checkpoint=checkpoint, cutting=cutting, files=files)

    def append(
        self, tensors: Sequence[LogicalTensor], cutting: Cutting, files: Sequence[SourceFile]
    ) -> Self:
        """Add tensors that lie in other files after the others; the cutting is of these files."""
        first = len(self.files)
        numels = np.array([tensor.numel for tensor in tensors], dtype=np.int64)
        behind = cutting.in_files(np.arange(first, first + len(files)))
        return replace(
            self,
            checkpoint=replace(self.checkpoint, tensors=(*self.checkpoint.tensors, *tensors)),
            cutting=self.cutting.append(behind, numels),
            files=(*self.files, *files),
        )

    def append_files(self, names: Sequence[str], files: Sequence[SourceFile]) -> Self:
        """Add files after the others, each as a tensor of its bytes."""
        both = zip(names, files, strict=True)
        tensors = [LogicalTensor(FILE, name, "uint8", (file.nbytes,)) for name, file in both]
        places = ((number, 0, file.nbytes, 1) for number, file in enumerate(files))
        return self.append(tensors, Cutting.of_files(places), files)

    def compute(self, rows: Sequence[int], content: Computed) -> Self:
        """Let some tensors be computed: the content is all of them, one after the other."""
        file, tensors = len(self.files), [self.checkpoint.tensors[row] for row in rows]
        both = zip(accumulate((t.nbytes for t in tensors), initial=0), tensors, strict=False)
        other = Cutting.of_files((file, start, t.numel, ITEMSIZE[t.dtype]) for start, t in both)
        numels = np.array([tensor.numel for tensor in tensors], dtype=np.int64)
        cutting = self.cutting.relocate(np.array(rows, dtype=np.int64), other, numels)
        computed = replace(self.files[0], decoder=content, recorded=None)
        return replace(self, cutting=cutting, files=(*self.files, computed))
