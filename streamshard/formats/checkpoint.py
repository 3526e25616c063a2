"""A checkpoint freed of its cutting: what every reader delivers and every writer starts from."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamshard.errors import CorruptFileError
from streamshard.formats.deepspeed import ds_config, names
from streamshard.formats.pickle.inert import Node
from streamshard.model import MASTER, LogicalTensor, ZeroLayout


@dataclass(frozen=True, slots=True)
class FlatState:
    """An optimizer state with one element per parameter element."""

    dtype: str


@dataclass(frozen=True, slots=True)
class ScalarState:
    """An optimizer state that is one small tensor per group, such as `step`."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """What the optimizer holds for one param group."""

    params: tuple[str, ...]
    """Parameter names in the optimizer's order."""
    master_dtype: str
    states: Mapping[str, Node] | None
    """State key → `FlatState`, `ScalarState`, or a plain value; None before the first step."""
    number: int = 0
    """Its number in the optimizer. A group of experts comes once for each of its expert ranks."""
    expert_parallel: int = 1
    """Count of expert ranks, each of which has other experts in this group; 1 without experts."""
    expert_rank: int = 0

    def flat_states(self) -> dict[str, str]:
        """Return state → dtype of all states that are cut, the optimizer's own in their order."""
        return {k: v.dtype for k, v in (self.states or {}).items() if isinstance(v, FlatState)}


@dataclass(frozen=True, slots=True)
class ModuleEntry:
    """One entry of the module's state dict."""

    name: str
    kind: str
    """`param` (trained), `frozen`, `weight` (stage 0 does not tell which of the two), `buffer`,
    `alias` (another name of a tied parameter), `loose` (no param group trains it), `extra` (no
    dense tensor), or `excluded` (another name of a frozen weight that `exclude_frozen_parameters`
    left out)."""
    dtype: str
    shape: tuple[int, ...]
    """Of an excluded weight in stage 3, where its shape is in no file, that of its placeholder."""
    alias_of: str = ""
    """The name that it is tied to, where it is `alias` or `excluded`."""

    @property
    def held_as(self) -> str:
        """The name under which its values are kept."""
        return self.alias_of if self.kind == "alias" else self.name


def require_tied_to_weights(entries: Sequence[ModuleEntry]) -> None:
    """Refuse entries that are said to be another name of what is no tensor of its own.

    Raises
    ------
    CorruptFileError
        There is one.
    """
    own = {entry.name for entry in entries if entry.kind not in ("alias", "extra")}
    for entry in entries:
        if entry.kind == "alias" and entry.alias_of not in own:
            message = f"'{entry.name}' is said to be tied to '{entry.alias_of}'"
            raise CorruptFileError(f"{message}, which is no tensor of its own")


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A file that comes along unread."""

    path: str
    """Relative to the run directory, with forward slashes."""
    mode: int
    """Permission bits."""


@dataclass(frozen=True, slots=True)
class Family:
    """A part of the model that one data-parallel group of ranks trains.

    Tensor and pipeline parallelism make several, numbered by `mp_rank`; without them there is one.
    """

    name: str
    """Empty where there is one family, else unique: `mp_rank_01`."""
    groups: tuple[ParamGroup, ...]
    """In the optimizer's order, expert ranks of one group side by side. None at stage 0, which does
    not tell which parameters the states are of."""
    module: tuple[ModuleEntry, ...]
    model_state: Mapping[str, Node]
    """The model file's dict. What depends on the cutting is emptied, storages name blobs."""
    optimizer_file: Mapping[str, Node]
    """The optimizer file's dict, emptied likewise. Empty at stage 0, where the model file holds the
    optimizer's state."""
    param_ids: Mapping[str, int]
    """ZeRO-3's `ds_id` of the parameters for which a file tells it."""

    @property
    def wrapped_optimizer(self) -> Mapping[str, Node]:
        """State dict of the optimizer that ZeRO wraps: hyper-parameters, without states."""
        state = self.optimizer_file[names.OPTIMIZER]
        wrapped: Mapping[str, Node] = state.get(names.BASE_OPTIMIZER) or state[names.OPTIMIZER]
        return wrapped

    def is_muon(self, group: ParamGroup) -> bool:
        """Tell whether DeepSpeed's Muon trains a group, rather than its auxiliary Adam."""
        return self.wrapped_optimizer["param_groups"][group.number].get(names.IS_MUON) is True

    def whole_states(self, group: ParamGroup, layout: ZeroLayout) -> frozenset[str]:
        """Return the states that a rank keeps whole for every parameter it owns a part of."""
        whole = layout.whole_momentum and self.is_muon(group)
        return frozenset({names.MOMENTUM} & group.flat_states().keys()) if whole else frozenset()

    def serialized(self, group: ParamGroup) -> tuple[str, ...]:
        """Return a group's parameters as the files name them: each expert rank counts from 0."""
        first = (g for g in self.groups if g.number == group.number and g.expert_rank == 0)
        return next(first).params

    def held_by(self, rank: int, layout: ZeroLayout) -> list[tuple[int, int]]:
        """List what a data-parallel rank holds: (index in `groups`, rank among its sharers)."""
        held = []
        for index, group in enumerate(self.groups):
            expert_rank, sharer = layout.expert_place(rank, group.expert_parallel)
            if expert_rank == group.expert_rank:
                held.append((index, sharer))
        return held


@dataclass(frozen=True, slots=True)
class Dropped:
    """Optimizer states that somebody wanted left out, so that no job can resume from the rest."""

    at: str
    """When, in UTC, as ISO 8601 has it."""
    why: str
    states: tuple[str, ...]
    """Their names."""

    def __str__(self) -> str:
        """Say what is not there, when it was dropped and why.

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
    """How the source was cut: provenance, and the default for a target."""
    tensors: tuple[LogicalTensor, ...]
    families: tuple[Family, ...]
    module_dtype: str
    files: tuple[OtherFile, ...]
    notes: tuple[str, ...] = ()
    """What a user should know about the reading of it."""
    is_bf16: bool = False
    """Whether the engine had bf16 switched on, which the files' names tell."""
    accelerate_step: int | None = None
    """`Accelerator.step`, which Accelerate keeps with each rank's random generators."""
    dropped: Dropped | None = None
    """What was left out on purpose; None where all is there that was saved."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """Return the notes, and before them that this is no whole checkpoint if it is none."""
        if self.dropped is None:
            return self.notes
        return (f"Weights only: {self.dropped}. No job can resume from it.", *self.notes)

    @property
    def is_dumps(self) -> bool:
        """Whether this is the optimizer alone, as raw per-rank dumps have it."""
        return not self.families[0].model_state

    @property
    def expert_parallel(self) -> int:
        """Smallest count of data-parallel ranks that holds all experts; 1 without experts."""
        return math.lcm(*(g.expert_parallel for family in self.families for g in family.groups))

    @property
    def replicas(self) -> int:
        """Count of ranks that hold each partition alike, of which one saves it."""
        return ds_config.sequence_replicas(self.config, self.layout.world_size)

    @property
    def ranks(self) -> int:
        """Count of ranks that trained it."""
        return self.layout.world_size * len(self.families) * self.replicas

    @property
    def config(self) -> Mapping[str, Any]:
        """The DeepSpeed config that the files keep; empty if they keep none."""
        first = self.families[0]
        config = (first.optimizer_file or first.model_state).get(names.DS_CONFIG)
        return config if isinstance(config, dict) else {}

    def tensor_index(self) -> dict[tuple[str, str, str], int]:
        """Return (family, state, name) → index in `tensors`."""
        return {(t.family, t.state, t.name): i for i, t in enumerate(self.tensors)}

    def group_shapes(self, family: Family) -> list[dict[str, tuple[int, ...]]]:
        """Return the shapes of the parameters of each of a family's groups, in their order."""
        shapes = {
            t.name: t.shape for t in self.tensors if t.state == MASTER and t.family == family.name
        }
        return [{name: shapes[name] for name in group.params} for group in family.groups]

    def master_numels(self, family: Family) -> dict[str, int]:
        """Return the element count of a family's trained parameters, by name."""
        mine = (t for t in self.tensors if t.state == MASTER and t.family == family.name)
        return {t.name: t.numel for t in mine}
