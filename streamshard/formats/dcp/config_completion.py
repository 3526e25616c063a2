"""Completes a distributed checkpoint by the DeepSpeed config of the job that is to resume.

The config suffices if every tensor is trained, the optimizer lists its parameters, and the config
alone decides what a fresh engine would save. The files then say what an engine with this config
says before its first step. In every other case the checkpoint is refused, with all that is missing.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from streamshard.errors import Option, UnsupportedError
from streamshard.formats.checkpoint import Checkpoint, ModelPart
from streamshard.formats.dcp.optimizer_state import DECOUPLED, OF_TORCH, STEP
from streamshard.formats.deepspeed import ds_config, names
from streamshard.formats.deepspeed.write.optimizer_writer import unscaled
from streamshard.formats.pickle.inert import Call, Node, show_few
from streamshard.model import Note

_VERSION: Final = "0.19.8"
"""The DeepSpeed whose files these are like."""
_STATELESS: Final = frozenset(
    {
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
        "gradient_clipping", "prescale_gradients", "gradient_predivide_factor", "sparse_gradients",
        "communication_data_type", "fp32_allreduce", "disable_allgather", "data_types",
        "zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
        "fp16", "bf16", "bfloat16", "optimizer", "activation_checkpointing", "aio", "checkpoint",
        "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state",
        "flops_profiler", "comms_logger", "tensorboard", "wandb", "csv_monitor", "comet",
    }
)  # fmt: skip
"""Sections of a config with which an engine saves nothing but what is written here."""
_STATELESS_BF16: Final = frozenset({"enabled", "immediate_grad_update"})
"""Keys of the bf16 section that leave master weights and states in fp32."""
_OF_ADAM: Final = frozenset({"betas", "amsgrad", OF_TORCH})
"""Hyper-parameters of torch's Adam and AdamW. NAdam, RAdam and Adamax have no `amsgrad`."""
_STATES_OF_ADAM: Final = frozenset({STEP, "exp_avg", "exp_avg_sq", "max_exp_avg_sq"})


def with_config(
    checkpoint: Checkpoint, config: ds_config.Config, *, zero_stage: int | None, world_size: int
) -> Checkpoint:
    """Return a distributed checkpoint with the training state of a fresh engine.

    `checkpoint`: what was read without a reference.
    `zero_stage`: ZeRO stage of the job that is to resume; by default the config's.
    `world_size`: count of the ranks of that job.
    """
    stage = zero_stage or ds_config.zero_stage(config) or 0
    missing = [*checkpoint.unrecorded, *_missing(checkpoint.model_parts[0], config)]
    if stage not in (1, 2, 3):
        missing.append("the ZeRO stage: the config sets none")
    if missing:
        message = f"with {Option('ds_config_file')} these are still missing"
        raise UnsupportedError(f"{message}: {'; '.join(missing)}")
    (read,) = checkpoint.model_parts
    dtype = ds_config.module_dtype(config)
    model_part = replace(
        read,
        module=tuple(replace(entry, dtype=dtype) for entry in read.module),
        model_state=_model_state(config),
        optimizer_file={
            names.OPTIMIZER: _optimizer_state(read.wrapped_optimizer, config, stage),
            names.DS_CONFIG: dict(config),
            names.DS_VERSION: _VERSION,
        },
    )
    return replace(
        checkpoint,
        layout=ds_config.zero_layout(
            config, stage=stage, world_size=world_size, bf16_optimizer=False
        ),
        model_parts=(model_part,),
        module_dtype=dtype,
        is_bf16=dtype == "bfloat16",
        notes=(*checkpoint.notes, *map(Note, _notes())),
        foreign="",
    )


def _missing(model_part: ModelPart, config: ds_config.Config) -> Iterator[str]:
    """Name what an engine with this config would save as well, and the config does not decide."""
    autos = list(_autos(config))
    if autos:
        yield f'the values that "auto" stands for ({show_few(autos)})'
    if ds_config.module_dtype(config) == "float16":
        yield "the state of the loss scaler, which fp16 training has"
    if "scheduler" in config:
        yield "the state of the learning rate scheduler"
    sections = sorted(config.keys() - _STATELESS - {"scheduler"})
    sections += [
        f"bf16.{key}"
        for key in sorted(ds_config.mapping_at(config, "bf16").keys() - _STATELESS_BF16)
    ]
    if sections:
        yield f"what an engine keeps for {show_few(sections)} of the config"
    yield from _missing_of_optimizer(model_part, config)


def _missing_of_optimizer(model_part: ModelPart, config: ds_config.Config) -> Iterator[str]:
    """Say if it is open whether the engine's optimizer keeps states as the saved one does."""
    params = ds_config.mapping_at(ds_config.mapping_at(config, "optimizer"), "params")
    decouples = ds_config.decouples_weight_decay(config)
    if decouples is None or params.get("torch_adam") is not True:
        yield (
            "the kind of the optimizer: the config does not name torch's Adam or AdamW "
            '("optimizer": {"type": "AdamW", "params": {"torch_adam": true, …}})'
        )
    groups = model_part.hyper_parameters
    if any(not group.keys() >= _OF_ADAM for group in groups):
        yield "the hyper-parameters of torch's Adam, in each param group"
    states = {key for group in model_part.groups for key in group.states or {}} - _STATES_OF_ADAM
    if states:
        yield f"an optimizer that keeps {show_few(sorted(states))}, which torch's Adam does not"
    for group, own in zip(groups, model_part.groups, strict=True):
        if group.get("amsgrad") and "max_exp_avg_sq" not in (own.states or {}):
            yield "the states max_exp_avg_sq, which amsgrad keeps"
    # torch before 2.7 records it for no optimizer.
    saved = [group.get(DECOUPLED) for group in groups if group.get("weight_decay")]
    if decouples is not None and any(way is not decouples for way in saved):
        ways = {True: "decoupled (AdamW)", False: "added to the gradients (Adam)"}
        message = f"the config's way of weight decay, {ways[decouples]}: the source's is"
        yield f"{message} {ways[not decouples] if None not in saved else 'not recorded'}"


def _autos(config: Mapping[str, Any], keys: str = "") -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _autos(value, f"{keys}{key}.")
        elif value == "auto":
            yield f"{keys}{key}"


def _model_state(config: ds_config.Config) -> dict[str, Node]:
    """Build the model file's dict of an engine before its first step.

    Keys and their order: `DeepSpeedEngine._common_checkpoint_state`.
    """
    return {
        names.MODULE_STATE: OrderedDict(),
        names.BUFFER_NAMES: [],
        names.WHOLE_OPTIMIZER: None,
        names.PARAM_SHAPES: [],
        names.FROZEN_SHAPES: {},
        names.SHARED_PARAMS: {},
        names.FROZEN_FRAGMENTS: {},
        "lr_scheduler": None,
        "data_sampler": None,
        names.RANDOM_LTD: None,
        "skipped_steps": 0,
        "global_steps": 0,
        "global_samples": 0,
        names.DP_WORLD_SIZE: 0,
        names.MP_WORLD_SIZE: 1,
        names.DS_CONFIG: dict(config),
        names.DS_VERSION: _VERSION,
    }


def _optimizer_state(
    wrapped: Mapping[str, Node], config: ds_config.Config, stage: int
) -> dict[str, Node]:
    """Build a ZeRO optimizer's dict, without what depends on the partitioning."""
    if stage == 3:
        return {
            names.ZERO_STAGE: Call(names.STAGE_ENUM, (stage,)),
            **unscaled(),
            names.PARTITION_COUNT: None,
            names.OPTIMIZER: wrapped,
            names.FLAT_GROUPS_3: None,
        }
    return {
        **unscaled(),
        names.CLIP_GRAD: ds_config.gradient_clipping(config) or 0.0,
        names.BASE_OPTIMIZER: wrapped,
        names.FLAT_GROUPS: None,
        names.ZERO_STAGE: Call(names.STAGE_ENUM, (stage,)),
        names.GROUP_PADDINGS: None,
        names.ALIGNMENT_PADDINGS: None,
        names.PARTITION_COUNT: None,
        names.DS_VERSION: _VERSION,
        names.SLICE_MAPPINGS: None,
    }


def _notes() -> Iterator[str]:
    yield (
        "Made from the job's config, without a checkpoint of it: the engine's counters begin at "
        "0, and there is no client state."
    )
    yield (
        "The param groups, and the order of the parameters in them, are the source's. The job must "
        "give its optimizer the same groups in the same order: DeepSpeed does not check it."
    )
    yield (
        "There is no state of a learning rate scheduler: a job that has one loads with "
        "load_checkpoint(..., load_lr_scheduler_states=False)."
    )
