"""Finds settings of the resuming job with which DeepSpeed would not load the state in the files.

The comments name the DeepSpeed 0.19.8 code behind each rule.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from streamshard.errors import Option, lacking
from streamshard.formats.deepspeed import ds_config, ds_versions
from streamshard.formats.deepspeed.ds_config import Features
from streamshard.formats.deepspeed.ds_versions import Version
from streamshard.model import ZeroLayout


@dataclass(frozen=True, slots=True)
class Resuming:
    """A job that is to resume from the files of a target."""

    config: ds_config.Config
    """DeepSpeed config of the resuming job."""
    kept: ds_config.Config
    """Config of the job that saved; empty if the checkpoint has none."""
    layout: ZeroLayout
    """Of the target."""
    version: Version | None
    """DeepSpeed's in the resuming job; None if it is unknown."""
    saved_by: Version | None
    """DeepSpeed's that saved; None if it is unknown."""
    has_empty: bool
    """Whether the checkpoint holds parameters without elements."""
    has_frozen: bool
    """Whether the checkpoint holds frozen weights."""
    auto_experts: int | None
    """Count of ranks over which AutoEP spreads experts in the files; None without AutoEP."""


def objection(job: Resuming) -> str | None:
    """Return which setting of a job the files cannot support, and what to set; None without one."""
    features = ds_config.features(job.config)
    rules = (_of_order, _of_bf16_optimizer, _of_state_elsewhere, _of_parallelism)
    return next(chain.from_iterable(rule(job, features) for rule in rules), None)


def notes(config: ds_config.Config, layout: ZeroLayout, dtype: str) -> Iterator[str]:
    """Yield notes on settings with which a job does not load native files as they are."""
    features = ds_config.features(config)
    if features.loads_universal:
        # With it, `DeepSpeedEngine.load_checkpoint` looks for `latest_universal`.
        yield (
            "The config has checkpoint.load_universal on, with which DeepSpeed does not load these "
            "files: set it to false in the DeepSpeed config of the job that resumes."
        )
    # `DeepSpeedZeroOptimizer._restore_from_bit16_weights`; stage 3 does not heed it.
    if not features.loads_masters and layout.stage in (1, 2) and dtype != "float32":
        yield (
            f"The config has load_from_fp32_weights off, with which DeepSpeed rounds the master "
            f"weights to {dtype} as it loads them: set it to true in the DeepSpeed config of the "
            "job that resumes."
        )


def _of_order(job: Resuming, features: Features) -> Iterator[str]:
    layout, stage = job.layout, job.layout.stage
    # The model of DeepSpeed's `zero_optimization` refuses keys that it does not know.
    knows_alignment = ds_versions.has(ds_versions.PARAMETER_ALIGNMENT, job.version)
    if ds_config.wants_alignment(job.config) and stage in (1, 2) and not knows_alignment:
        yield (
            "has parameter_alignment on, which DeepSpeed knows since 0.19.7, and the files would "
            f"be for an older version: {lacking('ds_version')}, that of the job"
        )
    rule = ds_versions.EMPTY_PARAMETERS_FROZEN
    both = ds_versions.has(rule, job.version), ds_versions.has(rule, job.saved_by)
    if layout.round_robin and job.has_empty and both[0] != both[1]:
        yield (
            "has round_robin_gradients on, and the model has parameters without elements, which "
            "count in that order before DeepSpeed 0.19.6 and not since: set it to false"
        )


def _of_bf16_optimizer(job: Resuming, features: Features) -> Iterator[str]:
    # `BF16_Optimizer._load_legacy_checkpoint` leaves its masters as they are.
    if job.layout.bf16_optimizer and not features.loads_masters:
        yield (
            "has load_from_fp32_weights off, with which BF16_Optimizer keeps the master weights of "
            "the model that the job starts with, whatever the files hold: set it to true"
        )


def _of_state_elsewhere(job: Resuming, features: Features) -> Iterator[str]:
    is_3, ranks, shard_size = job.layout.stage == 3, job.layout.world_size, features.mics_shard_size
    # `DeepSpeedEngine.load_checkpoint` copies swap files and does not read the optimizer files.
    if is_3 and features.swaps_optimizer:
        yield (
            "has offload_optimizer.device nvme, with which DeepSpeed reads swap files of each rank "
            "and no optimizer files: set it to cpu or none"
        )
    # `DeepSpeedZeroOptimizer_Stage3._optimizer_step` has a second optimizer, whose state is not
    # loaded.
    if is_3 and features.offload_ratio != 1:
        yield (
            f"has offload_optimizer.ratio {features.offload_ratio:g}: DeepSpeed would load the "
            "states of the sub-groups that stay on the device and not use them: set it to 1"
        )
    # `SuperOffloadCPUOptimizer` of `runtime/superoffload/superoffload_utils.py` starts without
    # states.
    if is_3 and features.super_offload:
        yield (
            "has offload_optimizer.super_offload on, which begins with new optimizer states "
            "whatever the files hold: set it to false"
        )
    # `runtime/zenflow/zenflow_utils.py` and `engine_stage3.py`.
    if features.zenflow:
        yield "has zenflow, which stores matrices transposed: leave it out"
    # `runtime/zero/mics.py` through 0.19.6.
    if is_3 and shard_size not in (None, ranks):
        yield (
            f"has mics_shard_size {shard_size}, with which the states are cut among that many of "
            f"the {ranks} ranks; that is not supported: leave it out"
        )
    # `DeepSpeedEngine.load_module_state_dict` copies the weights over integers without a scale.
    if is_3 and features.quantized_frozen and job.has_frozen:
        yield (
            "has zero_quantized_nontrainable_weights on, with which DeepSpeed cannot load the "
            "frozen weights of a checkpoint: set it to false"
        )


def _of_parallelism(job: Resuming, features: Features) -> Iterator[str]:
    degree, saved = features.tensor_parallel, ds_config.features(job.kept).tensor_parallel
    if job.kept and degree != saved:
        yield (
            f"has tensor_parallel.autotp_size {degree}, the checkpoint was saved with {saved}: set "
            f"it to {saved}, or let 'streamshard repartition' change the degree with "
            f"{Option('tensor_parallel', degree)}"
        )
    wanted, spread = features.auto_experts, job.auto_experts
    if spread is None and wanted is not None:
        yield (
            "has AutoEP on (expert_parallel.enabled), and the checkpoint was saved without: its "
            "experts have other names. Leave it out"
        )
    elif wanted is None and spread is not None and job.config:
        yield (
            "does not have AutoEP on, with which the checkpoint was saved: set "
            f"expert_parallel.enabled to true and expert_parallel.autoep_size to {spread}"
        )
    elif wanted is not None and wanted != spread:
        yield (
            f"has expert_parallel.autoep_size {wanted}, the experts are over {spread} ranks in the "
            f"files: set it to {spread}, or let 'streamshard repartition' spread them with "
            f"{Option('expert_parallel', wanted)}"
        )
