"""Reads the ranks' optimizer files, group by group or sub-group by sub-group.

A "unit" is a set of parameters that a rank flattens into one tensor: a param group in stages 1
and 2, a sub-group in stage 3.
"""

import math
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from streamshard.errors import CorruptFileError, DisagreementError, UnsupportedError, raise_first
from streamshard.formats.checkpoint import ParamGroup
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.cut.zero_cutting import ModelPartMap, RecordedCut, recorded_cut
from streamshard.formats.deepspeed.read.agreement import disagreements, group_facts
from streamshard.formats.deepspeed.read.fingerprints import fingerprint, pickled
from streamshard.formats.deepspeed.read.rank_files import SAVE_AGAIN, SourceFiles, require
from streamshard.formats.deepspeed.read.state_of_ranks import (
    ANEW,
    GROUP,
    STATE,
    StateOfRanks,
    rank_local_error,
    rank_local_keys,
)
from streamshard.formats.deepspeed.states import State, rare_kinds
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
        return {**inner, "state": {unit: _unwrapped(of) for unit, of in inner["state"].items()}}

    def _require_known(self) -> None:
        """Refuse tensors that are no group's state, and other entries in which ranks differ."""
        known = {"state", "param_groups"}
        plain = [{key: n for key, n in inner.items() if key not in known} for inner in self._inner]
        for rank, (inner, entries) in enumerate(zip(self._inner, plain, strict=True)):
            units = range(len(self._masters[rank]))
            with of_file(self._paths[rank]):
                unknown = [unit for unit in inner["state"] if unit not in units]
            unknown += [key for key, node in entries.items() if any(storages_in(node))]
            if not unknown and fingerprint(entries) != fingerprint(plain[0]):
                unknown = list({**plain[0], **entries})
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
        self,
        units: Sequence[Sequence[str]],
        placed: Mapping[str, "ExpertPlacement"],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> tuple[ParamGroup, ...]:
        """Read the param groups.

        `units` names the parameters of each unit. `placed`: where the experts are that AutoEP fused
        to one parameter. `shapes`: shape of each parameter, by its name in the files.
        """
        for rank, masters in enumerate(self._masters):
            if len(masters) != len(units):
                message = f"{len(masters)} flat groups for {len(units)} groups of parameter shapes"
                raise DisagreementError(message, path=self._paths[rank])
        units_of = self.members(len(self._masters[0]))
        local = self._local_entries(units_of)
        groups: list[ParamGroup] = []
        experts = names.count_local_experts(chain.from_iterable(units))
        for number, members in enumerate(units_of):
            expert_ranks = self._expert_ranks(number)
            params = [units[unit] for unit in members]
            if expert_ranks and expert_ranks > 1:
                _require_numbered(chain.from_iterable(params), placed, self._paths[0])
            numels: dict[str, int] = {}
            for expert_rank in range(expert_ranks or 1):
                tensors = [
                    [
                        placed[name].names_of(name, expert_rank, expert_ranks)
                        if name in placed
                        else (names.of_expert_rank(name, expert_rank, experts),)
                        for name in unit
                    ]
                    for unit in params
                ]
                group = ParamGroup(
                    params=tuple(chain.from_iterable(chain.from_iterable(tensors))),
                    master_dtype=self._masters[0][members[0]].dtype if members else "float32",
                    states=None,
                    number=number,
                    expert_parallel=expert_ranks or 1,
                    expert_rank=expert_rank,
                )
                numels = numels or {name: math.prod(shapes[name]) for name in group.params}
                first = len(self.sub_group_params) if self._stage == 3 else len(groups)
                groups.append(self._with_states(group, members, first, numels, local[number]))
                self.sub_group_params += tensors
        self._require_one_kind(groups)
        for keys, entries in zip(local, self._inner[0]["param_groups"], strict=True):
            for key in keys:  # a rank's own number is none of the group
                del entries[key]
        return tuple(groups)

    def _require_one_kind(self, groups: Sequence[ParamGroup]) -> None:
        """Refuse a state that has an element per parameter element in some groups only.

        If a rank holds one element of a group, a scalar of shape (1,) looks like such a state.
        """
        cut = {key for group in groups for key in group.cut_states}
        for group in groups:
            for key, state in group.common_states.items():
                if key in cut and state.is_tensor:
                    message = (
                        f"optimizer state '{key}' of group {group.number} is a "
                        "scalar, and in another group has one element for each of the parameters' "
                        "or looks so; this optimizer is not supported"
                    )
                    raise UnsupportedError(message, path=self._paths[0])

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
        local = [
            rank_local_keys(GROUP, number, units, self._inner, self._sources)
            for number, units in enumerate(units_of)
        ]
        left_out = local + [set[str]()] * len(groups)
        shared_entries = [
            [
                {key: node for key, node in group.items() if key not in keys}
                for group, keys in zip(inner["param_groups"], left_out, strict=False)
            ]
            for inner in self._inner
        ]
        if not any(local) or len({*map(pickled, shared_entries)}) > 1:
            raise_first(errors)
        return local

    def _with_states(
        self,
        group: ParamGroup,
        members: Sequence[int],
        first: int,
        numels: Mapping[str, int],
        local: Set[str],
    ) -> ParamGroup:
        """Read the states of a param group, or leave them in the files of its ranks.

        `members`: its units. `first`: number of the first of the slots, one for each unit.
        `numels`: elements of its parameters, by their names in the files.
        `local`: its hyper-parameters that each rank computes by itself.
        """
        ranks = self._layout.sharing_ranks(group.expert_parallel, group.expert_rank)
        if group.expert_parallel > 1 and self._stage == 3:
            self._require_sharers(members, ranks)
        values = [self._values_of(unit, ranks) for unit in members]
        try:
            group = replace(group, states=self._states_of(group.number, members, ranks, values))
            self._require_cuttable(group, numels, local)
        except UnsupportedError as error:
            self.uncut = self.uncut or error
            group = replace(group, states={})
        for slot, (unit, of_unit) in enumerate(zip(members, values, strict=True), first):
            tensors = {MASTER: {rank: self._masters[rank][unit] for rank in ranks}}
            tensors |= {key: (of_unit or {})[key].tensors for key in group.cut_states}
            for key, by_rank in tensors.items():
                self._add_slot(slot, key, ranks, by_rank)
        return group

    def _require_cuttable(
        self, group: ParamGroup, numels: Mapping[str, int], local: Set[str]
    ) -> None:
        if objection := group.objection(numels, self._layout):
            raise UnsupportedError(f"{objection}. {ANEW}", path=self._paths[0])
        if local:
            what = f"'{min(local)}' of param group {group.number}"
            raise rank_local_error(what, "rank", self._paths[0])

    def _states_of(
        self,
        number: int,
        members: Sequence[int],
        ranks: Sequence[int],
        values: Sequence[Mapping[str, StateOfRanks] | None],
    ) -> dict[str, State] | None:
        """Return the states of a param group. `values`: what ranks hold of each of its units."""
        try:
            return self._agreed(values, ranks, frozenset())
        except DisagreementError as error:
            local = rank_local_keys(STATE, number, members, self._inner, self._sources)
            if not local:
                raise
            self._agreed(values, ranks, local)
            path, what = self._paths[ranks[0]], f"optimizer state '{min(local)}'"
            if len(ranks) == 1:
                raise rank_local_error(what, "sub-group", path) from error
            raise rank_local_error(f"{what} of group {members[0]}", "rank", path) from error

    def _agreed(
        self,
        values: Sequence[Mapping[str, StateOfRanks] | None],
        ranks: Sequence[int],
        local: Set[str],
    ) -> dict[str, State] | None:
        """Return the states, except those in `local`, in which units must agree."""
        states = [
            None
            if of_unit is None
            else {key: state.understand() for key, state in of_unit.items() if key not in local}
            for of_unit in values
        ]
        cuts = [[state.cut for state in (unit or {}).values()] for unit in states]
        if len({any(cut and cut.block > 1 for cut in unit) for unit in cuts}) > 1:
            message = f"some sub-groups of a param group are in 8 bits, and others are not. {ANEW}"
            raise UnsupportedError(message, path=self._paths[ranks[0]])
        if any(unit != states[0] for unit in states):
            message = "sub-groups of a param group differ in state"
            raise DisagreementError(message, path=self._paths[0])
        return states[0] if states else None

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

    def _values_of(self, unit: int, ranks: Sequence[int]) -> dict[str, StateOfRanks] | None:
        """Return what some ranks hold of a unit, by key; None without states."""
        if not any(unit in self._inner[rank]["state"] for rank in ranks):
            return None
        states_of = {rank: self._inner[rank]["state"].get(unit, {}) for rank in ranks}
        # Only at stages 1 and 2 a unit is a param group.
        options = self._inner[0]["param_groups"][unit] if self._stage < 3 else {}
        listed = {key for states in states_of.values() for key in states}
        if any(kind.may_be_missing(options) for key in listed for kind in rare_kinds(key)):
            # That a rank without states owns no parameter is checked later.
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
        values: dict[str, StateOfRanks] = {}
        for key in keys:
            values[key] = StateOfRanks(
                key=key,
                what=f"optimizer state '{key}' of group {unit}",
                nodes={rank: states[key] for rank, states in states_of.items()},
                paths=self._paths,
                sources=self._sources,
                numels=numels,
                unit=values,
                options=options,
            )
        return values

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
        for recorded in self.recorded:
            if recorded.slices is None or any(any(gaps) for gaps in recorded.alignments or ()):
                return None
            orders = orders or [{} for _ in recorded.slices]
            for order, slices in zip(orders, recorded.slices, strict=True):
                order.update((name, None) for name, _, _ in slices)
        return [list(order) for order in orders]

    @cached_property
    def recorded(self) -> tuple[RecordedCut, ...]:
        """What each rank's file records about its own partition."""
        cuts: list[RecordedCut] = []
        for rank, (state, path) in enumerate(zip(self._states, self._paths, strict=True)):
            cut = recorded_cut(state, path, has_paddings=self._strips_masters(rank))
            if cuts and cut.alignments == cuts[0].alignments:
                # One number for every parameter: equal ones are kept once.
                cut = replace(cut, alignments=cuts[0].alignments)
            cuts.append(cut)
        return tuple(cuts)

    def part_map(self) -> ModelPartMap:
        """Return where the states are, whose groups must have been read."""
        recorded = self.recorded if self._stage < 3 else ()
        return ModelPartMap(self.slots, recorded, self.sub_group_params)

    def ends(self) -> list[Node]:
        """Return the ids of the first and last parameter of each unit, as ZeRO-3 records them."""
        return [master.attributes.get("ds_id") for master in self._masters[0]]


def _require_numbered(params: Iterable[str], placed: Container[str], path: Path) -> None:
    """Refuse parameters of experts whose names do not number these."""
    for name in params:
        if name not in placed and not names.count_local_experts([name]):
            raise AUTO_EXPERTS.error(f"{show(name)} is of experts without numbers", path)


def _unwrapped(states: Node) -> Node:
    """Return a unit's states with those next to the others that bitsandbytes wraps in a dict.

    `Optimizer8bit.state_dict` (0.50.2) wraps those with 32 bits too; its `load_state_dict`
    takes both forms, as older versions take this one.
    """
    quantised = states.get(names.QUANTISED) if isinstance(states, dict) else None
    if not isinstance(quantised, dict):
        return states
    return {**{key: node for key, node in states.items() if key != names.QUANTISED}, **quantised}
