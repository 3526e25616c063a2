"""Refuses ZeRO checkpoints that cannot be resharded, before any work is done.

A feature of the job that saved may leave states out of the ranks' files, or cut them in a way of
its own. The comments name the DeepSpeed code (0.19.8 unless stated otherwise).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Final

from streamshard.errors import UnsupportedError
from streamshard.formats.deepspeed import ds_config, names
from streamshard.formats.deepspeed.ds_versions import Version
from streamshard.formats.pickle.inert import Node, show
from streamshard.formats.pickle.node_checks import name_of, of_file
from streamshard.formats.torch.torch_tensor import shape_of, tensor_of


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

    @property
    def groups(self) -> Sequence[Mapping[str, Node]]:
        """Param groups of the first rank's wrapped optimizer, as far as it is one."""
        key = names.OPTIMIZER if self.stage == 3 else names.BASE_OPTIMIZER
        wrapped = self.states[0].get(key) if self.states else None
        groups = wrapped.get("param_groups") if isinstance(wrapped, dict) else None
        return groups if isinstance(groups, list) else []


_RESUME: Final = "Resume on the ranks that saved it"
_WEIGHTS: Final = (
    f"{_RESUME}; engine.save_16bit_model() writes the weights there, for a start without optimizer "
    "state"
)


@dataclass(frozen=True, slots=True)
class Feature:
    name: str
    hint: str
    """What a user can do."""
    sign: Callable[[Saved], str] = lambda saved: ""
    """Returns what shows the feature; empty without it, or where the reader itself sees it."""
    in_model: bool = False
    """Whether model files show it, and not the ranks' own, where there are model files."""

    def error(self, shown: str, path: Path) -> UnsupportedError:
        message = f"{shown}: trained with {self.name}, by which states are missing or of another"
        return UnsupportedError(f"{message} length. {self.hint}", path=path)


def refuse(saved: Saved) -> None:
    """Refuse files of a job with a feature that cannot be resharded."""
    if saved.stage:
        _refuse_replaced(saved)
    for feature in _FEATURES if saved.stage else _AT_STAGE_0:
        if shown := feature.sign(saved):
            paths = saved.model_paths if feature.in_model else ()
            raise feature.error(shown, (paths or saved.optimizer_paths)[0])


def refuse_files(tag_dir: Path, others: Iterable[Path]) -> None:
    """Refuse a tag directory because of files that are not ZeRO's own."""
    for path in others:
        if count := names.writer_parts(path.name):
            hint = _ONE_PART if count == 1 else _PARTS
            raise UnsupportedError(f"written by {_WRITER} {hint}", path=path)
        # `DeepSpeedEngine.save_checkpoint` copies the folder; through 0.16 its name has no rank.
        if path.relative_to(tag_dir).parts[0] == _SWAP_DIR:
            raise SWAPPED.error("states are in this file", path)


# `DeepSpeedZeroOptimizer.state_dict`: a list of states, without padding and hyper-parameters.
ELASTIC: Final = Feature(
    "elastic_checkpoint",
    f"{_RESUME} with elastic_checkpoint off, which DeepSpeed can, and save again",
)
# `OptimizerStateSwapInfo.release_memory` of `runtime/swap_tensor/optimizer_utils.py` leaves an
# empty tensor for a sub-group that was swapped out. Other sub-groups are never empty.
SWAPPED: Final = Feature("an optimizer that is swapped out to NVMe", _WEIGHTS)
_SWAP_DIR: Final = "offloaded_tensors"


# `CheckpointWriterFactory.create_writer`: below stage 3, independent of the rest of the config.
_WRITER: Final = (
    'DeepSpeed\'s fast checkpoint writer ("checkpoint": {"writer": …}), which below stage 3 gives '
    "files names that DeepSpeed itself does not look for."
)
_ONE_PART: Final = (
    "They are whole all the same. Take the end off, in that directory: "
    'for f in *.pt-0.1; do mv "$f" "${f%-0.1}"; done'
)
_PARTS: Final = (
    "This one is a part of a file, and parts are not supported. Save without "
    '"data_parallel" and "io_multiplier" in it, or with "type": "python"'
)


def _refuse_replaced(saved: Saved) -> None:
    """Refuse client state under names of entries that are read.

    In `DeepSpeedEngine._save_checkpoint` it replaces DeepSpeed's own. None is always allowed.
    """
    for model, path in zip(saved.models, saved.model_paths, strict=True):
        for key, (kind, inner) in _FORMS.items():
            value = model.get(key)
            if value is None:
                continue
            items = chain.from_iterable(value.items()) if isinstance(value, dict) else value
            if not isinstance(value, kind) or not all(isinstance(item, inner) for item in items):
                message = f"'{key}' holds {show(value)}, and not what DeepSpeed saves under that"
                message = f"{message} name: it is client state of that name, or damaged. Save again"
                message = f"{message} with a client_state that names it otherwise"
                raise UnsupportedError(message, path=path)


_FORMS: Final[Mapping[str, tuple[type, type]]] = {
    names.MODULE_STATE: (dict, object),
    names.BUFFER_NAMES: (list, str),
    names.PARAM_SHAPES: (list, dict),
    names.FROZEN_SHAPES: (dict, object),
    names.FROZEN_FRAGMENTS: (dict, object),
    names.SHARED_PARAMS: (dict, str),
    names.EXPERT_COUNTS: (list, int),
}
"""Interpreted entry → type that DeepSpeed saves there, and of what is in that (keys too)."""


def _late_groups(saved: Saved) -> str:
    # No ZeRO optimizer has an `add_param_group`: a group that a user adds to the wrapped optimizer
    # is not partitioned and, at stages 1 and 2, not trained.
    members = [group.get("params") or [] for group in saved.groups]
    units = saved.states[0].get(names.FLAT_GROUPS_3 if saved.stage == 3 else names.FLAT_GROUPS)
    late = [n for n, own in enumerate(members) if own and units and min(own) >= len(units)]
    return f"param groups {show(late)} of {len(members)} have no master weights" if late else ""


def _auto_experts(saved: Saved) -> str:
    # `DeepSpeedEngine._save_moe_checkpoint`, and at stage 3
    # `DeepSpeedZeroOptimizer_Stage3._zero3_partition_group_metadata`.
    roots = [*saved.models, *saved.states]
    keys = names.AUTO_EXPERTS, names.OLD_AUTO_EXPERTS, names.AUTO_EXPERT_GROUPS
    key = next((key for root in roots for key in keys if root.get(key)), "")
    if key == names.AUTO_EXPERTS:
        is_folded = any(root.get(names.FOLDED_EXPERTS) for root in roots)
        is_muon = any(group.get(names.IS_MUON) for group in saved.groups)
        key = names.FOLDED_EXPERTS if is_folded else names.IS_MUON if is_muon else ""
    return f"'{key}' says so" if key else ""


def _experts_across_parts(saved: Saved) -> str:
    # Without `enable_expert_tensor_parallelism`, `MoE._create_process_groups` has
    # `_create_expert_and_data_parallel` of `utils/groups.py` divide all ranks, tensor-parallel ones
    # too. Lengths fit, but the ranks of another part have other experts, or parts of them.
    counts = saved.states[0].get(names.PARTITION_COUNT)
    shared = zip(saved.groups, counts, strict=False) if isinstance(counts, list | tuple) else ()
    for group, sharing in shared:
        ranks = (names.expert_ranks(group) or 0) * sharing
        if ranks > saved.ranks:
            return f"experts {show(group['name'])} are on {ranks} ranks, and {saved.ranks} saved"
    return ""


def _zenflow(saved: Saved) -> str:
    # `runtime/zenflow/zenflow_utils.py`, `engine_stage3.py`: matrices are transposed, and no stage
    # saves the optimizer of the selected columns. The files look like those of other jobs.
    return "the config says so" if ds_config.features(saved.config).zenflow else ""


def _states_elsewhere(saved: Saved) -> str:
    # `DeepSpeedZeroOptimizer_Stage3._optimizer_step` uses a second optimizer for the sub-groups
    # that `ratio` leaves on the device. `SuperOffloadOptimizer_Stage3` steps all sub-groups in
    # separate processes. `_rigid_state_dict` saves the states of neither.
    features = ds_config.features(saved.config)
    if saved.config and not features.super_offload and features.offload_ratio == 1:
        return ""
    optimizers = [state.get(names.OPTIMIZER) or {} for state in saved.states]
    with_state = {unit for optimizer in optimizers for unit in optimizer.get("state", {})}
    units = range(len(saved.states[0].get(names.FLAT_GROUPS_3) or ()))
    missing = [unit for unit in units if unit not in with_state]
    is_new = not with_state and not any(map(_has_stepped, saved.models))
    return f"no optimizer state of sub-groups {show(missing)}" if missing and not is_new else ""


def _has_stepped(model: Mapping[str, Node]) -> bool:
    steps, skipped = model.get("global_steps"), model.get("skipped_steps", 0)
    return isinstance(steps, int) and isinstance(skipped, int) and steps > skipped


def _mics(saved: Saved) -> str:
    # `runtime/zero/mics.py`, through 0.19.6: groups of ranks hold the same, and one saves.
    trained = saved.models[0].get(names.DP_WORLD_SIZE) if saved.models else saved.ranks
    counts = [state.get(names.PARTITION_COUNT) for state in saved.states]
    counts += [ds_config.features(saved.config).mics_shard_size]
    if saved.stage < 3 or trained == saved.ranks or any(n != saved.ranks for n in counts):
        return ""
    return f"{saved.ranks} of {show(trained)} ranks saved"


def _sequence_mesh(saved: Saved) -> str:
    # `DeepSpeedZeroOptimizer_Stage3` cuts its state among all ranks, but only the data-parallel
    # ranks of a mesh save theirs.
    mesh = ds_config.sequence_mesh(saved.config, saved.version)
    if saved.stage < 3 or mesh is None or mesh[0] != saved.ranks:
        return ""
    return f"{saved.ranks} of {prod(mesh)} ranks saved"


def _sharded_base_weights(saved: Saved) -> str:
    # `LoRAOptimizedLinear` of `deepspeed/linear/optimized_linear.py`: each rank has a different
    # part of the frozen weight, and DeepSpeed saves only one rank's.
    if not saved.models:
        return ""
    model = saved.models[0]
    listed = [*(model.get(names.PARAM_SHAPES) or []), model.get(names.FROZEN_SHAPES) or {}]
    with of_file(saved.model_paths[0]):
        module = (model.get(names.MODULE_STATE) or {}).items()
        shapes = {name: tensor.shape for name, node in module if (tensor := tensor_of(node))}
        shapes |= {name_of(name): shape_of(s) for unit in listed for name, s in unit.items()}
    for name, first in shapes.items():
        prefix = name.removesuffix(".lora_weight_1.weight")
        base, second = f"{prefix}.weight", shapes.get(f"{prefix}.lora_weight_2.weight")
        if prefix != name and base in shapes and second is not None:
            found, numel = prod(shapes[base]), first[-1] * second[0]
            if found != numel:
                return f"{show(base)} has {found} of {numel} elements"
    return ""


def _second_optimizer(saved: Saved) -> str:
    # Without a ZeRO stage `DeepSpeedEngine._common_checkpoint_state` saves the optimizer's state in
    # the model file; a pipeline in bf16 then still has a BF16_Optimizer. In other jobs the entry is
    # None, or client state that a user saved under this name.
    model = saved.models[0] if saved.models else {}
    has_one = model.get(names.WHOLE_OPTIMIZER) is not None and not model.get(names.MODULE_STATE)
    is_stage_0 = names.ZERO_STAGE not in saved.states[0] and not ds_config.zero_stage(saved.config)
    return "an optimizer's state next to the ranks' own files" if has_one and is_stage_0 else ""


AUTO_EXPERTS: Final = Feature(
    "AutoEP in dumps, before DeepSpeed 0.19.8, or with AutoTP or Muon",
    "Resume with DeepSpeed's own load_checkpoint on the ranks that saved it, or convert what has a "
    "ZeRO stage with its ds_to_universal",
    _auto_experts,
    in_model=True,
)
_SHARDED_BASE_WEIGHTS: Final = Feature(
    "OptimizedLinear's base_weight_sharding",
    "Save with exclude_frozen_parameters=True, and take the frozen weights from the model that the "
    "training began with",
    _sharded_base_weights,
    in_model=True,
)
_AT_STAGE_0: Final = (AUTO_EXPERTS, _SHARDED_BASE_WEIGHTS)
_FEATURES: Final = (
    *_AT_STAGE_0,
    ELASTIC,
    SWAPPED,
    Feature(
        "a bf16 pipeline without a ZeRO stage",
        "Train with stage 1",
        _second_optimizer,
        in_model=True,
    ),
    Feature(
        "param groups that were added to the wrapped optimizer after deepspeed.initialize()",
        "Give it all groups before, and take the weights: load_checkpoint(..., load_module_only="
        "True), at stage 3 engine.save_16bit_model() on the ranks that saved",
        _late_groups,
    ),
    Feature(
        "MoE layers next to tensor parallelism without enable_expert_tensor_parallelism",
        f"{_RESUME}: DeepSpeed can if the tensor parallel degree divides the expert parallel size",
        _experts_across_parts,
    ),
    Feature("ZenFlow, which transposes matrices", _WEIGHTS, _zenflow),
    Feature(
        "offload_optimizer.ratio below 1 or super_offload",
        "They start again at every resume. Resume on the ranks that saved it with the setting "
        "changed, train until they have settled, and save: from then on they are in the files",
        _states_elsewhere,
    ),
    Feature(
        "MiCS (mics_shard_size)",
        f"{_RESUME}, before DeepSpeed 0.19.7; the checkpoint's zero_to_fp32.py writes the weights",
        _mics,
    ),
    Feature(
        "data_parallel_size and sequence_parallel_size at ZeRO stage 3",
        "Take a checkpoint of stage 1 or 2, or one saved without data_parallel_size",
        _sequence_mesh,
    ),
)
