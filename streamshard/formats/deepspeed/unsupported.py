"""Refuses ZeRO checkpoints that cannot be resharded, before any work is done.

Each rule detects one feature of the job that saved. It returns an error that says what the feature
is and what the user can do. The comments name the DeepSpeed code (0.19.8 unless stated otherwise).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

from streamshard.errors import UnsupportedError, raise_first
from streamshard.formats.deepspeed import ds_config, names
from streamshard.formats.deepspeed.ds_versions import Version
from streamshard.formats.pickle.inert import Node, show
from streamshard.formats.pickle.node_checks import name_of, of_file
from streamshard.formats.torch.torch_tensor import shape_of, tensor_of

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """The uninterpreted contents of the files of one data-parallel group of ranks."""

    stage: int
    config: ds_config.Config
    """Empty if the files have none."""
    states: Sequence[Mapping[str, Node]]
    """The ZeRO optimizer's state of each rank."""
    optimizer_paths: Sequence[Path]
    models: Sequence[Mapping[str, Node]] = ()
    """Contents of the model files; empty for raw dumps."""
    model_paths: Sequence[Path] = ()
    version: Version | None = None
    """DeepSpeed's, if the files record it."""

    @property
    def ranks(self) -> int:
        """Count of ranks that saved a state."""
        return len(self.states)


def refuse(saved: Saved) -> None:
    """Refuse files of a job with a feature that cannot be resharded."""
    raise_first(filter(None, (rule(saved) for rule in _RULES)))


def refuse_uncut(saved: Saved) -> None:
    """Refuse a model file of stage 0 of a job with a feature that cannot be resharded."""
    raise_first(filter(None, (rule(saved) for rule in (_auto_experts, _sharded_base_weights))))


def refuse_files(tag_dir: Path, others: Iterable[Path]) -> None:
    """Refuse a tag directory because of files that are not ZeRO's own."""
    for path in others:
        if count := names.writer_parts(path.name):
            raise UnsupportedError(_ONE_PART if count == 1 else _PARTS, path=path)
    # `DeepSpeedEngine.save_checkpoint` copies the swap folder; through 0.16 its name has no rank.
    for path in others:
        if path.relative_to(tag_dir).parts[0] == names.SWAP_DIR:
            raise UnsupportedError(_SWAPPED, path=path)


# `CheckpointWriterFactory.create_writer`: below stage 3, independent of the rest of the config.
_BY_WRITER: Final = (
    'written by DeepSpeed\'s fast checkpoint writer ("checkpoint": {"writer": …}), which below '
    "stage 3 gives files names that DeepSpeed itself does not look for."
)
_ONE_PART: Final = (
    f"{_BY_WRITER} They are whole all the same. Take the end off, in that directory: "
    'for f in *.pt-0.1; do mv "$f" "${f%-0.1}"; done'
)
_PARTS: Final = (
    f"{_BY_WRITER} This one is a part of a file, and parts are not supported. Save without "
    '"data_parallel" and "io_multiplier" in it, or with "type": "python"'
)
_SWAPPED: Final = (
    "optimizer state that offload_optimizer swapped out to NVMe is not in the ranks' files, and "
    "its swap files are not supported. Resume on the ranks that saved it, with the same offload; "
    "engine.save_16bit_model() writes the weights there, for a start without optimizer state"
)
_SAVE_ANEW: Final = (
    "They start again at every resume. Resume on the ranks that saved it with the setting changed, "
    "train until they have settled, and save: from then on they are in the files"
)


_SUPER: Final = "SuperOffload (offload_optimizer.super_offload) saves none"


def _swapped_out(saved: Saved) -> UnsupportedError | None:
    # `OptimizerStateSwapInfo.release_memory` of `runtime/swap_tensor/optimizer_utils.py` leaves an
    # empty tensor for a sub-group that was swapped out. Other sub-groups are never empty.
    if saved.stage < 3:
        return None
    for state, path in zip(saved.states, saved.optimizer_paths, strict=True):
        for unit, node in enumerate(state.get(names.FLAT_GROUPS_3) or []):
            with of_file(path):
                master = tensor_of(node)
            if master is not None and master.numel == 0:
                return UnsupportedError(f"sub-group {unit} is empty: {_SWAPPED}", path=path)
    return None


def _states_elsewhere(saved: Saved) -> UnsupportedError | None:
    # `DeepSpeedZeroOptimizer_Stage3._optimizer_step` uses a second optimizer for the sub-groups
    # that `ratio` leaves on the device. `SuperOffloadOptimizer_Stage3` steps all sub-groups in
    # separate processes. `_rigid_state_dict` saves the states of neither.
    missing = _units_without_state(saved)
    if not missing:
        return None
    features = ds_config.features(saved.config)
    path, where = saved.optimizer_paths[0], f"no optimizer state of sub-groups {show(missing)}"
    if features.super_offload:
        return UnsupportedError(f"{where}: {_SUPER}. {_SAVE_ANEW}", path=path)
    if features.offload_ratio < 1:
        reason = f"offload_optimizer.ratio {features.offload_ratio:g} leaves them on the device"
        message = f"{where}: {reason}, and DeepSpeed does not save them. {_SAVE_ANEW}"
        return UnsupportedError(message, path=path)
    if not saved.config:
        reason = "offload_optimizer.ratio below 1 and super_offload keep such states out of files"
        return UnsupportedError(f"{where}, while others have it: {reason}. {_SAVE_ANEW}", path=path)
    return None


def _units_without_state(saved: Saved) -> list[int]:
    """List the sub-groups that were stepped and have no state on any rank."""
    if saved.stage < 3:
        return []
    wrapped = [state.get(names.OPTIMIZER) or {} for state in saved.states]
    with_state = {unit for optimizer in wrapped for unit in optimizer.get("state", {})}
    if not with_state and not any(map(_has_stepped, saved.models)):
        return []
    units = range(len(saved.states[0].get(names.FLAT_GROUPS_3) or []))
    return [unit for unit in units if unit not in with_state]


def _has_stepped(model: Mapping[str, Node]) -> bool:
    steps, skipped = model.get("global_steps"), model.get("skipped_steps", 0)
    return isinstance(steps, int) and isinstance(skipped, int) and steps > skipped


def _elastic(saved: Saved) -> UnsupportedError | None:
    # `DeepSpeedZeroOptimizer.state_dict` saves a list of the groups' states, without padding and
    # hyper-parameters, in place of the wrapped optimizer's state dict. `_load_legacy_checkpoint`
    # loads it without the setting too ("loading an elastic checkpoint into rigid exec").
    for state, path in zip(saved.states, saved.optimizer_paths, strict=True):
        if isinstance(state.get(names.BASE_OPTIMIZER), list):
            return UnsupportedError(
                "saved with elastic_checkpoint, which keeps no hyper-parameters of the optimizer "
                "and is not supported. Resume on the ranks that saved it with elastic_checkpoint "
                "off, which DeepSpeed can, and save again",
                path=path,
            )
    return None


def _late_groups(saved: Saved) -> UnsupportedError | None:
    # No ZeRO optimizer has an `add_param_group`. A group that a user adds to the wrapped optimizer
    # after `deepspeed.initialize()` is not partitioned and, at stages 1 and 2, not trained.
    key, flats = (
        (names.OPTIMIZER, names.FLAT_GROUPS_3)
        if saved.stage == 3
        else (names.BASE_OPTIMIZER, names.FLAT_GROUPS)
    )
    wrapped, units = saved.states[0].get(key), saved.states[0].get(flats)
    groups = wrapped.get("param_groups") if isinstance(wrapped, dict) else None
    if not isinstance(units, list) or not isinstance(groups, list):
        return None
    late = [
        number
        for number, group in enumerate(groups)
        if group.get("params") and all(index >= len(units) for index in group["params"])
    ]
    if not late:
        return None
    weights = "load_checkpoint(..., load_module_only=True) takes the weights from it, on any ranks"
    if saved.stage == 3:
        weights = "take the weights that engine.save_16bit_model() writes on the ranks that saved"
    return UnsupportedError(
        f"param groups {show(late)} of {len(groups)} were added to the "
        "wrapped optimizer after deepspeed.initialize(), so that ZeRO did not cut them, and no "
        "master weights of them are saved. For a start without optimizer state, give the optimizer "
        f"all its groups before deepspeed.initialize(), and {weights}",
        path=saved.optimizer_paths[0],
    )


def _zenflow(saved: Saved) -> UnsupportedError | None:
    # At stages 1 and 2 `runtime/zenflow/zenflow_utils.py` flattens matrices transposed; at stage 3
    # `engine_stage3.py` transposes the parameters themselves. No stage saves the optimizer of the
    # selected columns. The files look like those of other jobs.
    if not ds_config.features(saved.config).zenflow:
        return None
    return UnsupportedError(
        "trained with ZenFlow (zero_optimization.zenflow), which "
        "stores matrices transposed and leaves part of the optimizer's state out. Resume on the "
        "ranks that saved it; engine.save_16bit_model() writes the weights there, for a start "
        "without optimizer state",
        path=saved.optimizer_paths[0],
    )


def _mics(saved: Saved) -> UnsupportedError | None:
    # `runtime/zero/mics.py` of DeepSpeed through 0.19.6: all groups of ranks hold the same states,
    # and one group saves them.
    if saved.stage < 3 or not saved.models:
        return None
    trained, shards = saved.models[0].get(names.DP_WORLD_SIZE), saved.ranks
    alone = all(state.get(names.PARTITION_COUNT) == shards for state in saved.states)
    if not alone or trained == shards or ds_config.features(saved.config).mics_shard_size != shards:
        return None
    return UnsupportedError(
        f"trained with MiCS (mics_shard_size {shards}) on "
        f"{show(trained)} ranks, which is not supported, nor by DeepSpeed from 0.19.7 on. Resume "
        "there with an older one; the checkpoint's zero_to_fp32.py writes the weights, for a start "
        "without optimizer state",
        path=saved.optimizer_paths[0],
    )


def _auto_experts(saved: Saved) -> UnsupportedError | None:
    # `DeepSpeedEngine._save_moe_checkpoint`, and at stage 3
    # `DeepSpeedZeroOptimizer_Stage3._zero3_partition_group_metadata`.
    models = zip(saved.models, saved.model_paths, strict=True)
    states = zip(saved.states, saved.optimizer_paths, strict=True)
    keys = names.AUTO_EXPERTS, names.OLD_AUTO_EXPERTS, names.AUTO_EXPERT_GROUPS
    found = [(key, path) for root, path in (*models, *states) for key in keys if root.get(key)]
    if not found:
        return None
    key, path = found[0]
    said = f"trained with AutoEP ('{key}' says so)"
    if key == names.AUTO_EXPERT_GROUPS:
        return UnsupportedError(f"{said}, {_OWN_EXPERTS}", path=path)
    if key == names.OLD_AUTO_EXPERTS:
        at = "by a DeepSpeed before 0.19.8, which does not tell where the experts are"
        return UnsupportedError(f"{said} {at}; {_OWN_EXPERTS}", path=path)
    if any(root.get(names.FOLDED_EXPERTS) for root in (*saved.models, *saved.states)):
        return UnsupportedError(f"{said} and AutoTP, {_OWN_EXPERTS}", path=path)
    wrapped = names.BASE_OPTIMIZER, names.OPTIMIZER
    optimizers = (state.get(key) for state in saved.states[:1] for key in wrapped)
    groups = [g for held in optimizers if isinstance(held, dict) for g in held["param_groups"]]
    if any(group.get(names.IS_MUON) for group in groups):
        return UnsupportedError(f"{said} and Muon, {_OWN_EXPERTS}", path=path)
    return None


def _unnumbered_experts(saved: Saved) -> UnsupportedError | None:
    # `module_inject/auto_ep_layer.py` fuses the experts of a rank under a name that all ranks use.
    # Raw dumps have no other sign of AutoEP.
    if any(model.get(names.AUTO_EXPERTS) for model in saved.models):
        return None
    state = saved.states[0]
    wrapped, mappings = state.get(names.BASE_OPTIMIZER), state.get(names.SLICE_MAPPINGS)
    if not isinstance(wrapped, dict) or not isinstance(mappings, list):
        return None
    counts = state[names.PARTITION_COUNT]
    for group, mapping, sharing in zip(wrapped["param_groups"], mappings, counts, strict=True):
        if group.get(names.IS_EXPERTS) is not True or sharing == saved.ranks:
            continue
        for name in mapping:
            if not names.count_local_experts([name]):
                message = f"{show(name)} is of experts without numbers"
                message = f"{message}, as of AutoEP, {_OWN_EXPERTS}"
                return UnsupportedError(message, path=saved.optimizer_paths[0])
    return None


def _experts_across_parts(saved: Saved) -> UnsupportedError | None:
    # Without `enable_expert_tensor_parallelism`, `MoE._create_process_groups` has
    # `_create_expert_and_data_parallel` of `utils/groups.py` divide all ranks, tensor-parallel ones
    # too. Then these have other experts, or share the partitions of the same ones. Either way
    # experts are spread over all ranks, so that as many ranks more share each.
    for state, path in zip(saved.states, saved.optimizer_paths, strict=True):
        wrapped, counts = state.get(names.BASE_OPTIMIZER), state.get(names.PARTITION_COUNT)
        if not isinstance(wrapped, dict) or not isinstance(counts, list | tuple):
            continue
        for group, sharing in zip(wrapped["param_groups"], counts, strict=False):
            shared = names.expert_ranks(group)
            if shared is not None and shared * sharing > saved.ranks:
                message = f"the experts of param group {show(group['name'])} are on"
                message = f"{message} {shared * sharing} ranks, {_ACROSS_PARTS}"
                return UnsupportedError(message, path=path)
    return None


_ACROSS_PARTS: Final = (
    "more than this part of the model has: MoE layers trained next to tensor parallelism without "
    "enable_expert_tensor_parallelism, and DeepSpeed spread their experts over the tensor parallel "
    "ranks too; not supported. Resume on the ranks that saved it: DeepSpeed can if the tensor "
    "parallel degree divides the expert parallel size"
)
_OWN_EXPERTS: Final = (
    "whose experts are cut in a way of their own; not supported. Resume with DeepSpeed's own "
    "load_checkpoint on the ranks that saved it, or convert what has a ZeRO stage with its "
    "ds_to_universal, which knows AutoEP"
)


def _sharded_base_weights(saved: Saved) -> UnsupportedError | None:
    # `LoRAOptimizedLinear` of `deepspeed/linear/optimized_linear.py` with `base_weight_sharding`:
    # each rank has a different part of the frozen weight, and DeepSpeed saves only one rank's.
    if not saved.models:
        return None
    with of_file(saved.model_paths[0]):
        shapes = _shapes(saved.models[0])
    for name, shape in shapes.items():
        prefix, _, last = name.rpartition(_LORA_FIRST)
        base, second = f"{prefix}.weight", f"{prefix}{_LORA_SECOND}"
        if last or not prefix or base not in shapes or second not in shapes:
            continue
        numel = shape[-1] * shapes[second][0]
        if prod(shapes[base]) != numel:
            return UnsupportedError(
                f"{show(base)} has {prod(shapes[base])} of {numel} "
                "elements: OptimizedLinear's base_weight_sharding keeps a part on each rank, of "
                "which DeepSpeed saves one. Save with exclude_frozen_parameters=True, and take the "
                "frozen weights from the model that the training began with",
                path=saved.model_paths[0],
            )
    return None


_LORA_FIRST: Final = ".lora_weight_1.weight"
_LORA_SECOND: Final = ".lora_weight_2.weight"


def _mesh_of_sequences(saved: Saved) -> UnsupportedError | None:
    # `DeepSpeedZeroOptimizer_Stage3` cuts its state among all ranks, but only the data-parallel
    # ranks of a mesh save theirs.
    mesh = ds_config.sequence_mesh(saved.config, saved.version)
    if saved.stage < 3 or mesh is None or mesh[0] != saved.ranks:
        return None
    data, sequence = mesh
    message = (
        f"at ZeRO stage 3 with data_parallel_size {data} and sequence_parallel_size {sequence} in "
        f"the config, DeepSpeed cuts the state among {data * sequence} ranks and saves the parts "
        f"of {data}. The others are lost. Take a checkpoint of stage 1 or 2, or one saved without "
        "data_parallel_size"
    )
    return UnsupportedError(message, path=saved.optimizer_paths[0])


def _shapes(model: Mapping[str, Node]) -> dict[str, Shape]:
    """Return the shapes of the weights that a model file holds or lists."""
    module = model.get(names.MODULE_STATE) or {}
    shapes = {name: tensor.shape for name, node in module.items() if (tensor := tensor_of(node))}
    listed = [*(model.get(names.PARAM_SHAPES) or []), model.get(names.FROZEN_SHAPES) or {}]
    return shapes | {name_of(name): shape_of(s) for unit in listed for name, s in unit.items()}


def _second_optimizer(saved: Saved) -> UnsupportedError | None:
    # Without a ZeRO stage `DeepSpeedEngine._common_checkpoint_state` saves the optimizer's state in
    # the model file; a pipeline in bf16 then still has a BF16_Optimizer. In other jobs the entry is
    # None, or client state that a user saved under this name.
    if not saved.models or saved.models[0].get(names.WHOLE_OPTIMIZER) is None:
        return None
    model, is_bf16_optimizer = saved.models[0], names.ZERO_STAGE not in saved.states[0]
    if not is_bf16_optimizer or ds_config.zero_stage(saved.config) or model.get(names.MODULE_STATE):
        return None
    return UnsupportedError(
        "holds an optimizer's state next to the ranks' own files, as a "
        "pipeline in bf16 saves it without a ZeRO stage; DeepSpeed itself cannot load that. "
        "Train with stage 1",
        path=saved.model_paths[0],
    )


def _replaced(saved: Saved) -> UnsupportedError | None:
    # In `DeepSpeedEngine._save_checkpoint` client state replaces DeepSpeed's entries of that name.
    for model, path in zip(saved.models, saved.model_paths, strict=True):
        for key, is_own in _FORMS.items():
            value = model.get(key)
            if value is not None and not is_own(value):
                return UnsupportedError(
                    f"'{key}' holds {show(value)}, and not what DeepSpeed saves under that "
                    "name: it is client state of that name, or damaged. Save again with a "
                    "client_state that names it otherwise",
                    path=path,
                )
    return None


def _is_dict(node: Node) -> bool:
    return isinstance(node, dict)


def _is_number(node: Node) -> bool:
    return isinstance(node, int)


_FORMS: Final[Mapping[str, Callable[[Node], bool]]] = {
    names.MODULE_STATE: _is_dict,
    names.BUFFER_NAMES: lambda node: (
        isinstance(node, list) and all(isinstance(name, str) for name in node)
    ),
    names.PARAM_SHAPES: lambda node: isinstance(node, list) and all(map(_is_dict, node)),
    names.FROZEN_SHAPES: _is_dict,
    names.FROZEN_FRAGMENTS: _is_dict,
    names.SHARED_PARAMS: lambda node: (
        isinstance(node, dict)
        and all(isinstance(name, str) for pair in node.items() for name in pair)
    ),
    names.EXPERT_COUNTS: lambda node: isinstance(node, list) and all(map(_is_number, node)),
}
"""Interpreted entry → test for the type that DeepSpeed saves there. None is always allowed."""

_RULES: Final[tuple[Callable[[Saved], UnsupportedError | None], ...]] = (
    _replaced,
    _second_optimizer,
    _elastic,
    _late_groups,
    _auto_experts,
    _unnumbered_experts,
    _experts_across_parts,
    _zenflow,
    _swapped_out,
    _states_elsewhere,
    _mics,
    _mesh_of_sequences,
    _sharded_base_weights,
)
