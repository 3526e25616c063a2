"""Interprets what ranks hold under one key of their optimizer's state.

States in 8 bits are those of bitsandbytes (0.50.2: `Optimizer2State.init_state`, and
`optimizer_update_8bit_blockwise` of `backends/cpu/ops.py`). A rank's flat tensor is cut into blocks
of 256 elements, the last of which may be shorter. Element e has the value
`qmap1[state1[e]] * absmax1[e // 256]`. A tensor below `min_8bit_size` is kept in 32 bits, and loads
at any size in either form.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Final

from streamshard.errors import DisagreementError, UnsupportedError
from streamshard.formats.checkpoint import CODES, FlatState, ScalarState
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.read.agreement import disagreement
from streamshard.formats.deepspeed.read.fingerprints import pickled
from streamshard.formats.deepspeed.read.rank_files import SourceFiles
from streamshard.formats.pickle.inert import Call, Global, Node, show
from streamshard.formats.pickle.node_checks import of_file
from streamshard.formats.torch import torch_tensor
from streamshard.formats.torch.torch_tensor import Tensor, storages_in
from streamshard.layout.zero import ceil_div
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


@dataclass(frozen=True)
class StateOfRanks:
    """The values that ranks hold under one key of a unit's state."""

    what: str
    """Name in messages: `optimizer state 'exp_avg' of group 0`."""
    nodes: Mapping[int, Node]
    """Rank → value."""
    numels: Mapping[int, int]
    """Rank → element count of its part of the unit, which is that of a flat state."""
    paths: Sequence[Path]
    """The file of each rank."""

    @cached_property
    def tensors(self) -> dict[int, Tensor]:
        """Return the ranks' values as tensors: one for each rank, or none at all."""
        found = {rank: tensor for rank in self.nodes if (tensor := self._tensor(rank)) is not None}
        others = [rank for rank in self.nodes if rank not in found]
        for rank in others:
            if next(storages_in(self.nodes[rank]), None) is not None:
                raise self._refusal(
                    rank,
                    f"is {_kind(self.nodes[rank])}, which has tensors in it. States that are "
                    "quantised in blocks, split into factors or kept in lists cannot be cut for "
                    "other ranks",
                )
        if found and others:
            message = f"{self._place(others[0])} is {_kind(self.nodes[others[0]])}, and a tensor in"
            raise DisagreementError(f"{message} {self.paths[next(iter(found))]}")
        return found

    def _tensor(self, rank: int) -> Tensor | None:
        try:
            with of_file(self.paths[rank]):
                return torch_tensor.tensor_of(self.nodes[rank])
        except UnsupportedError as error:
            raise self._refusal(rank, str(error)) from error

    def _refusal(self, rank: int, message: str) -> UnsupportedError:
        return UnsupportedError(f"{self.what} {message}. {ANEW}", path=self.paths[rank])

    def _place(self, rank: int) -> str:
        return f"{self.paths[rank]}: {self.what}"

    def understand(self, sources: SourceFiles) -> Node:
        """Return a `FlatState`, a `ScalarState`, or a plain value that all ranks have in common."""
        tensors = self.tensors
        if not tensors:
            return self._plain()
        flat = {rank for rank, tensor in tensors.items() if self._is_flat(rank, tensor)}
        if len(flat) == len(tensors):
            return self.flat()
        odd = next(rank for rank in tensors if rank not in flat)
        if flat or tensors[odd].numel != 1:
            raise self._not_understood(odd, tensors[odd])
        return self._alike(sources)

    def _alike(self, sources: SourceFiles) -> ScalarState:
        """Read small tensors that are the same on all ranks."""
        found = {rank: self._scalar(rank, t, sources) for rank, t in self.tensors.items()}
        self._require_agreement(found)
        return next(iter(found.values()))

    def codes(self) -> FlatState:
        """Treat the ranks' tensors as parts of one state of codes."""
        for rank, tensor in self.tensors.items():
            if tensor.dtype != "uint8" or not self._is_flat(rank, tensor):
                raise self._not_understood(rank, tensor)
            tensor.require_contiguous(self._place(rank))
        return FlatState("uint8")

    def scales(self) -> FlatState:
        """Treat the ranks' tensors as parts of one state with an element per block of codes."""
        sizes: set[int] = set()
        for rank, tensor in self.tensors.items():
            fits = [b for b in _BLOCKS if tensor.shape == (ceil_div(self.numels[rank], b),)]
            sizes.update(fits)
            if tensor.dtype != "float32" or len(fits) != 1 or len(sizes) != 1:
                message = f"has shape {tensor.shape} for {self.numels[rank]} elements of 8 bits"
                raise self._refusal(rank, f"{message}, which does not tell one size of a block")
            tensor.require_contiguous(self._place(rank))
        return FlatState("float32", sizes.pop())

    def table(self, sources: SourceFiles) -> ScalarState:
        """Read the values of the codes."""
        for rank, tensor in self.tensors.items():
            if (tensor.dtype, tensor.shape) != ("float32", (_CODE_VALUES,)):
                raise self._not_understood(rank, tensor)
        return self._alike(sources)

    def flat(self) -> FlatState:
        """Treat the ranks' tensors as parts of one state with an element per parameter element."""
        for rank, tensor in self.tensors.items():
            if len(tensor.shape) != 1:
                raise self._not_understood(rank, tensor)
            if tensor.dtype in CODES:
                message = f"holds codes of {tensor.dtype}: 8-bit optimizers keep a scale for every"
                message = f"{message} block of them, and nothing here says where blocks begin"
                raise self._refusal(rank, message)
            tensor.require_contiguous(self._place(rank))
        return FlatState(next(iter(self.tensors.values())).dtype)

    def _is_flat(self, rank: int, tensor: Tensor) -> bool:
        return len(tensor.shape) == 1 and tensor.numel == self.numels[rank]

    def _not_understood(self, rank: int, tensor: Tensor) -> UnsupportedError:
        return self._refusal(
            rank,
            f"has shape {tensor.shape}, which is neither one element for each of the "
            f"{self.numels[rank]} that the rank holds of the parameters nor a scalar",
        )

    def _plain(self) -> Node:
        serialized: dict[int, bytes] = {}
        for rank, node in self.nodes.items():
            serialized[rank] = pickled(node)
            size = len(serialized[rank])
            if size > _PLAIN_LIMIT_BYTES:
                message = f"is {_kind(node)} and takes {size:,} bytes, which is not a plain value"
                raise self._refusal(rank, message)
        self._require_agreement(serialized)
        return next(iter(self.nodes.values()))

    def _scalar(self, rank: int, tensor: Tensor, sources: SourceFiles) -> ScalarState:
        tensor.require_contiguous(self._place(rank))
        nbytes = tensor.numel * ITEMSIZE[tensor.dtype]
        data = sources.read_bytes(tensor.storage, tensor.offset, nbytes)
        return ScalarState(tensor.dtype, tensor.shape, data)

    def _require_agreement(self, values: Mapping[int, object]) -> None:
        first = next(iter(values))
        for rank, value in values.items():
            if value != values[first]:
                raise disagreement(self.paths[rank], self.paths[first], self.what)


_BLOCKS: Final = (64, 128, 256, 512, 1024, 2048, 4096)
"""Block sizes that bitsandbytes has, in elements; its optimizers had 2048 before 256."""
_CODE_VALUES: Final = 256
_IN_BLOCKS: Final = [tuple(f"{part}{n}" for part in ("state", "absmax", "qmap")) for n in (1, 2)]


def states_in_blocks(states: Mapping[str, StateOfRanks], sources: SourceFiles) -> dict[str, Node]:
    """Interpret those of a unit's states that are kept in 8 bits, if there are any."""
    found: dict[str, Node] = {}
    for keys in _IN_BLOCKS:
        if states.keys() >= {*keys} and all(states[key].tensors for key in keys):
            codes, scales, table = (states[key] for key in keys)
            values = codes.codes(), scales.scales(), table.table(sources)
            found.update(zip(keys, values, strict=True))
    return found


def unwrapped(states: Node) -> Node:
    """Return a unit's states with those next to the others that bitsandbytes wraps in a dict.

    `Optimizer8bit.state_dict` (0.50.2) wraps those with 32 bits too; its `load_state_dict`
    takes both forms, as older versions take this one.
    """
    held = states.get(names.QUANTISED) if isinstance(states, dict) else None
    if not isinstance(held, dict):
        return states
    return {**{key: node for key, node in states.items() if key != names.QUANTISED}, **held}


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
        tensor = torch_tensor.tensor_of(node)
    except UnsupportedError:
        return None
    if tensor is None:
        return node if type(node) in (int, float) else None
    nbytes = ITEMSIZE[tensor.dtype]
    data = b"" if tensor.shape else sources.read_bytes(tensor.storage, tensor.offset, nbytes)
    return ScalarState(tensor.dtype, tensor.shape, data).number()


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
