"""Reads a live engine, its config and its place among the ranks; sets attributes for a while."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import deepspeed
from deepspeed import comm

from streamshard.errors import Option, UnsupportedError, UsageError, keyword, worded
from streamshard.formats.deepspeed import ds_config
from streamshard.formats.deepspeed.ds_versions import recorded_version
from streamshard.native.resharding import Resharding, resharding_of
from streamshard.source.degree_change import JobDegrees, other_degrees
from streamshard.source.source import Source

_OWN_WORDS: Final = {
    "world_size": "world size",
    "expert_parallel": "expert parallel size",
    "ds_config_file": "the engine's config",
    "tensor_parallel": "--tensor-parallel",
    "pipeline_parallel": "--pipeline-parallel",
    "like": "'streamshard repartition --like'",
}
"""What stands here for options of `repartition`, or where to give them."""

Engine = Any
"""A `DeepSpeedEngine`; what it is depends on the version of DeepSpeed."""


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def require_servable(engine: Engine) -> None:
    """Refuse an engine that loads in a way that this cannot serve."""
    if engine.load_universal_checkpoint():
        message = "the engine's config has checkpoint.load_universal on, with which it loads other"
        raise UnsupportedError(f"{message} files: set it to false")
    if engine.zero_elastic_checkpoint():
        message = "the engine's config has zero_optimization.elastic_checkpoint on, with which it"
        raise UnsupportedError(f"{message} loads the files of all ranks: set it to false")
    # `zero_nvme_offload_optimizer()` of newer versions.
    if getattr(engine.optimizer, "swap_optimizer", False):
        message = "the engine offloads its optimizer to NVMe, with which DeepSpeed loads swap files"
        raise UnsupportedError(
            f"{message} of each rank: set offload_optimizer.device to cpu or none"
        )


def _config_of(engine: Engine) -> ds_config.Config:
    """Return the engine's config as plain data."""
    return without_auto(json.loads(json.dumps(engine._config._param_dict, default=str)))


def without_auto(config: ds_config.Config) -> ds_config.Config:
    """Leave out each "auto" that a framework would have replaced before the engine was made.

    No later load may replace it: the engine has taken its default.
    """
    return ds_config.resolved(config, {})


def _own_word(option: Option) -> str:
    """Word an option for which something else may stand here."""
    own = _OWN_WORDS.get(option.name)
    if own is None:
        return keyword(option)
    return own if option.what or option.value is None else f"{own} {option.value}"


def resharding_for(engine: Engine, opened: Source, world_size: int) -> Resharding:
    """Decide how a checkpoint is cut for an engine."""
    config = _config_of(engine)
    layout = opened.checkpoint.layout
    # Before 0.17.6 a BF16_Optimizer trained bf16 without a stage in the config.
    is_stageless = layout.bf16_optimizer and type(engine.optimizer).__name__ == "BF16_Optimizer"
    is_stageless = is_stageless and not ds_config.zero_stage(config)
    wanted = config if layout.stage and not is_stageless else None
    if wanted is not None and not ds_config.zero_stage(config):
        message = "the engine's config asks for ZeRO stage 0, which does not load what was saved"
        raise UsageError(f"{message} at stage {layout.stage}: set it to 1, 2 or 3")
    experts = _expert_parallel_of(engine)
    if experts == opened.checkpoint.expert_parallel:
        experts = None
    with worded(_own_word):
        degrees = JobDegrees(expert_parallel=experts, world_size=world_size)
        return resharding_of(
            opened,
            world_size,
            wanted=wanted,
            ds_version=recorded_version(deepspeed.__version__),
            derived=other_degrees().change(opened, degrees),
        )


def require_frozen(engine: Engine, resharding: Resharding) -> None:
    """Refuse parameters that are not frozen and in no param group: stage 3 would not load them."""
    if resharding.settings.layout.stage < 3:
        return
    entries = (e for part in resharding.source.checkpoint.model_parts for e in part.module)
    frozen = {e.name for e in entries if e.kind == "frozen" and 0 not in e.shape}
    for name, param in engine.module.named_parameters():
        if param.requires_grad and name in frozen:
            message = f"'{name}' is in no param group of the job that saved, and here it is not"
            raise UnsupportedError(
                f"{message} frozen, so that stage 3 would not load it: freeze it before "
                "deepspeed.initialize()"
            )


def _expert_parallel_of(engine: Engine) -> int | None:
    """Return over how many ranks an engine spreads its experts; None if it is not one count.

    Layers may have different counts. Then the optimizer's groups show whether they fit.
    """
    wrapped = getattr(engine.optimizer, "optimizer", None)
    groups = [group for group in getattr(wrapped, "param_groups", ()) if group.get("moe") is True]
    sizes = {engine.expert_parallel_group[group["name"]].size() for group in groups}
    return int(sizes.pop()) if len(sizes) == 1 else None


def mp_rank_of(engine: Engine) -> int:
    """Return a rank's number among the model-parallel parts."""
    mpu = engine.mpu
    mp_rank = 0 if mpu is None else mpu.get_model_parallel_rank()
    return int(getattr(engine, "checkpoint_mp_rank", mp_rank))


def rank_and_world_size(engine: Engine) -> tuple[int, int]:
    """Return a rank's number among the model-parallel parts, and among the data-parallel ranks."""
    return mp_rank_of(engine), comm.get_rank(group=engine.optimizer.dp_process_group)


def writes_in_background(engine: Engine) -> bool:
    """Tell whether DeepSpeed itself writes `latest` later, when all files are written."""
    is_decoupled = getattr(engine.checkpoint_engine, "is_decoupled", None)
    return is_decoupled is not None and is_decoupled()
