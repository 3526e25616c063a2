"""Batch settings that keep the global batch when the world size changes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchPlan:
    train_batch_size: int
    micro_batch: int
    accumulation: int


def keep_global_batch(train_batch_size: int, micro_batch: int, world_size: int) -> BatchPlan | None:
    """Find settings with the same global batch; None if the world size does not divide it.

    The micro batch stays the same if possible; else it is the largest smaller one that fits.

    >>> keep_global_batch(64, 4, 8)
    BatchPlan(train_batch_size=64, micro_batch=4, accumulation=2)
    >>> keep_global_batch(60, 4, 3)
    BatchPlan(train_batch_size=60, micro_batch=4, accumulation=5)
    >>> keep_global_batch(64, 4, 6) is None
    True
    """
    if train_batch_size % world_size:
        return None
    share = train_batch_size // world_size
    micro = next(size for size in range(min(micro_batch, share), 0, -1) if share % size == 0)
    return BatchPlan(train_batch_size, micro, share // micro)


def nearest_plans(
    train_batch_size: int, micro_batch: int, world_size: int
) -> tuple[BatchPlan, ...]:
    """Find settings with the nearest smaller and the nearest larger global batch.

    >>> [plan.train_batch_size for plan in nearest_plans(16, 8, 3)]
    [15, 18]
    >>> [plan.train_batch_size for plan in nearest_plans(2, 2, 3)]
    [3]
    """
    below = train_batch_size // world_size * world_size
    sizes = [size for size in (below, below + world_size) if size]
    found = (keep_global_batch(size, micro_batch, world_size) for size in sizes)
    return tuple(plan for plan in found if plan is not None)


def ranks_per_sample(
    train_batch_size: int, micro_batch: int, accumulation: int, world_size: int
) -> int:
    """Return how many ranks share each sample; 0 if the sizes do not fit the world size.

    >>> ranks_per_sample(64, 4, 2, 8)
    1
    >>> ranks_per_sample(64, 4, 4, 8)
    2
    >>> ranks_per_sample(64, 5, 4, 8)
    0
    """
    samples, rest = divmod(train_batch_size, micro_batch * accumulation)
    return 0 if rest or not samples or world_size % samples else world_size // samples
