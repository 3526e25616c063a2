"""A checkpoint freed of its cutting: what every reader delivers and every writer starts from."""

from collections.abc import Mapping
from dataclasses import dataclass

from streamshard.formats import deepspeed_names as names
from streamshard.formats.inert import Node
from streamshard.model import LogicalTensor, ZeroLayout


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

    def flat_states(self) -> dict[str, str]:
        """Return state → dtype of all states that are cut, the optimizer's own in their order."""
        return {k: v.dtype for k, v in (self.states or {}).items() if isinstance(v, FlatState)}


@dataclass(frozen=True, slots=True)
class ModuleEntry:
    """One entry of the module's state dict."""

    name: str
    kind: str
    """`param` (trained), `frozen`, `buffer` or `alias` (another name of a tied parameter)."""
    dtype: str
    shape: tuple[int, ...]
    alias_of: str = ""


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A file that comes along unread."""

    path: str
    """Relative to the run directory, with forward slashes."""
    mode: int
    """Permission bits."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One saved step of a training run, as logical tensors and inert training state."""

    tag: str
    layout: ZeroLayout
    """How the source was cut: provenance, and the default for a target."""
    tensors: tuple[LogicalTensor, ...]
    groups: tuple[ParamGroup, ...]
    module: tuple[ModuleEntry, ...]
    module_dtype: str
    model_state: Mapping[str, Node]
    """The model file's dict. What depends on the cutting is emptied, storages name blobs."""
    optimizer_file: Mapping[str, Node]
    """The optimizer file's dict, emptied likewise."""
    param_ids: Mapping[str, int]
    """ZeRO-3's `ds_id` of the parameters for which a file tells it."""
    files: tuple[OtherFile, ...]
    notes: tuple[str, ...] = ()
    """What a user should know about the reading of it."""
    is_bf16: bool = False
    """Whether the engine had bf16 switched on, which the files' names tell."""
    accelerate_step: int | None = None
    """`Accelerator.step`, which Accelerate keeps with each rank's random generators."""

    @property
    def is_dumps(self) -> bool:
        """Whether this is the optimizer alone, as raw per-rank dumps have it."""
        return not self.model_state

    @property
    def wrapped_optimizer(self) -> Mapping[str, Node]:
        """State dict of the optimizer that ZeRO wraps: hyper-parameters, without states."""
        state = self.optimizer_file[names.OPTIMIZER]
        wrapped: Mapping[str, Node] = state.get(names.BASE_OPTIMIZER) or state[names.OPTIMIZER]
        return wrapped

    def tensor_index(self) -> dict[tuple[str, str], int]:
        """Return (state, name) → index in `tensors`."""
        return {(t.state, t.name): i for i, t in enumerate(self.tensors)}
