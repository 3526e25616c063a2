"""Explains where in its data a job continues, if its global batch stays or changes."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from streamshard.formats import frameworks
from streamshard.formats.frameworks import TrainerState
from streamshard.layout.batch import BatchPlan
from streamshard.model import FILE
from streamshard.operations.resume.advice import GlobalBatch
from streamshard.operations.resume.job_settings import arguments
from streamshard.operations.source.source import Source
from streamshard.operations.source.source_access import SourceAccess

_HEAD_BYTES: Final = 64 << 10
"""Bytes read of `trainer_state.json`: the training log comes later, and may be long."""


def text(
    source: Source, framework: str | None, batch: GlobalBatch | str, job: BatchPlan | None = None
) -> str | None:
    """Say where a framework continues in the data; None if the framework is not known.

    Parameters
    ----------
    job
        The batch of the job, if it runs already. Then it is also None if Trainer skips just the
        samples that were seen.
    """
    if framework == frameworks.HF_TRAINER:
        if job is not None and not isinstance(batch, str) and job.train_batch_size == batch.total:
            return None
        state = frameworks.trainer_state(_head(source, frameworks.TRAINER_STATE))
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


def _head(source: Source, name: str) -> bytes:
    """Read the beginning of a sidecar."""
    tensors = source.checkpoint.tensors
    number = next(n for n, t in enumerate(tensors) if (t.state, t.name) == (FILE, name))
    head = np.empty(min(_HEAD_BYTES, tensors[number].numel), dtype=np.uint8)
    reading = SourceAccess(source)
    try:
        reading.fill(head, number, 0, None)
    finally:
        reading.close()
    return head.tobytes()


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
