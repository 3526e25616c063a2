"""Interprets what ranks hold under one key of their optimizer's state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Final, TypeVar

from streamshard.errors import DisagreementError, UnsupportedError
from streamshard.formats.deepspeed.read.agreement import disagreement
from streamshard.formats.deepspeed.read.fingerprints import pickled
from streamshard.formats.deepspeed.read.rank_files import SourceFiles
from streamshard.formats.deepspeed.states import Elementwise, Plain, Scalar, State, rare_kinds
from streamshard.formats.pickle.inert import Call, Global, Node, show
from streamshard.formats.pickle.node_checks import of_file
from streamshard.formats.torch.torch_tensor import Tensor, storages_in, tensor_of
from streamshard.model import ITEMSIZE

STATE: Final = "state"
GROUP: Final = "param group"
"""What an entry belongs to: the state of a unit, or its param group."""
_STEPS: Final = frozenset({(STATE, "step"), (GROUP, "step"), (GROUP, "k")})
"""Counts of steps; `k` is that of Prodigy and D-Adaptation."""
_OF_JOB: Final = frozenset({"lr", "initial_lr", "eps", "weight_decay", "momentum"})
"""Hyper-parameters that a job or its LR scheduler sets, on all ranks alike."""
_PLAIN_LIMIT_BYTES: Final = 1024
"""Most bytes of a plain value: values that are not tensors are written into every rank's file."""
_REBUILDS: Final = {
    "torch._tensor._rebuild_from_type_v2": 1,
    "torch._utils._rebuild_wrapper_subclass": 0,
}
"""Functions that rebuild objects of torch.Tensor subclasses → index of the class argument."""
ANEW: Final = (
    "Resume on as many ranks as saved it, at the same ZeRO stage, or start the optimizer again "
    "from the weights that 'streamshard export' writes"
)
CODES: Final = frozenset({"uint8", "int8", "float8_e4m3fn", "float8_e5m2"})
"""Dtypes of states whose values mean nothing without the scale of their block."""
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class StateOfRanks:
    """The values that ranks hold under one key of a unit's state."""

    key: str
    what: str
    """Name in messages: `optimizer state 'exp_avg' of group 0`."""
    nodes: Mapping[int, Node]
    """Rank → value."""
    numels: Mapping[int, int]
    """Rank → element count of its part of the unit, which is that of a flat state."""
    paths: Sequence[Path]
    """The file of each rank."""
    sources: SourceFiles
    unit: Mapping[str, "StateOfRanks"]
    """All states of the unit, by key."""
    options: Mapping[str, Node]
    """Hyper-parameters of the unit, if it is a param group (stages 1 and 2)."""

    @cached_property
    def tensors(self) -> dict[int, Tensor]:
        """Return the ranks' values as tensors: one for each rank, or none at all."""
        tensors = {rank: t for rank in self.nodes if (t := self._tensor(rank)) is not None}
        missing = [rank for rank in self.nodes if rank not in tensors]
        for rank in missing:
            if next(storages_in(self.nodes[rank]), None) is not None:
                raise self.refusal(
                    rank,
                    f"is {_kind(self.nodes[rank])}, which has tensors in it. States that are "
                    "quantised in blocks, split into factors or kept in lists cannot be cut for "
                    "other ranks",
                )
        if tensors and missing:
            message = f"{self._place(missing[0])} is {_kind(self.nodes[missing[0]])}, and a tensor"
            raise DisagreementError(f"{message} in {self.paths[next(iter(tensors))]}")
        return tensors

    def _tensor(self, rank: int) -> Tensor | None:
        try:
            with of_file(self.paths[rank]):
                return tensor_of(self.nodes[rank])
        except UnsupportedError as error:
            raise self.refusal(rank, str(error)) from error

    def refusal(self, rank: int, message: str) -> UnsupportedError:
        return UnsupportedError(f"{self.what} {message}. {ANEW}", path=self.paths[rank])

    def not_understood(self, rank: int) -> UnsupportedError:
        """Return the error of a tensor that no kind of state has."""
        return self.refusal(
            rank,
            f"has shape {self.tensors[rank].shape}, which is neither one element for each of the "
            f"{self.numels[rank]} that the rank holds of the parameters nor a scalar",
        )

    def _place(self, rank: int) -> str:
        return f"{self.paths[rank]}: {self.what}"

    def understand(self) -> State:
        """Return what ranks hold without the ranks."""
        for kind in rare_kinds(self.key):
            state: State | None = kind.read(self)
            if state is not None:
                return state
        if not self.tensors:
            return self._plain()
        if odd := [rank for rank in self.tensors if not self.is_flat(rank)]:
            if len(odd) < len(self.tensors) or self.tensors[odd[0]].numel != 1:
                raise self.not_understood(odd[0])
            return self.scalar()
        return self.flat()

    def is_flat(self, rank: int) -> bool:
        """Tell whether a rank has one element for each that it holds of the parameters."""
        return self.tensors[rank].shape == (self.numels[rank],)

    def flat(self) -> Elementwise:
        """Treat the ranks' tensors as parts of one state with an element per parameter element."""
        for rank, tensor in self.tensors.items():
            if len(tensor.shape) != 1:
                raise self.not_understood(rank)
            if tensor.dtype in CODES:
                message = f"holds codes of {tensor.dtype}: 8-bit optimizers keep a scale for every"
                message = f"{message} block of them, and nothing here says where blocks begin"
                raise self.refusal(rank, message)
            self.require_contiguous(rank)
        return Elementwise(next(iter(self.tensors.values())).dtype)

    def require_contiguous(self, rank: int) -> None:
        self.tensors[rank].require_contiguous(self._place(rank))

    def scalar(self) -> Scalar:
        """Read small tensors that are the same on all ranks."""
        scalars: dict[int, Scalar] = {}
        for rank, tensor in self.tensors.items():
            self.require_contiguous(rank)
            scalars[rank] = read_scalar(tensor, self.sources)
        return self._agreed(scalars)

    def _plain(self) -> Plain:
        serialized: dict[int, bytes] = {}
        for rank, node in self.nodes.items():
            serialized[rank] = pickled(node)
            size = len(serialized[rank])
            if size > _PLAIN_LIMIT_BYTES:
                message = f"is {_kind(node)} and takes {size:,} bytes, which is not a plain value"
                raise self.refusal(rank, message)
        self._agreed(serialized)
        return Plain(next(iter(self.nodes.values())))

    def _agreed(self, values: Mapping[int, _Value]) -> _Value:
        first = next(iter(values))
        for rank, value in values.items():
            if value != values[first]:
                raise disagreement(self.paths[rank], self.paths[first], self.what)
        return values[first]


def read_scalar(tensor: Tensor, sources: SourceFiles) -> Scalar:
    """Read a small tensor."""
    nbytes = tensor.numel * ITEMSIZE[tensor.dtype]
    data = sources.read_bytes(tensor.storage, tensor.offset, nbytes)
    return Scalar(tensor.dtype, tensor.shape, data)


def rank_local_keys(
    kind: str,
    number: int,
    units: Sequence[int],
    optimizers: Sequence[Mapping[str, Node]],
    sources: SourceFiles,
) -> set[str]:
    """Return the entries of one kind that each rank or sub-group of a param group computes alone.

    Such are fractions that differ, as the `RMS` of Adafactor in transformers (5.23), or in param
    groups the `d` of Prodigy (1.1.2) and D-Adaptation (3.2), where the step and all other counts
    show that they are of one save.

    `kind`: `STATE` or `GROUP`. `optimizers`: the state dict of each rank's optimizer.
    """
    entries: dict[tuple[str, str], list[Node]] = {}
    for unit, optimizer in product(units, optimizers):
        groups = optimizer["param_groups"][number : number + 1]
        listed = [((GROUP, key), node) for group in groups for key, node in group.items()]
        listed += [((STATE, key), node) for key, node in optimizer["state"].get(unit, {}).items()]
        for entry, node in listed:
            entries.setdefault(entry, []).append(_number(node, sources))
    complete = len(units) * len(optimizers)
    numbers = {e: n for e, n in entries.items() if len(n) == complete and None not in n}
    counts = {entry for entry, values in numbers.items() if all(n == n // 1 for n in values)}
    of_job = {entry for entry in numbers if entry[0] == GROUP and entry[1] in _OF_JOB}
    if counts.isdisjoint(_STEPS) or any(len({*numbers[e]}) > 1 for e in counts | of_job):
        return set()
    return {key for (of, key), values in numbers.items() if of == kind and len({*values}) > 1}


def _number(node: Node, sources: SourceFiles) -> Node:
    """Read a number, or a tensor that is one; None for anything else."""
    try:
        tensor = tensor_of(node)
    except UnsupportedError:
        return None
    if tensor is None:
        return node if type(node) in (int, float) else None
    return None if tensor.shape else read_scalar(tensor, sources).number()


def may_be_rank_local(key: Node, value: Node) -> bool:
    """Tell whether an entry of one file may be what `rank_local_keys` finds among files."""
    return type(value) is float and key not in {"step", "k"} | _OF_JOB


def rank_local_error(what: str, holder: str, path: Path) -> UnsupportedError:
    """Refuse an entry that `rank_local_keys` names."""
    message = f"{what} differs between {holder}s: each computes it from its own elements. {ANEW}"
    return UnsupportedError(message, path=path)


def _kind(node: Node) -> str:
    """Describe a node by its type, or by its class if it stands for an object."""
    if not isinstance(node, Call):
        return f"of type {type(node).__name__}"
    # A function rebuilds objects of a torch.Tensor subclass; one of its arguments is the class.
    place = _REBUILDS.get(node.name)
    named = node.function if place is None or len(node.args) <= place else node.args[place]
    return f"of class {show(named) if isinstance(named, Global) else 'unknown'}"
