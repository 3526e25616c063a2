"""What another world size means for the job that resumes, subject by subject."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from streamshard.formats import frameworks
from streamshard.formats.checkpoint import Checkpoint

_SCHEDULER: Final = "lr_scheduler"
_COUNTERS: Final = ("last_epoch", "last_batch_iteration", "num_updates", "_step_count")
"""Where schedulers keep how far they are: torch's, DeepSpeed's, others'."""


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of one thing."""

    subject: str
    """`random generators`, `global batch`, `data position` or `learning rate`."""
    text: str


def changes(
    checkpoint: Checkpoint, world_size: int, resized: frameworks.Resized, batch: Sequence[str]
) -> tuple[Change, ...]:
    """Say what becomes of what depends on the count of ranks; nothing if that stays as it was.

    Parameters
    ----------
    batch
        What there is to say of the global batch.
    """
    if world_size == checkpoint.ranks:
        return ()
    return (
        Change("random generators", _generators(checkpoint, resized)),
        Change("global batch", "\n".join(batch)),
        Change("data position", " ".join(_position(checkpoint))),
        Change("learning rate", " ".join(_schedule(checkpoint, resized))),
    )


def _generators(checkpoint: Checkpoint, resized: frameworks.Resized) -> str:
    if checkpoint.is_dumps:
        return "Raw dumps hold none."
    told = [note for note in resized.notes if note != resized.schedule]
    if told:
        return " ".join(told)
    if resized.framework in (frameworks.HF_TRAINER, frameworks.ACCELERATE):
        return f"{resized.framework}: every rank keeps its own."
    return "None are kept for each rank. What the job keeps in its client state comes along."


def _position(checkpoint: Checkpoint) -> Iterator[str]:
    """Say where the engine counts on from; it does so at `load_checkpoint` of DeepSpeed 0.19.8."""
    state = checkpoint.families[0].model_state
    steps, samples = state.get("global_steps"), state.get("global_samples")
    if not isinstance(steps, int):
        yield "Raw dumps do not tell it." if checkpoint.is_dumps else "The source does not tell it."
        return
    seen = f" and {samples:,} samples" if isinstance(samples, int) else ""
    yield f"The engine counts on from step {steps:,}{seen}."
    if state.get("data_sampler") is not None:
        yield "The state of DeepSpeed's data sampler comes along."
    yield (
        "Samples are dealt out to another number of ranks: a job that skips what it has seen must "
        "count samples, not batches of a rank."
    )


def _schedule(checkpoint: Checkpoint, resized: frameworks.Resized) -> Iterator[str]:
    scheduler = checkpoint.families[0].model_state.get(_SCHEDULER)
    if isinstance(scheduler, dict):
        told = (f" ({k} {scheduler[k]:,})" for k in _COUNTERS if isinstance(scheduler.get(k), int))
        where = next(told, "")
        yield f"The scheduler's state{where} and the rates of the param groups come along."
        yield "It counts steps: while the global batch stays, the schedule does."
    else:
        who = "raw dumps hold" if checkpoint.is_dumps else "the engine kept"
        yield f"The rates of the param groups come along; {who} no scheduler."
    if resized.schedule:
        yield resized.schedule
