"""Explains the effects of another world size on the job that resumes, subject by subject."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from streamshard.formats import frameworks
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.deepspeed import ds_config
from streamshard.layout.batch import BatchPlan
from streamshard.operations.resume import advice
from streamshard.operations.source.source import Source
from streamshard.sizes import counted

_SCHEDULER: Final = "lr_scheduler"
_COUNTERS: Final = ("last_epoch", "last_batch_iteration", "num_updates", "_step_count")
"""Keys in which schedulers keep their step: torch's, DeepSpeed's, others'."""


@dataclass(frozen=True, slots=True)
class Change:
    """The effect on one subject."""

    subject: str
    """`random generators`, `global batch`, `data position` or `learning rate`."""
    text: str


@dataclass(frozen=True, slots=True)
class Resizing:
    """The effects of another world size on a job."""

    changes: tuple[Change, ...]
    """One change per subject; none if the world size stays as it was."""
    notes: tuple[str, ...]
    """The effects that the user has to know or act on; the run's report has them too."""


def explain(
    source: Source,
    world_size: int,
    resized: frameworks.Resized,
    *,
    dp_world_size: int,
    config: ds_config.Config,
    parts: int | None = None,
    job: BatchPlan | None = None,
) -> Resizing:
    """Explain the effects on everything that depends on the count of ranks.

    `world_size`: count of all ranks that resume; the data-parallel size of these is
    `dp_world_size`.
    `parts`: count of its model-parallel ranks, if it is another than that of the job that saved.
    `job`: the batch of that job, if it runs already: then it is not told what it does anyway.
    """
    checkpoint = source.checkpoint
    framework = _framework(checkpoint, resized)
    found = advice.global_batch(checkpoint, config, dp_world_size, parts)
    batch = found if isinstance(found, str) else advice.settings_text(found, framework, job)
    batches = [batch] if batch else []
    if world_size == checkpoint.ranks and parts is None:
        return Resizing((), (*resized.notes, *batches))
    position = advice.advice_for(framework).position(source, found, job)
    schedule = (resized.schedule,) if resized.schedule else ()
    changes = (
        Change("random generators", _generators(checkpoint, resized)),
        Change("global batch", batch),
        Change("data position", position or " ".join(_position(checkpoint))),
        Change("learning rate", " ".join((*_schedule(checkpoint), *schedule))),
    )
    notes = [*resized.notes, *batches, *([position] if position else []), *schedule]
    return Resizing(changes, tuple(notes))


def _framework(checkpoint: Checkpoint, resized: frameworks.Resized) -> str | None:
    """Return the framework; Fabric is Lightning without keys of its own in the model state."""
    is_fabric = (
        resized.framework == frameworks.LIGHTNING
        and frameworks.LIGHTNING_VERSION not in checkpoint.model_parts[0].model_state
    )
    return frameworks.FABRIC if is_fabric else resized.framework


def _generators(checkpoint: Checkpoint, resized: frameworks.Resized) -> str:
    if checkpoint.is_dumps:
        return "Raw dumps hold none."
    if resized.notes:
        return " ".join(resized.notes)
    if resized.framework in (frameworks.HF_TRAINER, frameworks.ACCELERATE):
        return f"{resized.framework}: every rank keeps its own random state."
    return "The checkpoint holds none for each rank. What is in the client state is kept."


def _position(checkpoint: Checkpoint) -> Iterator[str]:
    """Say from which step the engine continues, as `load_checkpoint` of DeepSpeed 0.19.8 does."""
    state = checkpoint.model_parts[0].model_state
    steps, samples = state.get("global_steps"), state.get("global_samples")
    if not isinstance(steps, int):
        yield f"{'Raw dumps do' if checkpoint.is_dumps else 'The source does'} not contain it."
        return
    seen = f" and {counted(samples, 'sample')}" if isinstance(samples, int) else ""
    yield f"The engine counts on from step {steps:,}{seen}."
    if state.get("data_sampler") is not None:
        yield "The state of DeepSpeed's data sampler is kept."
    yield (
        "If the job skips the data that it has seen, let it count samples: the number of batches "
        "of each rank is another one now."
    )


def _schedule(checkpoint: Checkpoint) -> Iterator[str]:
    scheduler = checkpoint.model_parts[0].model_state.get(_SCHEDULER)
    if isinstance(scheduler, dict):
        counters = (
            f" ({k} {scheduler[k]:,})" for k in _COUNTERS if isinstance(scheduler.get(k), int)
        )
        where = next(counters, "")
        yield f"The scheduler's state{where} and the learning rates of the param groups are kept."
        yield "The scheduler counts steps: its schedule stays the same if the global batch does."
    else:
        who = "raw dumps hold" if checkpoint.is_dumps else "the engine kept"
        yield f"The learning rates of the param groups are kept; {who} no scheduler."
