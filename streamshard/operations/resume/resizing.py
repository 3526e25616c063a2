"""Explains the effects of another world size on the job that resumes, subject by subject."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from streamshard.formats import frameworks
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.deepspeed import ds_config
from streamshard.formats.frameworks import TrainerState
from streamshard.layout.batch import BatchPlan
from streamshard.operations.resume import advice
from streamshard.operations.resume.advice import GlobalBatch, arguments
from streamshard.operations.source.source import Source
from streamshard.sizes import counted

_SCHEDULER: Final = "lr_scheduler"
_COUNTERS: Final = ("last_epoch", "last_batch_iteration", "num_updates", "_step_count")
"""Keys in which schedulers keep their step: torch's, DeepSpeed's, others'."""
_HEAD_BYTES: Final = 64 << 10
"""Bytes read of `trainer_state.json`: the training log comes later, and may be long."""


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
    position = _position_in_data(source, framework, found, job)
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


def _position_in_data(
    source: Source, framework: str | None, batch: GlobalBatch | str, job: BatchPlan | None = None
) -> str | None:
    """Say where a framework continues in the data; None if the framework is not known.

    `job`: the batch of the job, if it runs already. Then it is also None if Trainer skips just the
    samples that were seen.
    """
    if framework == frameworks.HF_TRAINER:
        if job is not None and not isinstance(batch, str) and job.train_batch_size == batch.total:
            return None
        # Not at the top: only Trainer's files are looked into.
        from streamshard.operations.source.source_access import head_of

        state = frameworks.trainer_state(
            head_of(source, frameworks.TRAINER_STATE, _HEAD_BYTES) or b""
        )
        return "\n".join(_trainer(state, batch, job)) if state else _TRAINER_UNKNOWN
    if framework == frameworks.ACCELERATE:
        return _ACCELERATE + ("" if isinstance(batch, str) else " " + _batches(batch, job))
    return _LIGHTNING if framework == frameworks.LIGHTNING else None


_TRAINER_UNKNOWN: Final = (
    "trainer_state.json does not contain the step. Trainer skips (steps so far) x (global batch of "
    "the new job) samples: with another global batch, samples are left out or seen twice."
)
_ACCELERATE: Final = (
    "Accelerate's load_state does not skip the data that was seen; a script does so with "
    "skip_first_batches(loader, N). N counts batches of each rank, so N is another one now."
)
_LIGHTNING: Final = (
    "Lightning counts the batches of each rank. In the middle of an epoch that count means other "
    "samples on another number of ranks, and Lightning's steps are no longer those of DeepSpeed. "
    "Resume from a checkpoint that was saved at the end of an epoch."
)


def _trainer(state: TrainerState, batch: GlobalBatch | str, job: BatchPlan | None) -> Iterator[str]:
    """Follow `Trainer._init_training_state`, which turns steps into batches to skip."""
    rule = "Trainer skips the data that was seen: (steps so far) x (global batch of the new job)."
    if isinstance(batch, str):
        yield f"{rule} With another global batch, samples are left out or seen twice."
        return
    seen = state.step * batch.total
    epochs = f", in {state.epoch:.2f} epochs" if _spans_epochs(state) else ""
    yield (
        f"{rule} The checkpoint is at step {state.step:,}, so {state.step:,} x {batch.total:,} = "
        f"{seen:,} samples were seen{epochs}."
    )
    if batch.kept is not None:
        yield (
            f"With the arguments above, Trainer skips {seen:,} samples: none is left out, and none "
            "is seen twice."
        )
    current, whose = (batch.unchanged, "the old") if job is None else (job, "this job's")
    for plan in () if batch.kept else batch.nearest:
        if job is None or plan.train_batch_size != job.train_batch_size:
            yield f"With a global batch of {_effect(state, batch, plan)}"
    if current.train_batch_size != batch.total:
        given = f"With {whose} arguments ({arguments(current)})"
        yield f"{given}, and so a global batch of {_effect(state, batch, current)}"
    if batch.kept is None:
        yield (
            "With ignore_data_skip=True (--ignore_data_skip True), Trainer begins this epoch "
            "again, and the samples that it has had are seen twice. The last step stays the same: "
            "raise max_steps too, or as much is left out at the end of the last epoch."
        )


def _spans_epochs(state: TrainerState) -> bool:
    return state.epoch is not None and state.epoch > 1


def _effect(state: TrainerState, batch: GlobalBatch, plan: BatchPlan) -> str:
    """Say how many samples another global batch leaves out or repeats."""
    skipped = state.step * plan.train_batch_size
    more = skipped - state.step * batch.total
    count = f"{abs(more):,} sample{'s are' if abs(more) != 1 else ' is'}"
    what = f"{count} {'left out' if more > 0 else 'seen twice'}" if more else "none is left out"
    if more and state.epoch is not None and _spans_epochs(state):
        # The last batch of an epoch may be smaller than the others.
        place = state.epoch * plan.train_batch_size / batch.total
        what = f"about {what}, as the job goes on at epoch {place:.2f}"
    return f"{plan.train_batch_size:,}, Trainer skips {skipped:,} samples: {what}."


def _batches(batch: GlobalBatch, job: BatchPlan | None) -> str:
    """Say how many samples a batch of Accelerate's data loader has on all ranks together."""
    plans = [batch.kept] if batch.kept is not None else batch.nearest
    settings = "the settings above"
    if job is not None:
        plans, settings = [job], "this job's settings"
    sizes = dict.fromkeys(plan.micro_batch * batch.ranks for plan in plans)
    shown = " or ".join(f"{size:,}" for size in sizes)
    return (
        f"With {settings}, N is the number of samples seen in this epoch / {shown} "
        "(batch_size x ranks)."
    )
