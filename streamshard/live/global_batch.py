"""Keeps the global batch of a job when its count of ranks changes."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from traceback import walk_stack
from typing import Any

from deepspeed.runtime.config import DeepSpeedConfig
from torch import distributed

from streamshard.errors import UnsupportedError, UsageError
from streamshard.layout.batch import BatchPlan, keep_global_batch
from streamshard.live.consensus import say
from streamshard.live.live_engine import Engine, replaced
from streamshard.native.resharding import Resharding
from streamshard.native.resizing import global_batch, settings_text
from streamshard.sizes import counted

_LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")


@contextmanager
def fitted_configs() -> Iterator[None]:
    """Let configs of any world size initialize engines; their `train_batch_size` stays.

    If the sizes in a config do not fit the count of ranks, DeepSpeed stops. Here micro batch and
    accumulation are set so that they fit, also in the config's dict: scripts read them there, and
    DeepSpeed keeps it in checkpoints. A config without `train_batch_size` is left as it is; only
    the checkpoint then says what the global batch was (see `plan_batch`).
    """
    plain = DeepSpeedConfig._configure_train_batch_size
    announcements: set[BatchPlan] = set()

    @wraps(plain)
    def configure(config: Any) -> None:
        # Before ranks have met, DeepSpeed takes their count for 1.
        plan = _fitting(config) if distributed.is_initialized() else None
        if plan is not None:
            config.train_micro_batch_size_per_gpu = plan.micro_batch
            config.gradient_accumulation_steps = plan.accumulation
            config._param_dict.update(
                train_micro_batch_size_per_gpu=plan.micro_batch,
                gradient_accumulation_steps=plan.accumulation,
            )
            if plan not in announcements:
                announcements.add(plan)
                say(f"{_text(plan, int(config.world_size))} (the config's sizes fit other ranks)")
        plain(config)

    with replaced(DeepSpeedConfig, "_configure_train_batch_size", configure):
        yield


def _fitting(config: Any) -> BatchPlan | None:
    """Find sizes with the config's global batch; None if its own fit, or DeepSpeed judges them."""
    total = config.train_batch_size
    micro, accumulation = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    given = [size for size in (total, micro, accumulation) if size is not None]
    if total is None or not all(isinstance(size, int) and size > 0 for size in given):
        return None
    ranks = int(config.world_size)  # DeepSpeed divides some with `/`
    share = total // ranks
    micro = micro or share // (accumulation or 1)
    accumulation = accumulation or share // micro if micro else 1
    if micro * accumulation * ranks == total:
        return None
    where = f"The config's train_batch_size of {total:,} cannot be kept on {counted(ranks, 'rank')}"
    plan = keep_global_batch(total, max(1, micro), ranks)
    if plan is None:
        nearest = " or ".join(f"{n:,}" for n in _world_sizes_near(ranks, total))
        message = f"{where}: it is not a multiple of {ranks:,}"
        raise UsageError(f"{message}. {nearest} would keep it")
    framework = _framework()
    if framework is not None:
        message = f"{where} from outside of {framework}, which counts the accumulation itself: set"
        raise UsageError(
            f"{message} a micro batch of {plan.micro_batch} and an accumulation of "
            f"{plan.accumulation} in its own arguments"
        )
    return plan


def _world_sizes_near(ranks: int, total: int) -> Iterator[int]:
    """Yield the nearest smaller and the nearest larger count of ranks that divide a batch."""
    for sizes in (range(ranks - 1, 0, -1), range(ranks + 1, total + 1)):
        yield from [n for n in sizes if total % n == 0][:1]


def plan_batch(engine: Engine, resharding: Resharding) -> BatchPlan | None:
    """Find the sizes with which an engine keeps the global batch of the job that saved.

    Data loaders exist by now, so the micro batch must stay as it is. Returns None if nothing has
    to change.
    """
    source, settings = resharding.source, resharding.settings
    batch = global_batch(source.checkpoint, settings.config, settings.layout.world_size)
    if isinstance(batch, str):
        raise UnsupportedError(f"{source.path}: the global batch cannot be kept. {batch}")
    micro, ranks = engine.train_micro_batch_size_per_gpu(), engine.dp_world_size
    now = engine.train_batch_size()
    if now == batch.total:
        return None
    head = f"{source.path}: saved with a global batch of {batch.total:,}; the engine's is {now:,}."
    advice = settings_text(batch, resharding.resized.framework)
    framework = _framework()
    if framework is not None:
        message = f"{head} {framework} counts the accumulation itself, so it is not changed here"
        raise UsageError(f"{message}. {advice}")
    accumulation, rest = divmod(batch.total, micro * ranks)
    if rest or ranks != batch.ranks:
        message = f"{head} Accumulation alone cannot keep it with a micro batch of {micro:,} on"
        raise UsageError(f"{message} {counted(ranks, 'rank')}. {advice}")
    return BatchPlan(batch.total, micro, accumulation)


def set_batch(engine: Engine, plan: BatchPlan) -> None:
    """Set another accumulation in an engine."""
    engine.set_train_batch_size(plan.train_batch_size)
    # The ZeRO optimizers keep a number of their own, which that call leaves as it was.
    if hasattr(engine.optimizer, "gradient_accumulation_steps"):
        engine.optimizer.gradient_accumulation_steps = plan.accumulation
    if isinstance(engine.config, dict):
        # What the next checkpoint records. Other sizes in it would contradict its ranks.
        engine.config.update(
            train_batch_size=plan.train_batch_size,
            train_micro_batch_size_per_gpu=plan.micro_batch,
            gradient_accumulation_steps=plan.accumulation,
        )
    say(_text(plan, engine.dp_world_size))


def _text(plan: BatchPlan, ranks: int) -> str:
    return (
        f"Global batch stays {plan.train_batch_size:,} on {counted(ranks, 'rank')}: micro batch "
        f"{plan.micro_batch:,}, accumulation {plan.accumulation:,}"
    )


def _framework() -> str | None:
    """Name the framework that counts the accumulation of this process, apart from DeepSpeed."""
    state: Any = sys.modules.get("accelerate.state")
    if state is not None and state.is_initialized():
        return "Accelerate"
    callers = (frame.f_globals.get("__name__", "") for frame, _ in walk_stack(None))
    if any(caller.partition(".")[0] in _LIGHTNING for caller in callers):
        return "Lightning"
    return None
