"""Finds settings of the resuming job with which DeepSpeed would not load the state in the files.

The comments name the DeepSpeed 0.19.8 code behind each rule.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from streamshard.errors import Option
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
    has_experts: bool
    """Whether ranks hold different experts."""
    auto_experts: int | None
    """Count of ranks over which AutoEP spreads experts in the files; None without AutoEP."""


def objection(job: Resuming) -> str | None:
    """Return which setting of a job the files cannot support, and what to set; None without one."""
    features = ds_config.features(job.config)
    found = (rule(job, features) for rule in _RULES)
    return next((text for text in found if text is not None), None)


def notes(config: ds_config.Config, layout: ZeroLayout) -> Iterator[str]:
    """Yield notes on settings with which a job does not load native files as they are."""
    features = ds_config.features(config)
    if features.loads_universal:
        # With it, `DeepSpeedEngine.load_checkpoint` looks for `latest_universal`.
        yield (
            "The config has checkpoint.load_universal on, with which DeepSpeed does not load these "
            "files: set it to false in the DeepSpeed config of the job that resumes."
        )
    dtype = ds_config.module_dtype(config)
    # `DeepSpeedZeroOptimizer._restore_from_bit16_weights`; stage 3 does not heed it.
    if not features.loads_masters and layout.stage in (1, 2) and dtype != "float32":
        yield (
            f"The config has load_from_fp32_weights off, with which DeepSpeed rounds the master "
            f"weights to {dtype} as it loads them: set it to true in the DeepSpeed config of the "
            "job that resumes."
        )


_Rule = Callable[[Resuming, Features], str | None]


def _nvme(job: Resuming, features: Features) -> str | None:
    # `DeepSpeedEngine.load_checkpoint` copies swap files and does not read the optimizer files.
    if job.layout.stage < 3 or not features.swaps_optimizer:
        return None
    return (
        "has offload_optimizer.device nvme, with which DeepSpeed reads swap files of each rank and "
        "no optimizer files: set it to cpu or none"
    )


def _partial_offload(job: Resuming, features: Features) -> str | None:
    # `DeepSpeedZeroOptimizer_Stage3._optimizer_step` has a second optimizer, whose state is not
    # loaded.
    if job.layout.stage < 3 or features.offload_ratio == 1:
        return None
    return (
        f"has offload_optimizer.ratio {features.offload_ratio:g}: DeepSpeed would load the states "
        "of the sub-groups that stay on the device and not use them: set it to 1"
    )


def _super_offload(job: Resuming, features: Features) -> str | None:
    # `SuperOffloadCPUOptimizer` of `runtime/superoffload/superoffload_utils.py` starts without
    # states.
    if job.layout.stage < 3 or not features.super_offload:
        return None
    return (
        "has offload_optimizer.super_offload on, which begins with new optimizer states whatever "
        "the files hold: set it to false"
    )


def _zenflow(job: Resuming, features: Features) -> str | None:
    # `runtime/zenflow/zenflow_utils.py` and `engine_stage3.py`.
    if not features.zenflow:
        return None
    return "has zenflow, which stores matrices transposed: leave it out"


def _mics(job: Resuming, features: Features) -> str | None:
    # `runtime/zero/mics.py` through 0.19.6.
    shard_size = features.mics_shard_size
    if job.layout.stage < 3 or shard_size in (None, job.layout.world_size):
        return None
    return (
        f"has mics_shard_size {shard_size}, with which the states are cut among that many of the "
        f"{job.layout.world_size} ranks; that is not supported: leave it out"
    )


def _quantized_frozen(job: Resuming, features: Features) -> str | None:
    # `DeepSpeedEngine.load_module_state_dict` copies the weights over integers without a scale.
    if job.layout.stage < 3 or not features.quantized_frozen or not job.has_frozen:
        return None
    return (
        "has zero_quantized_nontrainable_weights on, with which DeepSpeed cannot load the frozen "
        "weights of a checkpoint: set it to false"
    )


def _tensor_parallel(job: Resuming, features: Features) -> str | None:
    saved = ds_config.features(job.kept).tensor_parallel
    if not job.kept or features.tensor_parallel == saved:
        return None
    return (
        f"has tensor_parallel.autotp_size {features.tensor_parallel}, the checkpoint was saved "
        f"with {saved}: set it to {saved}, or let 'streamshard repartition' change the degree with "
        f"{Option('tensor_parallel', features.tensor_parallel)}"
    )


def _auto_experts(job: Resuming, features: Features) -> str | None:
    wanted, own = features.auto_experts, job.auto_experts
    if wanted == own or (wanted is None and not job.config):
        return None
    if own is None:
        return (
            "has AutoEP on (expert_parallel.enabled), and the checkpoint was saved without: its "
            "experts have other names. Leave it out"
        )
    if wanted is None:
        return (
            "does not have AutoEP on, with which the checkpoint was saved: set "
            f"expert_parallel.enabled to true and expert_parallel.autoep_size to {own}"
        )
    return (
        f"has expert_parallel.autoep_size {wanted}, the experts are over {own} ranks in the "
        f"files: set it to {own}, or let 'streamshard repartition' spread them with "
        f"{Option('expert_parallel', wanted)}"
    )


def _between_releases(job: Resuming, features: Features) -> str | None:
    is_open = ds_versions.is_between_releases(job.version) and job.layout.stage == 1
    if not is_open or job.layout.bf16_optimizer or not ds_config.wants_round_robin(job.config):
        return None
    return (
        "has round_robin_gradients on at stage 1, which DeepSpeed ignores up to 0.12.6 and heeds "
        "from 0.13.0 on; the job's version lies between these releases: set it to false"
    )


def _alignment(job: Resuming, features: Features) -> str | None:
    # The model of DeepSpeed's `zero_optimization` refuses keys that it does not know.
    if not ds_config.wants_alignment(job.config) or job.layout.stage not in (1, 2):
        return None
    if ds_versions.has(ds_versions.PARAMETER_ALIGNMENT, job.version):
        return None
    return (
        "has parameter_alignment on, which DeepSpeed knows since 0.19.7, and the files would be "
        f"for an older version: give {Option('ds_version', 'VERSION')}, that of the job"
    )


def _empty_parameters(job: Resuming, features: Features) -> str | None:
    rule = ds_versions.EMPTY_PARAMETERS_FROZEN
    both = ds_versions.has(rule, job.version), ds_versions.has(rule, job.saved_by)
    if not job.layout.round_robin or not job.has_empty or both[0] == both[1]:
        return None
    return (
        "has round_robin_gradients on, and the model has parameters without elements, which count "
        "in that order before DeepSpeed 0.19.6 and not since: set it to false"
    )


def _bf16_optimizer(job: Resuming, features: Features) -> str | None:
    if not job.layout.bf16_optimizer or job.version is None:
        return None
    kind = "trains bf16 with fp32 gradients (BF16_Optimizer), which in this version cuts"
    unlike = "later ones do: leave data_types.grad_accum_dtype out"
    experts, frozen = (
        ds_versions.has(rule, job.version)
        for rule in (
            ds_versions.EXPERTS_IN_BF16_OPTIMIZER,
            ds_versions.FROZEN_OUT_OF_BF16_OPTIMIZER,
        )
    )
    if job.has_experts and not experts:
        return f"{kind} experts among all ranks, as no {unlike}"
    if job.has_frozen and not frozen:
        return f"{kind} frozen weights as well, as no {unlike}"
    return None


def _masters_of_bf16_optimizer(job: Resuming, features: Features) -> str | None:
    # `BF16_Optimizer._load_legacy_checkpoint` leaves its masters as they are.
    if not job.layout.bf16_optimizer or features.loads_masters:
        return None
    return (
        "has load_from_fp32_weights off, with which BF16_Optimizer keeps the master weights of the "
        "model that the job starts with, whatever the files hold: set it to true"
    )


_RULES: Final[tuple[_Rule, ...]] = (
    _between_releases,
    _alignment,
    _empty_parameters,
    _bf16_optimizer,
    _masters_of_bf16_optimizer,
    _nvme,
    _partial_offload,
    _super_offload,
    _zenflow,
    _mics,
    _quantized_frozen,
    _tensor_parallel,
    _auto_experts,
)
