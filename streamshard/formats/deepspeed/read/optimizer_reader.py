"""Reads the ranks' optimizer files, group by group or sub-group by sub-group.

A "unit" is a set of parameters that a rank flattens into one tensor: a param group in stages 1
and 2, a sub-group in stage 3.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from streamshard.errors import CorruptFileError, DisagreementError, UnsupportedError, raise_first
from streamshard.formats.checkpoint import FlatState, ParamGroup, ScalarState
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.cut.zero_cutting import RecordedCut, recorded_cut
from streamshard.formats.deepspeed.read.agreement import disagreements, group_facts
from streamshard.formats.deepspeed.read.fingerprints import fingerprint, pickled
from streamshard.formats.deepspeed.read.rank_files import SAVE_AGAIN, SourceFiles, require
from streamshard.formats.deepspeed.read.state_of_ranks import (
    ANEW,
    GROUP,
    STATE,
    StateOfRanks,
    rank_local_error,
    rank_local_numbers,
    states_in_blocks,
    unwrapped,
)
from streamshard.formats.deepspeed.unsupported import AUTO_EXPERTS, ELASTIC, SWAPPED
from streamshard.formats.pickle.inert import Node, show
from streamshard.formats.pickle.node_checks import name_of, of_file
from streamshard.formats.torch.torch_tensor import Tensor, storages_in, tensor_of
from streamshard.model import MASTER, Slot, ZeroLayout

if TYPE_CHECKING:
    from streamshard.formats.deepspeed.auto_experts import ExpertPlacement

_STATES_LIMIT: Final = 100
"""Most states of one group. Each state takes the work of one tensor on every rank."""


class OptimizerReader:
    """Collects the optimizer's groups, and the place of each rank's part of every state."""

    def __init__(
        self,
        sources: SourceFiles,
        paths: Sequence[Path],
        states: Sequence[Mapping[str, Node]],
        layout: ZeroLayout,
    ) -> None:
        self.slots: dict[tuple[int, str], Slot] = {}
        """(param group, state), in stage 3 (unit, state) → its places in the files of its ranks."""
        self.sub_group_params: list[Sequence[Sequence[str]]] = []
        """The tensors of each parameter of each sub-group, of experts for each expert rank."""
        self.uncut: UnsupportedError | None = None
        """Why states of some group cannot be cut; None if all can."""
        self._sources = sources
        self._paths = paths
        self._states = states
        self._layout = layout
        self._stage = layout.stage
        self._recorded: tuple[RecordedCut, ...] | None = None
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
        self._require_known()

    def _require_paddings(self) -> None:
        """Refuse files that leave out padding of the masters and do not record how much."""
        for rank, path in enumerate(self._paths):
            if self._strips_masters(rank) and names.GROUP_PADDINGS not in self._states[rank]:
                message = f"no '{names.GROUP_PADDINGS}' in it; saved before DeepSpeed 0.7, which is"
                raise UnsupportedError(f"{message} not supported. {SAVE_AGAIN}", path=path)

    def _inner_state(self, state: Mapping[str, Node], key: str, path: Path) -> Mapping[str, Node]:
        inner = require(state, key, path)
        if isinstance(inner, list):
            raise ELASTIC.error(f"'{key}' is a list", path)
        if not isinstance(inner, dict) or not {"state", "param_groups"} <= inner.keys():
            raise CorruptFileError(f"'{key}' is not the state dict of an optimizer", path=path)
        if not isinstance(inner["state"], dict):
            return inner
        return {**inner, "state": {unit: unwrapped(of) for unit, of in inner["state"].items()}}

    def _require_known(self) -> None:
        """Refuse tensors that are no group's state, and other entries in which ranks differ."""
        known = {"state", "param_groups"}
        plain = [{key: n for key, n in inner.items() if key not in known} for inner in self._inner]
        for rank, (inner, beside) in enumerate(zip(self._inner, plain, strict=True)):
            units = range(len(self._masters[rank]))
            with of_file(self._paths[rank]):
                unknown = [unit for unit in inner["state"] if unit not in units]
            unknown += [key for key, node in beside.items() if any(storages_in(node))]
            if not unknown and fingerprint(beside) != fingerprint(plain[0]):
                unknown = list({**plain[0], **beside})
            if unknown:
                message = f"its optimizer keeps {show(unknown)} next to the"
                message = f"{message} states of its groups, and no file says whether that is cut"
                raise UnsupportedError(
                    f"{message}; this optimizer is not supported", path=self._paths[rank]
                )

    def _flat(self, node: Node, what: str, path: Path) -> Tensor:
        with of_file(path):
            tensor = tensor_of(node)
        if tensor is None or len(tensor.shape) != 1:
            raise CorruptFileError(f"{what} is not a flat tensor", path=path)
        if self._stage == 3 and tensor.numel == 0:
            raise SWAPPED.error(f"{what} is empty", path)
        return tensor.require_contiguous(f"{path}: {what}")

    def groups(
        self, units: Sequence[Sequence[str]], placed: Mapping[str, "ExpertPlacement"]
    ) -> tuple[ParamGroup, ...]:
        """Read the param groups.

        `units` names the parameters of each unit. `placed`: where the experts are that AutoEP fused
        to one parameter.
        """
        for rank, masters in enumerate(self._masters):
            if len(masters) != len(units):
                message = f"{len(masters)} flat groups for {len(units)} groups of parameter shapes"
                raise DisagreementError(message, path=self._paths[rank])
        units_of = self.members(len(self._masters[0]))
        local = self._local_entries(units_of)
        found: list[ParamGroup] = []
        experts = names.count_local_experts(chain.from_iterable(units))
        for number, members in enumerate(units_of):
            expert_ranks = self._expert_ranks(number)
            expert_parallel = expert_ranks or 1
            own = chain.from_iterable(units[unit] for unit in members if expert_parallel > 1)
            for name in own:
                if name not in placed and not names.count_local_experts([name]):
                    shown = f"{show(name)} is of experts without numbers"
                    raise AUTO_EXPERTS.error(shown, self._paths[0])
            for expert_rank in range(expert_parallel):
                tensors = [
                    [
                        placed[name].names_of(name, expert_rank, expert_ranks)
                        if name in placed
                        else (names.of_expert_rank(name, expert_rank, experts),)
                        for name in units[unit]
                    ]
                    for unit in members
                ]
                first = len(self.sub_group_params) if self._stage == 3 else len(found)
                self.sub_group_params += tensors
                ranks = self._sharers(expert_parallel, expert_rank)
                if expert_parallel > 1 and self._stage == 3:
                    self._require_sharers(members, ranks)
                found.append(
                    ParamGroup(
                        params=tuple(chain.from_iterable(chain.from_iterable(tensors))),
                        master_dtype=self._masters[0][members[0]].dtype if members else "float32",
                        states=self._states_of(number, members, first, ranks, local[number]),
                        number=number,
                        expert_parallel=expert_parallel,
                        expert_rank=expert_rank,
                    )
                )
        self._require_one_kind(found)
        for keys, entries in zip(local, self._inner[0]["param_groups"], strict=True):
            for key in keys:  # a rank's own number is none of the group
                del entries[key]
        return tuple(found)

    def _require_one_kind(self, groups: Sequence[ParamGroup]) -> None:
        """Refuse a state that has an element per parameter element in some groups only.

        If a rank holds one element of a group, a scalar of shape (1,) looks like such a state.
        """
        flat = {key for group in groups for key in group.flat_states()}
        for group in groups:
            for key, value in (group.states or {}).items():
                if key in flat and isinstance(value, ScalarState):
                    message = (
                        f"optimizer state '{key}' of group {group.number} is a "
                        "scalar, and in another group has one element for each of the parameters' "
                        "or looks so; this optimizer is not supported"
                    )
                    raise UnsupportedError(message, path=self._paths[0])

    @property
    def is_bf16_optimizer(self) -> bool:
        """Whether a `BF16_Optimizer` saved the files."""
        return self._layout.bf16_optimizer

    def expert_parallel(self, number: int) -> int:
        """Return the count of expert ranks of a param group: 1 if it holds no experts."""
        return self._expert_ranks(number) or 1

    def _expert_ranks(self, number: int) -> int | None:
        """Return the count of expert ranks of a param group; None if it holds no experts."""
        if not names.is_of_experts(self._inner[0]["param_groups"][number]):
            return None
        world_size = self._layout.world_size
        first = self._sharing(0, number)
        for rank, path in enumerate(self._paths):
            sharing = self._sharing(rank, number)
            if sharing < 1 or world_size % sharing:
                message = f"experts of param group {number} shared by {sharing} ranks"
                raise DisagreementError(f"{message}, which do not divide {world_size}", path=path)
            if sharing != first:
                message = f"disagrees with {self._paths[0]} about {names.PARTITION_COUNT}"
                raise DisagreementError(message, path=path)
        return int(world_size // first)

    def _sharing(self, rank: int, number: int) -> int:
        """Return how many ranks share a param group of experts, as a rank's file records it."""
        state, path = self._states[rank], self._paths[rank]
        if self._stage < 3:
            return int(require(state, names.PARTITION_COUNT, path)[number])
        unit = self._inner[0]["param_groups"][number]["params"][0]
        return int(require(state, names.AUTO_EXPERT_GROUPS, path)[unit]["partition_count"])

    def _require_sharers(self, members: Sequence[int], ranks: Sequence[int]) -> None:
        """Refuse sub-groups of experts that other ranks share than the computed ones (stage 3)."""
        for rank in ranks:
            recorded = require(self._states[rank], names.AUTO_EXPERT_GROUPS, self._paths[rank])
            for unit in members:
                if recorded[unit]["partition_ranks"] != [*ranks]:
                    there = show(recorded[unit]["partition_ranks"])
                    message = f"ranks {there} share the experts of sub-group {unit}, and by its"
                    message = f"{message} config ranks {[*ranks]} do"
                    raise DisagreementError(message, path=self._paths[rank])

    def _local_entries(self, units_of: Sequence[Sequence[int]]) -> list[set[str]]:
        """Return which hyper-parameters of each param group each rank computes by itself.

        Ranks must agree about all others.
        """
        # Equal param groups of ranks are one object, as a rule.
        first, groups = group_facts(self._inner[0]), self._inner[0]["param_groups"]
        facts = {
            path: first if inner["param_groups"] is groups else group_facts(inner)
            for path, inner in zip(self._paths, self._inner, strict=True)
        }
        errors = [*disagreements(facts, self._paths[0])]
        if not errors:
            return [set() for _ in units_of]
        local = [self._rank_local(GROUP, number, units) for number, units in enumerate(units_of)]
        rest = [
            [
                *(
                    {key: node for key, node in group.items() if key not in keys}
                    for keys, group in zip(local, inner["param_groups"], strict=False)
                ),
                *inner["param_groups"][len(local) :],
            ]
            for inner in self._inner
        ]
        if not any(local) or len({*map(pickled, rest)}) > 1:
            raise_first(errors)
        return local

    def _rank_local(self, kind: str, number: int, units: Sequence[int]) -> set[str]:
        """Return which entries of one kind ranks, or sub-groups, of a param group compute alone."""
        found: dict[tuple[str, str], list[Node]] = {}
        for unit in units:
            nodes: dict[tuple[str, str], dict[int, Node]] = {}
            for rank, inner in enumerate(self._inner):
                groups = inner["param_groups"][number : number + 1]
                for key, node in chain.from_iterable(group.items() for group in groups):
                    nodes.setdefault((GROUP, key), {})[rank] = node
                for key, node in inner["state"].get(unit, {}).items():
                    nodes.setdefault((STATE, key), {})[rank] = node
            for entry, by_rank in nodes.items():
                values = StateOfRanks(str(entry), by_rank, {}, self._paths)
                found.setdefault(entry, []).extend(values.numbers(self._sources))
        count = len(self._inner) * len(units)
        complete = {entry: values for entry, values in found.items() if len(values) == count}
        return {key for of, key in rank_local_numbers(complete) if of == kind}

    def _states_of(
        self,
        number: int,
        members: Sequence[int],
        first: int,
        ranks: Sequence[int],
        local: Set[str],
    ) -> dict[str, Node] | None:
        """Read the states of one param group, or leave them in the files of its ranks.

        `first`: number of the first of the slots, one for each unit, that its places go into.
        `local`: the group's hyper-parameters that each rank computes by itself.
        """
        for slot, unit in enumerate(members, first):
            masters = {rank: self._masters[rank][unit] for rank in ranks}
            self._add_slot(slot, MASTER, ranks, masters)
        try:
            states = self._cut_states(number, members, first, ranks)
        except UnsupportedError as error:
            return self._keep_uncut(members, first, error)
        if local:
            what = f"'{min(local)}' of param group {number}"
            local_error = rank_local_error(what, "rank", self._paths[ranks[0]])
            return self._keep_uncut(members, first, local_error)
        return states

    def _cut_states(
        self, number: int, members: Sequence[int], first: int, ranks: Sequence[int]
    ) -> dict[str, Node] | None:
        try:
            return self._agreed_states(members, first, ranks, frozenset())
        except DisagreementError as error:
            local = self._rank_local(STATE, number, members)
            if not local:
                raise
            self._agreed_states(members, first, ranks, local)
            path, what = self._paths[ranks[0]], f"optimizer state '{min(local)}'"
            if len(ranks) == 1:
                raise rank_local_error(what, "sub-group", path) from error
            raise rank_local_error(f"{what} of group {members[0]}", "rank", path) from error

    def _agreed_states(
        self, members: Sequence[int], first: int, ranks: Sequence[int], local: Set[str]
    ) -> dict[str, Node] | None:
        """Read states, except those in `local`. Units must agree about unpartitioned values."""
        states = [
            self._unit_states(unit, slot, ranks, local) for slot, unit in enumerate(members, first)
        ]
        if len({_has_blocks(own) for own in states}) > 1:
            message = f"some sub-groups of a param group are in 8 bits, and others are not. {ANEW}"
            raise UnsupportedError(message, path=self._paths[ranks[0]])
        if any(other != states[0] for other in states):
            message = "sub-groups of a param group differ in state"
            raise DisagreementError(message, path=self._paths[0])
        return states[0] if states else None

    def _sharers(self, expert_parallel: int, expert_rank: int) -> list[int]:
        """List the ranks that share a param group."""
        places = enumerate(
            self._layout.expert_place(rank, expert_parallel) for rank in range(len(self._states))
        )
        return [rank for rank, (found, _) in places if found == expert_rank]

    def _keep_uncut(
        self, members: Sequence[int], first: int, error: UnsupportedError
    ) -> dict[str, Node]:
        """Leave the states of a param group in the files of its ranks."""
        self.uncut = self.uncut or error
        for slot, state in list(self.slots):
            if first <= slot < first + len(members) and state != MASTER:
                del self.slots[slot, state]
        return {}

    def with_whole_blocks(
        self,
        groups: Sequence[ParamGroup],
        shapes: Mapping[str, tuple[int, ...]],
        layout: ZeroLayout,
    ) -> tuple[ParamGroup, ...]:
        """Leave states in their files of which the source's own cut divides a block.

        `shapes`: shape of each parameter, by its name in the files.
        """
        if all(group.largest_block == 1 for group in groups):
            return tuple(groups)
        # Not at the top: most optimizers keep no blocks.
        from streamshard.formats.deepspeed.cut.block_cut import divided_block

        serialized = {group.number: group.params for group in groups if group.expert_rank == 0}
        members = self.members(len(self._masters[0]))
        found: list[ParamGroup] = []
        first = 0
        for group in groups:
            own = members[group.number]
            numels = {name: math.prod(shapes[name]) for name in serialized[group.number]}
            cut = divided_block(group, numels, layout)
            if cut is not None:
                error = UnsupportedError(f"{cut}. {ANEW}", path=self._paths[0])
                group = replace(group, states=self._keep_uncut(own, first, error))
            found.append(group)
            first += len(own)
        return tuple(found)

    def members(self, unit_count: int) -> list[list[int]]:
        """Return the units of each param group."""
        listed = [group.get("params") for group in self._inner[0]["param_groups"]]
        if list(chain.from_iterable(listed)) != list(range(unit_count)):
            message = f"param groups do not number {unit_count} groups"
            raise CorruptFileError(message, path=self._paths[0])
        return [list(params) for params in listed]

    def lengths(self) -> list[int]:
        """Return how many elements of each unit a rank holds."""
        return [master.numel for master in self._masters[0]]

    def _unit_states(
        self, unit: int, slot: int, ranks: Sequence[int], local: Set[str]
    ) -> dict[str, Node] | None:
        """Read one unit's states on some ranks and record their places; None without states."""
        if not any(unit in self._inner[rank]["state"] for rank in ranks):
            return None
        states_of = {rank: self._inner[rank]["state"].get(unit, {}) for rank in ranks}
        if self._is_muon(unit):
            # A rank that owns no parameter has no momentum. That it owns none is checked later.
            states_of = {rank: states for rank, states in states_of.items() if states} or states_of
        first = next(iter(states_of))
        with of_file(self._paths[first]):
            keys = [name_of(key) for key in states_of[first]]
        if len(keys) > _STATES_LIMIT:
            message = f"{len(keys)} states of one group, which no optimizer is known to have"
            raise CorruptFileError(message, path=self._paths[first])
        for rank, states in states_of.items():
            if list(states) != keys:
                message = (
                    f"states {show(list(states))} of group {unit}, where "
                    f"{self._paths[first]} has {show(keys)}"
                )
                raise DisagreementError(message, path=self._paths[rank])
        numels = {rank: self._state_numel(unit, rank, ranks[0]) for rank in states_of}
        by_key = {
            key: StateOfRanks(
                what=f"optimizer state '{key}' of group {unit}",
                nodes={rank: own[key] for rank, own in states_of.items()},
                numels=numels,
                paths=self._paths,
            )
            for key in keys
            if key not in local
        }
        found = states_in_blocks(by_key, self._sources)
        rest = [key for key in by_key if key not in found]
        found |= {key: self._state(unit, key, by_key[key]) for key in rest}
        for key, state in found.items():
            if isinstance(state, FlatState):
                self._add_slot(slot, key, ranks, by_key[key].tensors)
        return {key: found[key] for key in by_key}

    def _state(self, unit: int, key: str, state: StateOfRanks) -> Node:
        # A state of whole parameters: its element count on a rank needs the layout's arithmetic.
        whole = self._is_muon(unit) and key == names.MOMENTUM and bool(state.tensors)
        return state.flat() if whole else state.understand(self._sources)

    def _is_muon(self, unit: int) -> bool:
        """Tell whether a param group's momentum may cover whole parameters."""
        group = self._inner[0]["param_groups"][unit] if self._stage < 3 else {}
        return group.get(names.IS_MUON) is True

    def _state_numel(self, unit: int, rank: int, first: int) -> int:
        """Return the element count of a flat state: one for each element of the unit's partition.

        All partitions have the length of the first rank's. The last rank's record may be wrong:
        before 0.16.4, padding on several ranks was counted on the last of them only.
        """
        if not self._strips_masters(rank):
            return self._masters[rank][unit].numel
        return self._masters[first][unit].numel + int(
            self._states[first][names.GROUP_PADDINGS][unit]
        )

    def _strips_masters(self, rank: int) -> bool:
        """Tell whether a rank's masters are saved without the padding that its states have.

        BF16_Optimizer, which records no stage, saves both with padding. Its `group_paddings` mean
        something else.
        """
        return self._stage < 3 and names.ZERO_STAGE in self._states[rank]

    def _add_slot(
        self, slot: int, state: str, ranks: Sequence[int], tensors: Mapping[int, Tensor]
    ) -> None:
        """Record the places of a state on the ranks; a rank without the state has 0 elements."""
        dtype = next(iter(tensors.values())).dtype
        for rank, tensor in tensors.items():
            if tensor.dtype != dtype:
                message = f"{state} of group {slot} is {tensor.dtype}"
                raise DisagreementError(
                    f"{message}, on rank {next(iter(tensors))} {dtype}", path=self._paths[rank]
                )
        places = [tensors.get(rank, self._masters[rank][0]) for rank in ranks]
        self.slots[slot, state] = Slot(
            files=np.array([t.storage.file for t in places], dtype=np.int64),
            offsets=np.array([t.offset for t in places], dtype=np.int64),
            numels=np.array(
                [tensors[rank].numel if rank in tensors else 0 for rank in ranks], dtype=np.int64
            ),
        )

    def own_order(self) -> list[list[str]] | None:
        """List the parameters of each flat group in the group's own order; None if none says it.

        A rank records its slices in that order, unless there is padding between parameters.
        """
        orders: list[dict[str, None]] = []
        for recorded in self.recorded():
            if recorded.slices is None or any(any(gaps) for gaps in recorded.alignments or ()):
                return None
            orders = orders or [{} for _ in recorded.slices]
            for order, slices in zip(orders, recorded.slices, strict=True):
                order.update((name, None) for name, _, _ in slices)
        return [list(order) for order in orders]

    def recorded(self) -> tuple[RecordedCut, ...]:
        """Read what each rank's file records about its own partition."""
        if self._recorded is None:
            self._recorded = self._read_recorded()
        return self._recorded

    def _read_recorded(self) -> tuple[RecordedCut, ...]:
        found: list[RecordedCut] = []
        for rank, (state, path) in enumerate(zip(self._states, self._paths, strict=True)):
            own = recorded_cut(state, path, has_paddings=self._strips_masters(rank))
            if found and own.alignments == found[0].alignments:
                # One number for every parameter: equal ones are kept once.
                own = replace(own, alignments=found[0].alignments)
            found.append(own)
        return tuple(found)

    def ends(self) -> list[Node]:
        """Return the ids of the first and last parameter of each unit, as ZeRO-3 records them."""
        return [master.attributes.get("ds_id") for master in self._masters[0]]


def _has_blocks(states: Mapping[str, Node] | None) -> bool:
    return any(isinstance(own, FlatState) and own.block > 1 for own in (states or {}).values())
