"""Serializes a checkpoint as DeepSpeed would have saved it at another world size or stage.

Nothing here holds tensor data: each storage describes the content that fills it.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate

import numpy as np

from streamshard.errors import UnsupportedError
from streamshard.formats.checkpoint import Checkpoint, ModuleEntry, ParamGroup
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.cut.part_cut import ZeroTarget
from streamshard.formats.deepspeed.write.optimizer_writer import OptimizerWriter
from streamshard.formats.pickle.inert import Node
from streamshard.formats.pickle.inert_dump import dump
from streamshard.formats.torch.torch_tensor import Storage, make_size, make_tensor
from streamshard.formats.torch.zip_layout import FileImage, Serialized, serialize
from streamshard.layout.cutting import Share, shard_segments
from streamshard.model import MASTER, MODULE, Literal, Whole


class ModuleWriter:
    """Serializes the model file that all ranks share, or that of each rank in stage 3."""

    def __init__(self, target: ZeroTarget) -> None:
        self._source = target.checkpoint
        self._model_part = target.model_part
        self._mp_rank = target.mp_rank
        self._layout = target.layout
        self._config = target.config
        self._module_dtype = target.module_dtype
        self._flat_groups = target.cut.flat_groups
        self._sub_groups = target.cut.sub_groups
        self._index = target.index
        # DeepSpeed clones a model with experts to save it: shapes become tuples, nothing is shared.
        self._is_cloned = bool(self._model_part.model_state.get(names.EXPERT_COUNTS))
        self._shape: Callable[[tuple[int, ...]], Node] = tuple if self._is_cloned else make_size
        self._entries = {entry.name: entry for entry in self._model_part.module}
        self._second_names: Mapping[str, str] = {}
        if self._source.has_auto_experts:
            from streamshard.formats.deepspeed.auto_experts import second_names

            self._second_names = second_names(self._model_part.model_state, self._entries)
        self._shapes = target.checkpoint.master_shapes(target.model_part)

    def file(self, rank: int | None) -> dict[str, Node]:
        """Build a rank's model file; without a rank, the file that all ranks share."""
        source = self._model_part.model_state
        module = self._module(source[names.MODULE_STATE])
        if self._layout.stage == 0:
            return self._uncut(module)
        shapes, fragments = self._frozen(module, rank)
        config = {names.DS_CONFIG: self._config} if self._is_config_of_engine() else {}
        state = {
            # None with pipeline parallelism, where each layer has a separate file.
            names.MODULE_STATE: None if source[names.MODULE_STATE] is None else module,
            names.PARAM_SHAPES: None if self._is_stageless() else self._param_shapes(),
            names.FROZEN_SHAPES: shapes,
            names.SHARED_PARAMS: self.shared_params(rank),
            names.FROZEN_FRAGMENTS: fragments,
            names.DP_WORLD_SIZE: self._layout.world_size,
        }
        # Another stage may need entries that an old DeepSpeed did not save for the source's stage.
        crosses = self._layout.stage != self._source.layout.stage
        known = {key: value for key, value in state.items() if crosses or key in source}
        return {**self._of_rank(rank or 0), **known, **config}

    def _of_rank(self, rank: int) -> Mapping[str, Node]:
        """Return the source's dict as a data-parallel rank saves it."""
        state = self._model_part.model_state
        if not self._source.has_auto_experts:
            return state
        # Not at the top: AutoEP alone notes ranks.
        from streamshard.formats.deepspeed.auto_experts import of_rank

        return of_rank(state, self._layout, rank)

    def _uncut(self, module: Mapping[str, Node]) -> dict[str, Node]:
        """Build the model file of stage 0, which also holds the optimizer's state."""
        world_size = self._layout.world_size
        source = self._of_rank(0)
        state: dict[str, Node] = {**source, names.DP_WORLD_SIZE: world_size}
        if source[names.MODULE_STATE] is not None:  # it is None with pipeline parallelism
            state[names.MODULE_STATE] = module
        if names.DS_CONFIG in source:
            state[names.DS_CONFIG] = self._config
        return state

    def _is_config_of_engine(self) -> bool:
        """Tell whether the file's config is the engine's, and not client state of that name.

        Client state given to `save_checkpoint` replaces DeepSpeed's own entries.
        """
        model, optimizer = self._model_part.model_state, self._model_part.optimizer_file
        if names.DS_CONFIG not in model or names.DS_CONFIG not in optimizer:
            return names.DS_CONFIG in model
        both = model[names.DS_CONFIG], optimizer[names.DS_CONFIG]
        return dump(both[0], _identity) == dump(both[1], _identity)

    def _module(self, saved: Node) -> OrderedDict[str, Node]:
        # Not `OrderedDict[…]()`: this sets an attribute on the object, which would be saved too.
        module: OrderedDict[str, Node] = OrderedDict()
        vars(module).update(getattr(saved, "__dict__", {}))
        entries = [entry for entry in self._model_part.module if self._is_held(entry)]
        kept = {e.name: self._module_entry(e, {}) for e in entries if e.kind != "alias"}
        for entry in entries:
            own = kept.get(entry.name)
            module[entry.name] = self._module_entry(entry, kept) if own is None else own
        return module

    def _is_held(self, entry: ModuleEntry) -> bool:
        """Tell whether the target's module lists an entry.

        Stage 3 saved only the name of an excluded entry, without values. Other stages cannot load
        a weight without values, so the entry is left out, like the excluded weight itself.
        """
        key = self._model_part.name, MODULE, entry.name
        return entry.kind != "excluded" or self._layout.stage == 3 or key in self._index

    def shared_params(self, rank: int | None) -> dict[str, str] | None:
        """Build the list of tied parameters, which only the first of all ranks saves."""
        if self._is_stageless():
            return None
        if rank or self._mp_rank:
            return {}
        buffers = {entry.name for entry in self._model_part.module if entry.kind == "buffer"}
        tied = {
            entry.name: entry.alias_of
            for entry in self._model_part.module
            if entry.alias_of
            and entry.alias_of not in buffers
            and entry.name not in self._second_names
        }
        listed = self._model_part.model_state.get(names.SHARED_PARAMS) or {}
        if self._layout.stage == 3:
            # There the list alone makes a tie: what only begins at one address must not be in it.
            listed = {name: kept for name, kept in listed.items() if name not in self._entries}
        return {**tied, **listed}

    def _module_entry(self, entry: ModuleEntry, tensors: Mapping[str, Node]) -> Node:
        if entry.kind == "extra":
            return self._model_part.model_state[names.MODULE_STATE][entry.name]
        tied = self._entries.get(entry.alias_of) if entry.kind == "alias" else None
        if "buffer" not in (entry.kind, tied and tied.kind) and self._layout.stage == 3:
            if entry.kind == "loose" and 0 not in entry.shape:
                message = (
                    f"parameter '{entry.name}' is trained by no param group; ZeRO-3 would not "
                    "save it"
                )
                raise UnsupportedError(message)
            return make_tensor(Storage(self._entry_dtype(entry), 0, Literal(b"")), (0,))
        if tied is not None:
            if self._is_cloned:
                return self._module_entry(replace(tied, shape=entry.shape), tensors)
            return make_tensor(tensors[entry.alias_of].args[0], entry.shape)
        numel, content = math.prod(entry.shape), self._entry_content(entry)
        return make_tensor(Storage(self._entry_dtype(entry), numel, content), entry.shape)

    def _entry_dtype(self, entry: ModuleEntry) -> str:
        """Return the module's dtype for weights, as `module.to(dtype)` has it; else the entry's."""
        is_weight = entry.kind != "buffer" and entry.dtype == self._source.module_dtype
        return self._module_dtype if is_weight else entry.dtype

    def _entry_content(self, entry: ModuleEntry) -> Whole:
        """Use the module's own bits if the checkpoint has them, else a cast of the masters."""
        kept = self._index.get((self._model_part.name, MODULE, entry.name))
        if kept is None or (entry.kind == "param" and entry.dtype != self._module_dtype):
            kept = self._index[self._model_part.name, MASTER, entry.name]
        return Whole(kept)

    def _is_stageless(self) -> bool:
        """Tell whether the target trains without a ZeRO stage, as `BF16_Optimizer` can."""
        shapes = self._model_part.model_state[names.PARAM_SHAPES]
        return shapes is None and self._layout.bf16_optimizer

    def _param_shapes(self) -> list[Node]:
        params = {
            tensor: shown
            for group in self._model_part.groups
            if group.expert_rank == 0
            for tensor, shown in self._shapes_of(group).items()
        }
        if self._layout.stage == 3:
            units = [
                self._model_part.groups[s.group].params[s.first : s.stop] for s in self._sub_groups
            ]
            listed = [[name for name in unit if name in params] for unit in units]
            listed = [unit for unit in listed if unit]
        else:
            listed = []
            for group, flat in zip(self._model_part.groups, self._flat_groups, strict=True):
                own = [name for name in group.params if name in params]
                listed += [] if group.expert_rank else [[own[index] for index in flat.order]]
        return [
            OrderedDict((params[name][0], self._shape(params[name][1])) for name in unit)
            for unit in listed
        ]

    def _shapes_of(self, group: ParamGroup) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the first tensor of each parameter of a group → the parameter's name and shape."""
        counts = self._model_part.tensor_counts(group)
        serialized = self._model_part.serialized(group)
        shapes = {}
        for name, count, end in zip(serialized, counts, accumulate(counts), strict=True):
            tensor = group.params[end - count]
            own = self._shapes[tensor]
            shapes[tensor] = name, own if tensor == name else (count, *own)
        return shapes

    def _frozen(self, module: Mapping[str, Node], rank: int | None) -> tuple[Node, Node]:
        """Return shapes and fragments of the frozen parameters; stage 1 saves neither."""
        if self._layout.stage == 1 or self._lacks_frozen():
            return None, None
        shapes: OrderedDict[str, Node] = OrderedDict()
        fragments: OrderedDict[str, Node] = OrderedDict()
        for entry in self._model_part.module:
            if entry.kind == "frozen" or entry.paused:
                shapes[entry.name] = self._shape(entry.shape)
                fragments[entry.name] = self._frozen_fragment(entry, module, rank)
        return shapes, fragments

    def _lacks_frozen(self) -> bool:
        """Tell whether frozen weights were left out, by `exclude_frozen_parameters`.

        A loading engine takes any value but None for a dict of all its frozen parameters
        (`load_module_state_dict`). So None marks weights that were left out. Stage 1 always saves
        None: there, the module's entries show it. If there never were frozen weights, None is
        correct as well.
        """
        if self._source.layout.stage > 1:
            return self._model_part.model_state.get(names.FROZEN_SHAPES, {}) is None
        entries = self._model_part.module
        return not any(entry.kind == "frozen" and 0 not in entry.shape for entry in entries)

    def _frozen_fragment(
        self, entry: ModuleEntry, module: Mapping[str, Node], rank: int | None
    ) -> Node:
        if rank is None:
            if self._is_cloned:
                return self._module_entry(entry, {})
            return make_tensor(module[entry.name].args[0], entry.shape)
        number, world_size = self._entry_content(entry).tensor, self._layout.world_size
        tensor = self._source.tensors[number]
        tensors, numels = np.array([number]), np.array([tensor.numel])
        share = Share(
            tensors,
            tensor.dtype,
            partial(shard_segments, numels, world_size, tensors=tensors),
            rank=None,
        )
        numel = -(-tensor.numel // world_size)
        storage = Storage(self._entry_dtype(entry), numel, share)
        return make_tensor(storage, (numel,))


def _identity(node: Node) -> Node | None:
    return id(node) if isinstance(node, Storage) else None


def whole_files(target: ZeroTarget) -> Iterator[FileImage]:
    """Yield the only file of a model part that was trained without ZeRO (stage 0)."""
    path = f"{target.checkpoint.tag}/{names.model_file(None, target.mp_rank)}"
    yield FileImage(path, lambda: serialize(ModuleWriter(target).file(None)))


def native_files(target: ZeroTarget) -> Iterator[FileImage]:
    """Yield the files of a model part: model files, then optimizer files, if these are not kept."""
    yield from model_files(target)
    if target.checkpoint.uncut is not None:
        return
    build, is_3, mp_rank = OptimizerWriter(target).file, target.layout.stage == 3, target.mp_rank
    is_own = _tells_rank(target)
    for rank in range(target.layout.world_size):
        name = names.optimizer_file(rank, bf16=target.is_bf16, mp_rank=mp_rank)
        # At stage 3 all ranks own equally much of what is cut. A file contains its own name.
        alike = f"optimizer {mp_rank} {len(str(rank))}" if is_3 and not is_own else ""
        path = f"{target.checkpoint.tag}/{name}"
        yield FileImage(path, partial(_serialize, build, rank), alike=alike)


def model_files(target: ZeroTarget) -> Iterator[FileImage]:
    """Yield the model file that all ranks share, or that of each rank in stage 3.

    There the first rank also saves the list of tied parameters, if there are any.
    """
    writer, place, mp_rank = ModuleWriter(target), target.checkpoint.tag, target.mp_rank
    if target.layout.stage < 3:
        path = f"{place}/{names.model_file(None, mp_rank)}"
        yield FileImage(path, cache(lambda: serialize(writer.file(None))))
        return
    contents: dict[bool, Serialized] = {}
    is_own = _tells_rank(target)

    def serialized(rank: int, *, lists_tied: bool) -> Serialized:
        if is_own:
            return serialize(writer.file(rank))
        if lists_tied not in contents:
            contents[lists_tied] = serialize(writer.file(rank))
        return contents[lists_tied]

    for rank in range(target.layout.world_size):
        lists_tied = bool(writer.shared_params(rank))
        alike = "" if is_own else f"model {mp_rank} {lists_tied} {len(str(rank))}"
        path = f"{place}/{names.model_file(rank, mp_rank)}"
        yield FileImage(path, partial(serialized, rank, lists_tied=lists_tied), rank, alike)


def _tells_rank(target: ZeroTarget) -> bool:
    """Tell whether files note which of the ranks saved them, as those of AutoEP do at stage 3."""
    return bool(target.model_part.model_state.get(names.AUTO_EXPERTS))


def dump_files(target: ZeroTarget, name: Callable[[int], str]) -> Iterator[FileImage]:
    """Yield raw dumps: each rank's optimizer state, and nothing else."""
    build = OptimizerWriter(target).dump
    for rank in range(target.layout.world_size):
        yield FileImage(name(rank), partial(_serialize, build, rank))


def step_files(step: int, paths: Sequence[str]) -> Iterator[FileImage]:
    for path in paths:
        yield FileImage(path, partial(serialize, {"step": step}))


def layer_files(checkpoint: Checkpoint) -> Iterator[FileImage]:
    for layer in checkpoint.layers:
        yield FileImage(f"{checkpoint.tag}/{layer.name}", partial(serialize, layer.state))


def _serialize(build: Callable[[int], Node], rank: int) -> Serialized:
    return serialize(build(rank))
