"""What a user has to change in a job when its world size changes."""

from streamshard.formats import ds_config
from streamshard.formats.checkpoint import Checkpoint
from streamshard.plan.batch import keep_global_batch


def for_world_size(checkpoint: Checkpoint, world_size: int) -> tuple[str, ...]:
    """Say how the new job keeps the global batch of the old one."""
    sizes = ds_config.batch_sizes(checkpoint.config)
    known = _complete(*sizes, checkpoint.layout.world_size)
    if known is None:
        text = (
            "The checkpoint's config does not tell the global batch: keep micro batch x "
            "accumulation x world size as it was."
        )
        return (text,)
    total, micro = known
    plan = keep_global_batch(total, micro, world_size)
    if plan is None:
        below = total // world_size * world_size
        near = " and ".join(str(size) for size in (below, below + world_size) if size)
        text = (
            f"The global batch of {total} cannot be kept on {world_size} ranks, which do not "
            f"divide it; next to it they divide {near}. Mind the learning rate."
        )
        return (text,)
    text = (
        f"To keep the global batch of {total} on {world_size} ranks, set in the DeepSpeed config:\n"
        f'  "train_batch_size": {plan.train_batch_size},\n'
        f'  "train_micro_batch_size_per_gpu": {plan.micro_batch},\n'
        f'  "gradient_accumulation_steps": {plan.accumulation}'
    )
    return (text,)


def _complete(
    total: int | None, micro: int | None, accumulation: int | None, world_size: int
) -> tuple[int, int] | None:
    """Work out (global batch, micro batch) as DeepSpeed does from the settings that are given."""
    if total is None and micro is not None:
        total = micro * (accumulation or 1) * world_size
    if total is not None and micro is None:
        micro = total // world_size // (accumulation or 1)
    if not total or not micro:
        return None
    return total, micro
