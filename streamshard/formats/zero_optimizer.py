"""Reads what the ranks' optimizer files hold, group by group or sub-group by sub-group.

"Unit" is what a rank flattens into one tensor: a param group in stages 1 and 2, a sub-group in
stage 3.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from streamshard.errors import CorruptFileError, DisagreementError, UnsupportedError
from streamshard.formats import deepspeed_names as names
from streamshard.formats.checkpoint import FlatState, ModuleEntry, ParamGroup, ScalarState
from streamshard.formats.inert import Node
from streamshard.formats.torch_tensor import Tensor, tensor_of
from streamshard.formats.zero_files import SAVE_AGAIN, SourceFiles, fingerprint, require
from streamshard.model import MASTER, RecordedCut, Slot, ZeroLayout

_SCALAR_LIMIT_BYTES = 64
"""A state tensor that is neither per element nor this small is not understood."""


class OptimizerReader:
    """Collects the optimizer's groups and where each rank keeps its part of every state."""

    def __init__(
        self,
        sources: SourceFiles,
        paths: Sequence[Path],
        states: Sequence[Mapping[str, Node]],
        layout: ZeroLayout,
    ) -> None:
        self.slots: dict[tuple[int, str], Slot] = {}
        """(param group, state), in stage 3 (unit, state) → where each rank that has it keeps it."""
        self._sources = sources
        self._paths = paths
        self._states = states
        self._layout = layout
        self._stage = layout.stage
        self._require_paddings()
        inner = names.OPTIMIZER if layout.stage == 3 else names.BASE_OPTIMIZER
        masters = names.FLAT_GROUPS_3 if layout.stage == 3 else names.FLAT_GROUPS
        self._inner = [self._inner_state(s, inner, p) for s, p in zip(states, paths, strict=True)]
        self._masters = [
            [self._flat(node, f"{masters}[{unit}]", path) for unit, node in enumerate(nodes)]
            for path, nodes in (
                (p, require(s, masters, p)) for s, p in zip(states, paths, strict=True)
            )
        ]

    def _require_paddings(self) -> None:
        """Refuse files that do not tell how much of the masters' padding they leave out."""
        for rank, path in enumerate(self._paths):
            if self._strips_masters(rank) and names.GROUP_PADDINGS not in self._states[rank]:
                message = f"{path}: no '{names.GROUP_PADDINGS}' in it; saved before DeepSpeed 0.7"
                raise UnsupportedError(f"{message}, which is not supported. {SAVE_AGAIN}")

    def _inner_state(self, state: Mapping[str, Node], key: str, path: Path) -> Mapping[str, Node]:
        inner = require(state, key, path)
        if isinstance(inner, list):
            message = (
                f"{path}: saved with elastic_checkpoint, whose files lack the optimizer's "
                "hyper-parameters; not supported yet"
            )
            raise UnsupportedError(message)
        if not isinstance(inner, dict) or not {"state", "param_groups"} <= inner.keys():
            raise CorruptFileError(f"{path}: '{key}' is not the state dict of an optimizer")
        return inner

    def _flat(self, node: Node, what: str, path: Path) -> Tensor:
        tensor = tensor_of(node)
        if tensor is None or len(tensor.shape) != 1:
            raise CorruptFileError(f"{path}: {what} is not a flat tensor")
        return tensor.require_contiguous(f"{path}: {what}")

    def groups(self, units: Sequence[Sequence[str]]) -> tuple[ParamGroup, ...]:
        """Read the param groups; `units` names the parameters of each unit.

        Raises
        ------
        DisagreementError
            Ranks, or sub-groups of one group, differ in what they must have in common.
        UnsupportedError
            A state is neither per element nor a scalar.
        """
        for rank, masters in enumerate(self._masters):
            if len(masters) != len(units):
                message = f"{self._paths[rank]}: {len(masters)} flat groups for {len(units)}"
                raise DisagreementError(f"{message} groups of parameter shapes")
        self._check_hyper_parameters()
        self._refuse_muon()
        found: list[ParamGroup] = []
        experts = names.count_local_experts(chain.from_iterable(units))
        for number, members in enumerate(self.members(len(units))):
            params = [name for unit in members for name in units[unit]]
            expert_parallel = self.expert_parallel(number)
            for expert_rank in range(expert_parallel):
                found.append(
                    ParamGroup(
                        params=tuple(
                            names.of_expert_rank(name, expert_rank, experts) for name in params
                        ),
                        master_dtype=self._masters[0][members[0]].dtype if members else "float32",
                        states=self._states_of(members, len(found), expert_parallel, expert_rank),
                        number=number,
                        expert_parallel=expert_parallel,
                        expert_rank=expert_rank,
                    )
                )
        return tuple(found)

    @property
    def is_bf16_optimizer(self) -> bool:
        """Whether it was a `BF16_Optimizer` that saved."""
        return self._layout.bf16_optimizer

    def expert_parallel(self, number: int) -> int:
        """Tell how many expert ranks there are to a param group: 1 if it holds no experts."""
        if self._inner[0]["param_groups"][number].get(names.IS_EXPERTS) is not True:
            return 1
        world_size = self._layout.world_size
        for state, path in zip(self._states, self._paths, strict=True):
            sharing = require(state, names.PARTITION_COUNT, path)[number]
            if sharing < 1 or world_size % sharing:
                message = f"{path}: experts of param group {number} shared by {sharing} ranks"
                raise DisagreementError(f"{message}, which do not divide {world_size}")
            if sharing != self._states[0][names.PARTITION_COUNT][number]:
                message = f"{path} and {self._paths[0]} disagree about {names.PARTITION_COUNT}"
                raise DisagreementError(message)
        return int(world_size // sharing)

    def _states_of(
        self, members: Sequence[int], group: int, expert_parallel: int, expert_rank: int
    ) -> dict[str, Node] | None:
        """Read the states of one param group, whose units must agree about what is not cut."""
        places = enumerate(
            self._layout.expert_place(rank, expert_parallel) for rank in range(len(self._states))
        )
        ranks = [rank for rank, (found, _) in places if found == expert_rank]
        states = [
            self._unit_states(unit, unit if self._stage == 3 else group, ranks) for unit in members
        ]
        for other in states[1:]:
            if other != states[0]:
                message = f"{self._paths[0]}: sub-groups of a param group differ in state"
                raise DisagreementError(message)
        return states[0] if states else None

    def members(self, unit_count: int) -> list[list[int]]:
        """Tell which units each param group consists of."""
        listed = [group.get("params") for group in self._inner[0]["param_groups"]]
        if list(chain.from_iterable(listed)) != list(range(unit_count)):
            message = f"{self._paths[0]}: param groups {listed} do not number {unit_count} groups"
            raise CorruptFileError(message)
        return [list(params) for params in listed]

    def lengths(self) -> list[int]:
        """Tell how many elements of each unit a rank holds."""
        return [master.numel for master in self._masters[0]]

    def _refuse_muon(self) -> None:
        """Refuse Muon where its momentum is that of whole parameters, not of the partition."""
        groups = self._inner[0]["param_groups"]
        if self._stage < 3 and any(group.get("use_muon") is True for group in groups):
            message = (
                f"{self._paths[0]}: trained with Muon, whose 'momentum_buffer' at stages 1 and 2 "
                "is kept for whole parameters; that is not supported yet"
            )
            raise UnsupportedError(message)

    def _check_hyper_parameters(self) -> None:
        first, *rest = [fingerprint(inner["param_groups"]) for inner in self._inner]
        for other, path in zip(rest, self._paths[1:], strict=True):
            if other != first:
                message = f"{path} and {self._paths[0]} disagree about the optimizer's param groups"
                raise DisagreementError(f"{message}: they are not of one step of one run")

    def _unit_states(self, unit: int, slot: int, ranks: Sequence[int]) -> dict[str, Node] | None:
        """Read one unit's states on some ranks and note where they lie; None if there are none."""
        self._add_slot(slot, MASTER, ranks, [self._masters[rank][unit] for rank in ranks])
        if not any(unit in self._inner[rank]["state"] for rank in ranks):
            return None
        held = {rank: self._inner[rank]["state"].get(unit, {}) for rank in ranks}
        keys = list(held[ranks[0]])
        for rank in ranks:
            if list(held[rank]) != keys:
                message = (
                    f"{self._paths[rank]}: states {list(held[rank])} of group {unit}, where "
                    f"{self._paths[ranks[0]]} has {keys}"
                )
                raise DisagreementError(message)
        return {
            key: self._state(unit, slot, key, {rank: held[rank][key] for rank in ranks})
            for key in keys
        }

    def _state(self, unit: int, slot: int, key: str, nodes: Mapping[int, Node]) -> Node:
        """Understand one state of a unit from what each rank holds under its key."""
        tensors = {rank: tensor_of(node) for rank, node in nodes.items()}
        what = f"optimizer state '{key}' of group {unit}"
        present = {rank: tensor for rank, tensor in tensors.items() if tensor is not None}
        first = next(iter(nodes))
        if len(present) < len(tensors):
            if present or len({fingerprint(node) for node in nodes.values()}) > 1:
                raise DisagreementError(f"{self._paths[first]}: ranks disagree about {what}")
            return nodes[first]
        if all(self._is_flat(unit, first, tensor) for tensor in present.values()):
            self._add_slot(slot, key, list(present), list(present.values()))
            return FlatState(present[first].dtype)
        values = {rank: self._scalar(what, rank, tensor) for rank, tensor in present.items()}
        for rank, value in values.items():
            if value != values[first]:
                message = f"{self._paths[rank]} and {self._paths[first]} disagree about {what}"
                raise DisagreementError(f"{message}: they are not of one step of one run")
        return values[first]

    def _is_flat(self, unit: int, first: int, tensor: Tensor) -> bool:
        """Tell whether a state has one element per element of the unit's partition.

        Partitions are equally long, and the first rank's tells how long. The last one's may not:
        before 0.16.4, padding that several ranks have was counted on the last of them alone.
        """
        expected = self._masters[first][unit].numel
        if self._strips_masters(first):
            expected += self._states[first][names.GROUP_PADDINGS][unit]
        return len(tensor.shape) == 1 and tensor.numel == expected

    def _strips_masters(self, rank: int) -> bool:
        """Tell whether a rank's masters are saved without the padding that its states have.

        BF16_Optimizer, which names no stage, saves both with it; its paddings are of another kind.
        """
        return self._stage < 3 and names.ZERO_STAGE in self._states[rank]

    def _scalar(self, what: str, rank: int, tensor: Tensor) -> ScalarState:
        path = self._paths[rank]
        tensor.require_contiguous(f"{path}: {what}")
        nbytes = tensor.numel * tensor.storage.nbytes // max(tensor.storage.numel, 1)
        if nbytes > _SCALAR_LIMIT_BYTES:
            message = (
                f"{path}: {what} has shape {tensor.shape}, which is neither one element per "
                "element of the partition nor a scalar; this optimizer is not supported"
            )
            raise UnsupportedError(message)
        data = self._sources.read_bytes(tensor.storage, tensor.offset, nbytes)
        return ScalarState(tensor.dtype, tensor.shape, data)

    def _add_slot(
        self, slot: int, state: str, ranks: Sequence[int], tensors: Sequence[Tensor]
    ) -> None:
        for tensor, rank in zip(tensors, ranks, strict=True):
            path = self._paths[rank]
            if tensor.dtype != tensors[0].dtype:
                message = f"{path}: {state} of group {slot} is {tensor.dtype}, on rank {ranks[0]}"
                raise DisagreementError(f"{message} {tensors[0].dtype}")
            tensor.require_contiguous(f"{path}: {state} of group {slot}")
        self.slots[slot, state] = Slot(
            files=np.array([t.storage.file for t in tensors], dtype=np.int64),
            offsets=np.array([t.offset for t in tensors], dtype=np.int64),
            numels=np.array([t.numel for t in tensors], dtype=np.int64),
        )

    def recorded(self) -> tuple[RecordedCut, ...]:
        """Read what each rank's file says of its own cut."""
        return tuple(
            RecordedCut(
                path=path,
                paddings=(
                    _tuple(state[names.GROUP_PADDINGS]) if self._strips_masters(rank) else None
                ),
                alignments=_nested(state.get(names.ALIGNMENT_PADDINGS)),
                slices=_recorded_slices(state.get(names.SLICE_MAPPINGS), path),
            )
            for rank, (state, path) in enumerate(zip(self._states, self._paths, strict=True))
        )

    def param_ids(
        self, units: Sequence[Sequence[str]], entries: Sequence[ModuleEntry]
    ) -> dict[str, int]:
        """Tell ZeRO-3's `ds_id` of the parameters.

        The files name the first and last id of each sub-group. The engine counts parameters in
        the module's order unless they were made under `zero.Init`; where the order explains every
        id that the files name, all ids are known, else only those.
        """
        counted = [e.name for e in entries if e.kind in ("param", "frozen")]
        derived = {name: number for number, name in enumerate(counted)}
        known: dict[str, int] = {}
        for params, master in zip(units, self._masters[0], strict=True):
            first, _, last = str(master.attributes.get("ds_id", "")).partition("_")
            if first.isdecimal() and last.isdecimal() and params:
                known |= {params[0]: int(first), params[-1]: int(last)}
        agrees = all(derived.get(name) == number for name, number in known.items())
        return derived if agrees else known


def _tuple(node: Node) -> tuple[int, ...] | None:
    return tuple(node) if isinstance(node, list) else None


def _nested(node: Node) -> tuple[tuple[int, ...], ...] | None:
    return tuple(tuple(inner) for inner in node) if isinstance(node, list) else None


def _recorded_slices(node: Node, path: Path) -> tuple[tuple[tuple[str, int, int], ...], ...] | None:
    """Read `param_slice_mappings`: per group, name to a `fragment_address` object."""
    if not isinstance(node, list):
        return None
    try:
        return tuple(
            tuple((name, at.state["start"], at.state["numel"]) for name, at in mapping.items())
            for mapping in node
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise CorruptFileError(f"{path}: '{names.SLICE_MAPPINGS}' is unreadable") from error
