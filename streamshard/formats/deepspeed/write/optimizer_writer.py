"""Serializes optimizer files: the `state_dict` of a ZeRO optimizer on each rank of a target."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np

from streamshard.formats.checkpoint import ParamGroup
from streamshard.formats.deepspeed import ds_config, names
from streamshard.formats.deepspeed.cut.part_cut import ZeroTarget
from streamshard.formats.pickle.inert import GETATTR, Call, Global, Node
from streamshard.formats.torch.torch_tensor import Storage, make_tensor
from streamshard.layout.cutting import Ints, Share, shard_segments
from streamshard.layout.zero import FlatGroup, Slices
from streamshard.model import MASTER, SubGroup, ZeroLayout

_LOSS_SCALER: Final = Global("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
_FRAGMENT_ADDRESS: Final = Global("deepspeed.utils.tensor_fragment", "fragment_address")

_KEYS_12: Final = (
    "loss_scaler",
    "dynamic_loss_scale",
    "overflow",
    names.CLIP_GRAD,
    names.BASE_OPTIMIZER,
    names.FLAT_GROUPS,
    names.ZERO_STAGE,
    names.GROUP_PADDINGS,
    names.ALIGNMENT_PADDINGS,
    names.PARTITION_COUNT,
    names.DS_VERSION,
    names.SLICE_MAPPINGS,
)
"""Keys in the order of `DeepSpeedZeroOptimizer.state_dict`."""
_KEYS_BF16: Final = tuple(
    key
    for key in _KEYS_12
    if key
    not in (
        "loss_scaler",
        "dynamic_loss_scale",
        "overflow",
        names.ZERO_STAGE,
        names.ALIGNMENT_PADDINGS,
    )
)
"""Keys in the order of `BF16_Optimizer.state_dict`."""
_KEYS_3: Final = (
    names.ZERO_STAGE,
    "loss_scaler",
    "dynamic_loss_scale",
    "overflow",
    names.PARTITION_COUNT,
    names.OPTIMIZER,
    names.FLAT_GROUPS_3,
)
"""Keys in the order of `DeepSpeedZeroOptimizer_Stage3.state_dict`."""


class OptimizerWriter:
    """Serializes each rank's optimizer file."""

    def __init__(self, target: ZeroTarget) -> None:
        self._model_part = target.model_part
        self._index = target.index
        self._tensors = target.checkpoint.tensors
        self._members: dict[tuple[int, str], tuple[Ints, Ints]] = {}
        self._source_layout = target.checkpoint.layout
        self._layout = target.layout
        self._config = target.config
        self._flat_groups = target.cut.flat_groups
        self._sub_groups = target.cut.sub_groups
        groups = target.model_part.groups
        self._kept = [target.model_part.kept_states(group, target.layout) for group in groups]

    def dump(self, rank: int) -> dict[str, Node]:
        """Build a rank's optimizer state alone, as in raw dumps."""
        source = self._model_part.optimizer_file
        state = self._stage_3(rank) if self._layout.stage == 3 else self._stage_12(rank)
        saved = source[names.OPTIMIZER]
        if _keys_of(self._layout) != _keys_of(self._source_layout):
            saved = {**self._unkept(source), **saved}
        return self._in_order(state, saved)

    def file(self, rank: int) -> dict[str, Node]:
        """Build a rank's whole optimizer file."""
        source = self._model_part.optimizer_file
        given = {names.DS_CONFIG: self._config} if names.DS_CONFIG in source else {}
        return {**source, names.OPTIMIZER: self.dump(rank), **given}

    def _in_order(self, state: Mapping[str, Node], entries: Mapping[str, Node]) -> dict[str, Node]:
        """Order a target's entries as in the source, or as the target's kind of optimizer does.

        Entries that only other kinds of optimizer have are left out. Unknown entries are kept.
        """
        order = _keys_of(self._layout)
        if order == _keys_of(self._source_layout):
            kept = {key: state.get(key, value) for key, value in entries.items()}
            # DeepSpeed before 0.19.7 did not write this key. Without it, no padding is expected.
            if any(map(any, state.get(names.ALIGNMENT_PADDINGS, []))):
                kept[names.ALIGNMENT_PADDINGS] = state[names.ALIGNMENT_PADDINGS]
            return kept
        merged = {**entries, **state}
        known = {key: merged[key] for key in order if key in merged}
        foreign = {*_KEYS_12, *_KEYS_3} - set(order)
        unknown = {k: v for k, v in entries.items() if k not in known and k not in foreign}
        return {**known, **unknown}

    def _unkept(self, source: Mapping[str, Node]) -> dict[str, Node]:
        """Build the entries that the target's kind of optimizer saves and the source's does not."""
        kept: dict[str, Node] = {}
        if self._source_layout.bf16_optimizer:
            # Training in bf16 has a constant loss scale of 1, so BF16_Optimizer saves no scaler.
            kept |= unscaled()
        if self._source_layout.stage == 3:
            clipping = ds_config.gradient_clipping(self._config)
            if clipping is not None:
                kept[names.CLIP_GRAD] = clipping
            if names.DS_VERSION in source:
                kept[names.DS_VERSION] = source[names.DS_VERSION]
        return kept

    def _stage_enum(self) -> Node:
        stage = self._layout.stage
        recorded = self._model_part.optimizer_file[names.OPTIMIZER].get(names.ZERO_STAGE)
        # DeepSpeed before 0.7.0 saved a plain int, and early Python 3.11 an attribute of the enum.
        if isinstance(recorded, int):
            return stage
        if isinstance(recorded, Call) and recorded.function in GETATTR:
            member = next(name for name, value in names.STAGES.items() if value == stage)
            return Call(recorded.function, (names.STAGE_ENUM, member))
        return Call(names.STAGE_ENUM, (stage,))

    def _stage_12(self, rank: int) -> dict[str, Node]:
        masters, mappings, cuts = [], [], []
        states: dict[int, Node] = {}
        for group, sharer in self._model_part.held_by(rank, self._layout):
            param_group, flat = self._model_part.groups[group], self._flat_groups[group]
            cuts.append((flat, sharer))
            masters.append(self._partition(group, sharer, MASTER))
            if param_group.states is not None:
                states[param_group.number] = self._states(group, param_group, sharer)
            mappings.append(self._slice_mapping(param_group, flat.recorded(sharer)))
        return {
            names.BASE_OPTIMIZER: self._inner(
                {number: entry for number, entry in states.items() if entry is not None},
                [[g] for g in range(len(masters))],
                rank,
            ),
            names.FLAT_GROUPS: masters,
            names.ZERO_STAGE: self._stage_enum(),
            names.GROUP_PADDINGS: [self._group_padding(flat, sharer) for flat, sharer in cuts],
            names.ALIGNMENT_PADDINGS: [list(flat.alignments) for flat, _ in cuts],
            names.PARTITION_COUNT: [flat.world_size for flat, _ in cuts],
            names.SLICE_MAPPINGS: mappings,
        }

    def _states(self, group: int, param_group: ParamGroup, sharer: int) -> dict[str, Node] | None:
        """Build a rank's states of a param group; None if the rank has no entry for the group."""
        states, nodes = param_group.states or {}, dict[str, Node]()
        for key, state in states.items():
            if state.cut is None:
                nodes[key] = state.node()
            elif (tensor := self._partition(group, sharer, key)) is not None:
                nodes[key] = tensor
        return nodes if nodes or not states else None

    def _group_padding(self, flat: FlatGroup, rank: int) -> int:
        """Return a rank's entry of `group_paddings`.

        BF16_Optimizer counts all padding of a group on the last rank, even if other ranks hold it.
        """
        if self._layout.bf16_optimizer:
            return flat.padding_counted_last(rank)
        return flat.padding(rank)

    def _slice_mapping(self, group: ParamGroup, slices: Slices) -> OrderedDict[str, Node]:
        params = self._model_part.serialized(group)
        return OrderedDict(
            (params[index], _fragment_address(start, numel)) for index, start, numel in slices
        )

    def _stage_3(self, rank: int) -> dict[str, Node]:
        masters, states = [], {}
        members: dict[int, list[int]] = {group.number: [] for group in self._model_part.groups}
        sharers = dict(self._model_part.held_by(rank, self._layout))
        sub_groups = [sub_group for sub_group in self._sub_groups if sub_group.group in sharers]
        for unit, sub_group in enumerate(sub_groups):
            param_group, sharer = (
                self._model_part.groups[sub_group.group],
                sharers[sub_group.group],
            )
            members[param_group.number].append(unit)
            attributes = self._unit_attributes(param_group, sub_group)
            masters.append(self._shards(sub_group, sharer, MASTER, attributes))
            if param_group.states is not None:
                states[unit] = {
                    key: state.node() if state.cut is None else self._shards(sub_group, sharer, key)
                    for key, state in param_group.states.items()
                }
        return {
            names.ZERO_STAGE: self._stage_enum(),
            names.PARTITION_COUNT: self._layout.world_size,
            names.AUTO_EXPERT_GROUPS: self._sharing(sub_groups, rank),
            names.OPTIMIZER: self._inner(states, [*members.values()], rank),
            names.FLAT_GROUPS_3: masters,
        }

    def _sharing(self, sub_groups: Sequence[SubGroup], rank: int) -> list[Node]:
        """Return what AutoEP notes of sub-groups: `_zero3_partition_group_metadata` (stage 3)."""
        if not self._model_part.model_state.get(names.AUTO_EXPERTS):
            return []
        entries = self._model_part.hyper_parameters
        metadata: list[Node] = []
        for unit, sub_group in enumerate(sub_groups):
            group = self._model_part.groups[sub_group.group]
            entry, degree = entries[group.number], group.expert_parallel
            is_fused = names.is_of_experts(entry)
            metadata.append(
                {
                    "sub_group": unit,
                    "partition_count": self._layout.world_size // degree,
                    "partition_rank": self._layout.expert_place(rank, degree)[1],
                    "partition_ranks": [*self._layout.sharing_ranks(degree, group.expert_rank)],
                    "families": ["autoep_expert" if is_fused else "replicated"],
                    "group_names": [entry[names.GROUP_NAME] if is_fused else "replicated"],
                }
            )
        return metadata

    def _unit_attributes(self, group: ParamGroup, sub_group: SubGroup) -> Mapping[str, Node]:
        """Build the `ds_id` that names a sub-group by its first and last parameter.

        Loading does not need it. It is left out if the source's files do not record the ids.
        """
        ids = self._model_part.param_ids
        params = group.params[sub_group.first : sub_group.stop]
        if self._model_part.fuses(group):
            params = tuple(name for name, _ in names.parameters(params))
        ends = params[0], params[-1]
        if not all(name in ids for name in ends):
            return {}
        return {"ds_id": f"{ids[ends[0]]}_{ids[ends[1]]}"}

    def _members_of(self, group: int, state: str) -> tuple[Ints, Ints]:
        """Return the logical tensors of a group's parameters, in its order, and their lengths."""
        if (group, state) not in self._members:
            params = self._model_part.groups[group].params
            tensors = [self._index[self._model_part.name, state, name] for name in params]
            numels = [self._tensors[tensor].numel for tensor in tensors]
            found = np.array(tensors, dtype=np.int64), np.array(numels, dtype=np.int64)
            self._members[group, state] = found
        return self._members[group, state]

    def _partition(self, group: int, sharer: int, key: str) -> Node | None:
        """Build a rank's partition of a state (stages 1 and 2); None if it has none."""
        state, (members, _) = self._kept[group][key], self._members_of(group, key)
        flat = self._flat_groups[group].in_blocks(state.block)
        share = state.share(flat, sharer, members)
        return None if share is None else _tensor(key, state.numel(flat, sharer), share)

    def _shards(
        self, unit: SubGroup, rank: int, key: str, attributes: Mapping[str, Node] | None = None
    ) -> Node:
        """Build a rank's shard of one state of each parameter of a sub-group (stage 3)."""
        state, group = self._kept[unit.group][key], self._model_part.groups[unit.group]
        columns = self._members_of(unit.group, key)
        members, numels = (column[unit.first : unit.stop] for column in columns)
        world_size, lasts = self._layout.world_size // group.expert_parallel, None
        if self._model_part.fuses(group):
            stops = np.cumsum(self._model_part.tensor_counts(group))
            lasts = stops[(stops > unit.first) & (stops <= unit.stop)] - unit.first - 1
        segments = partial(shard_segments, numels, world_size, tensors=members, lasts=lasts)
        share = Share(members, state.dtype, segments, rank)
        return _tensor(key, unit.numel // state.block, share, attributes)

    def _inner(
        self, states: Mapping[int, Node], members: Sequence[list[int]], rank: int
    ) -> dict[str, Node]:
        wrapped = self._model_part.wrapped_optimizer
        groups = [
            {**group, "params": list(params)}
            for group, params in zip(wrapped["param_groups"], members, strict=True)
        ]
        return {**wrapped, "state": dict(states), "param_groups": groups}


def _tensor(
    key: str, numel: int, share: Share, attributes: Mapping[str, Node] | None = None
) -> Node:
    storage = Storage(share.dtype, numel, share)
    return make_tensor(storage, (numel,), requires_grad=key == MASTER, attributes=attributes)


def unscaled() -> dict[str, Node]:
    """Build the entries of an optimizer whose loss is not scaled, as in bf16 and fp32."""
    scaler = Call(_LOSS_SCALER, (), new=True, state={"cur_scale": 1.0, "dynamic": False})
    return {"loss_scaler": scaler, "dynamic_loss_scale": False, "overflow": False}


def _keys_of(layout: ZeroLayout) -> tuple[str, ...]:
    """Return the keys that the optimizer of a layout saves, in its order."""
    if layout.bf16_optimizer:
        return _KEYS_BF16
    return _KEYS_3 if layout.stage == 3 else _KEYS_12


def _fragment_address(start: int, numel: int) -> Call:
    return Call(_FRAGMENT_ADDRESS, (), new=True, state={"numel": numel, "start": start})
