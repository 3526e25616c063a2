"""What a user has to change in a job when its world size changes."""

from math import prod
from typing import Final

from streamshard.formats import deepspeed_names as names
from streamshard.formats import ds_config
from streamshard.formats.checkpoint import Checkpoint
from streamshard.plan.batch import BatchPlan, keep_global_batch, ranks_per_sample

_UNKNOWN = (
    "The checkpoint's config does not tell the global batch: keep micro batch x accumulation x "
    "world size as it was."
)
_NOT_TOLD = (
    "\nThis takes it that no sequence is cut among several ranks, of which the checkpoint's config "
    "says nothing."
)

_LIMIT_BATCH: Final = 1 << 24
"""Samples in a global batch that nobody has; up to there, all ways to share them can be tried."""


def for_world_size(
    checkpoint: Checkpoint, config: ds_config.Config, world_size: int
) -> tuple[str, ...]:
    """Say how the new job keeps the global batch of the old one.

    Parameters
    ----------
    config
        Of the new job.
    world_size
        Count of its data-parallel ranks, those that sequence parallelism adds included.
    """
    counted = _ranks_counted_per_rank(checkpoint)
    saved_ranks, world_size = checkpoint.layout.world_size * counted, world_size * counted
    told = _ranks_per_sample(checkpoint, saved_ranks)
    before = 1 if told is None else told
    if not before or saved_ranks % before:
        return (f"{_UNKNOWN} What it says does not fit {saved_ranks} ranks.",)
    known = _complete(*ds_config.batch_sizes(checkpoint.config), saved_ranks // before)
    if known is None:
        return (_UNKNOWN,)
    now = _ranks_per_sample_now(checkpoint, config, before)
    if world_size % now:
        text = f"Every sequence is cut among {now} ranks, which do not divide {world_size}: take"
        return (f"{text} a multiple of {now}, or change the sequence parallelism.",)
    total, micro = known
    plan = keep_global_batch(total, micro, world_size // now)
    where = _where(checkpoint, world_size, now)
    if plan is None:
        return (_next_to(total, world_size // now, where),)
    text = f"To keep the global batch of {total} on {where}, set in the DeepSpeed config:\n"
    return (text + _settings(checkpoint, plan, world_size) + ("" if told else _NOT_TOLD),)


def _where(checkpoint: Checkpoint, world_size: int, cut: int) -> str:
    parallel = len(checkpoint.families) > _ranks_counted_per_rank(checkpoint)
    parallel = parallel or checkpoint.replicas > 1
    text = f"{world_size} {'data-parallel ' if parallel else ''}ranks"
    return f"{text}, {cut} for each sequence" if cut > 1 else text


def _next_to(total: int, batch_ranks: int, where: str) -> str:
    below = total // batch_ranks * batch_ranks
    near = " and ".join(str(size) for size in (below, below + batch_ranks) if size)
    return (
        f"The global batch of {total} cannot be kept on {where}, which do not divide it; next to "
        f"it they divide {near}. Mind the learning rate."
    )


def _settings(checkpoint: Checkpoint, plan: BatchPlan, world_size: int) -> str:
    text = (
        f'  "train_batch_size": {plan.train_batch_size},\n'
        f'  "train_micro_batch_size_per_gpu": {plan.micro_batch},\n'
        f'  "gradient_accumulation_steps": {plan.accumulation}'
    )
    if checkpoint.replicas > 1:
        text += f',\n  "data_parallel_size": {world_size}'
    return text


def _ranks_counted_per_rank(checkpoint: Checkpoint) -> int:
    """Tell how many ranks DeepSpeed counts into the batch for each data-parallel one.

    AutoTP has no model-parallel unit to ask, so all ranks are counted (`DeepSpeedConfig.__init__`).
    """
    is_auto = ds_config.features(checkpoint.config).tensor_parallel > 1
    return len(checkpoint.families) if is_auto else 1


def _ranks_per_sample(checkpoint: Checkpoint, saved_ranks: int) -> int | None:
    """Find out among how many of the data-parallel ranks the old job cut each sample.

    Sequence parallelism counts its ranks as data-parallel ones, except where a mesh keeps them
    apart. None where nothing tells, 0 where what is told does not fit the ranks.
    """
    if checkpoint.replicas > 1:
        return 1
    total, micro, accumulation = ds_config.batch_sizes(checkpoint.config)
    if total and micro and accumulation and min(total, micro, accumulation) > 0:
        return ranks_per_sample(total, micro, accumulation, saved_ranks)
    asked = ds_config.sequence_parallel_size(checkpoint.config)
    if asked is not None:
        return asked
    # DeepSpeed's own unit for sequence parallelism calls itself a tensor parallel one.
    degrees = checkpoint.families[0].model_state.get(names.PARALLEL_DEGREES)
    told = degrees.values() if isinstance(degrees, dict) else ()
    beyond = prod(n for n in told if isinstance(n, int)) // len(checkpoint.families)
    return beyond if beyond > 1 else None


def _ranks_per_sample_now(checkpoint: Checkpoint, config: ds_config.Config, before: int) -> int:
    """Tell among how many of the data-parallel ranks the new job cuts each sample."""
    if checkpoint.replicas > 1:
        return 1
    return ds_config.sequence_parallel_size(config) or before


def _complete(
    total: int | None, micro: int | None, accumulation: int | None, batch_ranks: int
) -> tuple[int, int] | None:
    """Work out (global batch, micro batch) as DeepSpeed does from the settings that are given."""
    if total is None and micro is not None:
        total = micro * (accumulation or 1) * batch_ranks
    if total is not None and micro is None:
        micro = total // batch_ranks // (accumulation or 1)
    if not total or not micro or not 0 < micro <= total <= _LIMIT_BATCH:
        return None
    return total, micro
