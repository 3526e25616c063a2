"""Spells a logical checkpoint as DeepSpeed would have saved it at another world size or stage.

Nothing here holds tensor data: every storage of the trees made here says what fills it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from streamshard.errors import UnsupportedError
from streamshard.formats import deepspeed_names as names
from streamshard.formats import ds_config
from streamshard.formats.checkpoint import (
    Checkpoint,
    FlatState,
    ModuleEntry,
    ParamGroup,
    ScalarState,
)
from streamshard.formats.inert import Call, Global, Node
from streamshard.formats.torch_tensor import Storage, make_size, make_tensor
from streamshard.model import (
    MASTER,
    MODULE,
    Content,
    FlatCut,
    Literal,
    PartitionOf,
    RankPartition,
    ShardOf,
    ShardsOf,
    SubGroup,
    Whole,
    ZeroLayout,
)

_STAGE_ENUM: Final = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")
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
"""Order in which `DeepSpeedZeroOptimizer.state_dict` saves."""
_KEYS_3: Final = (
    names.ZERO_STAGE,
    "loss_scaler",
    "dynamic_loss_scale",
    "overflow",
    names.PARTITION_COUNT,
    names.OPTIMIZER,
    names.FLAT_GROUPS_3,
)
"""Order in which `DeepSpeedZeroOptimizer_Stage3.state_dict` saves."""


@dataclass(frozen=True, slots=True)
class FileImage:
    """A torch file to be made: where it goes, and the object in it."""

    path: str
    """Relative to the run directory."""
    root: Node


class ZeroWriter:
    """Spells the files of one checkpoint for one target layout."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: ZeroLayout,
        *,
        config: Mapping[str, Any],
        module_dtype: str,
        flat_cuts: Sequence[FlatCut],
        sub_groups: Sequence[SubGroup],
        dump_name: Callable[[int], str] | None = None,
        step_files: Sequence[str] = (),
    ) -> None:
        self._source = checkpoint
        self._layout = layout
        self._config = config
        self._module_dtype = module_dtype
        self._flat_cuts = flat_cuts
        self._sub_groups = sub_groups
        self._dump_name = dump_name
        self._step_files = step_files
        self._index = checkpoint.tensor_index()
        self._shapes = {t.name: t.shape for t in checkpoint.tensors if t.state == MASTER}

    def images(self) -> Iterator[FileImage]:
        """Spell all files, one after the other: model files first, then optimizer files.

        Where dumps have a name, they are all there is.
        """
        ranks = range(self._layout.world_size)
        if self._dump_name is not None:
            for rank in ranks:
                state = self._optimizer_file(rank)[names.OPTIMIZER]
                yield FileImage(self._dump_name(rank), state)
            return
        tag = self._source.tag
        for holder in ranks if self._layout.stage == 3 else (None,):
            path = f"{tag}/{names.model_file(holder)}"
            yield FileImage(path, self._model_file(holder))
        for rank in ranks:
            bf16 = self._module_dtype == "bfloat16"
            path = f"{tag}/{names.optimizer_file(rank, bf16=bf16)}"
            yield FileImage(path, self._optimizer_file(rank))
        for path in self._step_files:
            yield FileImage(path, {"step": self._source.accelerate_step})

    # Optimizer files ---------------------------------------------------------------------------

    def _optimizer_file(self, rank: int) -> dict[str, Node]:
        source = self._source.optimizer_file
        state = self._stage_3(rank) if self._layout.stage == 3 else self._stage_12(rank)
        held = {**self._unkept(source), **source[names.OPTIMIZER]}
        ordered = _in_order(state, held, _KEYS_3 if self._layout.stage == 3 else _KEYS_12)
        return {**source, names.OPTIMIZER: ordered, **self._given_config(source)}

    def _unkept(self, source: Mapping[str, Node]) -> dict[str, Node]:
        """Spell what stages 1 and 2 keep with the optimizer and stage 3 does not."""
        kept: dict[str, Node] = {}
        if self._layout.stage < 3 and names.FLAT_GROUPS_3 in source[names.OPTIMIZER]:
            clipping = ds_config.gradient_clipping(self._config)
            if clipping is not None:
                kept[names.CLIP_GRAD] = clipping
            if names.DS_VERSION in source:
                kept[names.DS_VERSION] = source[names.DS_VERSION]
        return kept

    def _given_config(self, source: Mapping[str, Node]) -> dict[str, Node]:
        return {names.DS_CONFIG: self._config} if names.DS_CONFIG in source else {}

    def _stage_enum(self) -> Node:
        stage = self._layout.stage
        held = self._source.optimizer_file[names.OPTIMIZER].get(names.ZERO_STAGE)
        # A plain int until 0.7.0.
        return stage if isinstance(held, int) else Call(_STAGE_ENUM, (stage,))

    def _stage_12(self, rank: int) -> dict[str, Node]:
        masters, states, mappings = [], {}, []
        for group, (held, cut) in enumerate(zip(self._source.groups, self._flat_cuts, strict=True)):
            own = cut.partitions[rank]
            storage = Storage(
                held.master_dtype, own.numel - own.padding, PartitionOf(group, MASTER, rank)
            )
            masters.append(make_tensor(storage, (storage.numel,), requires_grad=True))
            if held.states:
                states[group] = {
                    key: self._state(value, own.numel, PartitionOf(group, key, rank))
                    for key, value in held.states.items()
                }
            mappings.append(self._slice_mapping(held, own))
        return {
            names.BASE_OPTIMIZER: self._inner(states, [[g] for g in range(len(masters))]),
            names.FLAT_GROUPS: masters,
            names.ZERO_STAGE: self._stage_enum(),
            names.GROUP_PADDINGS: [cut.partitions[rank].padding for cut in self._flat_cuts],
            names.ALIGNMENT_PADDINGS: [list(cut.alignments) for cut in self._flat_cuts],
            names.PARTITION_COUNT: [self._layout.world_size] * len(masters),
            names.SLICE_MAPPINGS: mappings,
        }

    def _slice_mapping(self, group: ParamGroup, own: RankPartition) -> OrderedDict[str, Node]:
        return OrderedDict(
            (group.params[index], _fragment_address(start, numel))
            for index, start, numel in own.recorded
        )

    def _stage_3(self, rank: int) -> dict[str, Node]:
        masters, states = [], {}
        members: list[list[int]] = [[] for _ in self._source.groups]
        for unit, sub_group in enumerate(self._sub_groups):
            held = self._source.groups[sub_group.group]
            members[sub_group.group].append(unit)
            storage = Storage(held.master_dtype, sub_group.numel, ShardsOf(unit, MASTER, rank))
            masters.append(
                make_tensor(
                    storage,
                    (sub_group.numel,),
                    requires_grad=True,
                    attributes=self._unit_attributes(held, sub_group),
                )
            )
            if held.states:
                states[unit] = {
                    key: self._state(value, sub_group.numel, ShardsOf(unit, key, rank))
                    for key, value in held.states.items()
                }
        return {
            names.ZERO_STAGE: self._stage_enum(),
            names.PARTITION_COUNT: self._layout.world_size,
            names.OPTIMIZER: self._inner(states, members),
            names.FLAT_GROUPS_3: masters,
        }

    def _unit_attributes(self, group: ParamGroup, sub_group: SubGroup) -> Mapping[str, Node]:
        """Spell the `ds_id` that names a sub-group by its first and last parameter.

        Loading does not need it; where the source's files do not tell it, it is left out.
        """
        ids = self._source.param_ids
        ends = group.params[sub_group.first], group.params[sub_group.stop - 1]
        if not all(name in ids for name in ends):
            return {}
        return {"ds_id": f"{ids[ends[0]]}_{ids[ends[1]]}"}

    def _state(self, value: Node, numel: int, content: Content) -> Node:
        if isinstance(value, FlatState):
            return make_tensor(Storage(value.dtype, numel, content), (numel,))
        if isinstance(value, ScalarState):
            # A storage of its own for every group: a shared step tensor would be advanced once
            # per group by the optimizer.
            count = len(value.data) // Storage(value.dtype, 1).nbytes
            return make_tensor(Storage(value.dtype, count, Literal(value.data)), value.shape)
        return value

    def _inner(self, states: Mapping[int, Node], members: Sequence[list[int]]) -> dict[str, Node]:
        held = _wrapped_optimizer(self._source.optimizer_file[names.OPTIMIZER])
        groups = [
            {**group, "params": list(params)}
            for group, params in zip(held["param_groups"], members, strict=True)
        ]
        return {**held, "state": dict(states), "param_groups": groups}

    # Model files -------------------------------------------------------------------------------

    def _model_file(self, rank: int | None) -> dict[str, Node]:
        source = self._source.model_state
        module = OrderedDict[str, Node]()
        vars(module).update(vars(source[names.MODULE_STATE]))
        for entry in self._source.module:
            module[entry.name] = self._module_entry(entry, module)
        shapes, fragments = self._frozen(module, rank)
        buffers = {entry.name for entry in self._source.module if entry.kind == "buffer"}
        aliases = {
            entry.name: entry.alias_of
            for entry in self._source.module
            if entry.kind == "alias" and entry.alias_of not in buffers
        }
        state = {
            names.MODULE_STATE: module,
            names.PARAM_SHAPES: self._param_shapes(),
            names.FROZEN_SHAPES: shapes,
            names.SHARED_PARAMS: aliases if not rank else {},
            names.FROZEN_FRAGMENTS: fragments,
            names.DP_WORLD_SIZE: self._layout.world_size,
        }
        known = {key: value for key, value in state.items() if key in source}
        return {**source, **known, **self._given_config(source)}

    def _module_entry(self, entry: ModuleEntry, made: Mapping[str, Node]) -> Node:
        if entry.kind == "extra":
            return self._source.model_state[names.MODULE_STATE][entry.name]
        if entry.kind != "buffer" and self._layout.stage == 3:
            if entry.kind == "loose":
                message = (
                    f"parameter '{entry.name}' is trained by no param group; ZeRO-3 would not "
                    "save it"
                )
                raise UnsupportedError(message)
            return make_tensor(Storage(self._entry_dtype(entry), 0, Literal(b"")), (0,))
        if entry.kind == "alias":
            return make_tensor(made[entry.alias_of].args[0], entry.shape)
        numel = 1
        for length in entry.shape:
            numel *= length
        return make_tensor(
            Storage(self._entry_dtype(entry), numel, self._entry_content(entry)), entry.shape
        )

    def _entry_dtype(self, entry: ModuleEntry) -> str:
        """Weights follow the module's dtype, as `module.to(dtype)` has it; buffers keep theirs."""
        is_weight = entry.kind != "buffer" and entry.dtype == self._source.module_dtype
        return self._module_dtype if is_weight else entry.dtype

    def _entry_content(self, entry: ModuleEntry) -> Content:
        """Take the module's own bits where they are, else a cast of the master weights."""
        kept = self._index.get((MODULE, entry.name))
        if kept is None or (entry.kind == "param" and entry.dtype != self._module_dtype):
            kept = self._index[MASTER, entry.name]
        return Whole(kept)

    def _param_shapes(self) -> list[Node]:
        if self._layout.stage == 3:
            units = [
                self._source.groups[s.group].params[s.first : s.stop] for s in self._sub_groups
            ]
        else:
            units = [
                tuple(group.params[index] for index in cut.order)
                for group, cut in zip(self._source.groups, self._flat_cuts, strict=True)
            ]
        return [OrderedDict((n, make_size(self._shapes[n])) for n in unit) for unit in units]

    def _frozen(self, module: Mapping[str, Node], rank: int | None) -> tuple[Node, Node]:
        """Spell what a stage keeps of parameters that are not trained: stage 1 nothing."""
        left_out = self._source.layout.stage > 1 and (
            self._source.model_state.get(names.FROZEN_SHAPES) is None
        )
        if self._layout.stage == 1 or left_out:
            return None, None
        shapes, fragments = OrderedDict[str, Node](), OrderedDict[str, Node]()
        for entry in self._source.module:
            if entry.kind == "frozen":
                shapes[entry.name] = make_size(entry.shape)
                fragments[entry.name] = self._frozen_fragment(entry, module, rank)
        return shapes, fragments

    def _frozen_fragment(
        self, entry: ModuleEntry, module: Mapping[str, Node], rank: int | None
    ) -> Node:
        if rank is None:
            return make_tensor(module[entry.name].args[0], entry.shape)
        tensor = self._index[MODULE, entry.name]
        numel = -(-self._source.tensors[tensor].numel // self._layout.world_size)
        storage = Storage(self._entry_dtype(entry), numel, ShardOf(tensor, rank))
        return make_tensor(storage, (numel,))


def _wrapped_optimizer(state: Mapping[str, Node]) -> Mapping[str, Node]:
    wrapped: Mapping[str, Node] = state.get(names.BASE_OPTIMIZER) or state[names.OPTIMIZER]
    return wrapped


def _in_order(
    state: Mapping[str, Node], source: Mapping[str, Node], order: Sequence[str]
) -> dict[str, Node]:
    """Put a target's entries where the source has them, or where its stage would.

    Entries that only the other stages know are left out; entries that nobody knows are kept.
    """
    only_elsewhere = {*_KEYS_12, *_KEYS_3} - set(order)
    if (names.FLAT_GROUPS_3 in source) == (order is _KEYS_3):
        kept = {key: state.get(key, value) for key, value in source.items()}
        # Without this key, which DeepSpeed before 0.19.7 did not write, paddings are not expected.
        if any(map(any, state.get(names.ALIGNMENT_PADDINGS, []))):
            kept[names.ALIGNMENT_PADDINGS] = state[names.ALIGNMENT_PADDINGS]
        return kept
    merged = {**source, **state}
    known = {key: merged[key] for key in order if key in merged}
    unknown = {k: v for k, v in source.items() if k not in known and k not in only_elsewhere}
    return {**known, **unknown}


def _fragment_address(start: int, numel: int) -> Call:
    return Call(_FRAGMENT_ADDRESS, (), new=True, state={"numel": numel, "start": start})
