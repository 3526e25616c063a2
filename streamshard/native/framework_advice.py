"""What a job of a framework is told: settings for its batch, and where it goes on in the data.

HF Trainer and Accelerate replace "auto" in the DeepSpeed config with their own numbers; numbers
that are there already must agree (`trainer_config_process` of transformers 5.23,
`_prepare_deepspeed` of accelerate 1.15). Lightning refuses accumulation in that config
(`_format_batch_size_and_grad_accum_config` of lightning 2.6).
"""

from collections.abc import Iterator, Mapping
from typing import Final

from streamshard.formats import frameworks
from streamshard.formats.rank_states import TrainerState, trainer_state
from streamshard.layout.batch import BatchPlan
from streamshard.native.resizing import GlobalBatch, JobAdvice, keys_text
from streamshard.source.source import Source
from streamshard.source.source_access import head_of

_HEAD_BYTES: Final = 64 << 10
"""Bytes read of `trainer_state.json`: the training log comes later, and may be long."""


def _arguments(plan: BatchPlan) -> str:
    """Return the arguments of HF Trainer as Python code."""
    return (
        f"per_device_train_batch_size={plan.micro_batch}, "
        f"gradient_accumulation_steps={plan.accumulation}"
    )


def _hf_trainer(batch: GlobalBatch, plan: BatchPlan) -> str:
    return (
        f"set these TrainingArguments:\n  {_arguments(plan)}\n"
        "or give these flags:\n"
        f"  --per_device_train_batch_size {plan.micro_batch} "
        f"--gradient_accumulation_steps {plan.accumulation}\n"
        'In the DeepSpeed config leave these sizes "auto". If it has numbers, set them too:\n'
        f"{keys_text(batch, plan)}"
    )


def _accelerate(batch: GlobalBatch, plan: BatchPlan) -> str:
    return (
        "set in the training script:\n"
        f"  DataLoader(..., batch_size={plan.micro_batch})\n"
        f"  Accelerator(gradient_accumulation_steps={plan.accumulation})\n"
        f"With split_batches=True, batch_size is {plan.micro_batch * batch.ranks:,}. If "
        "`accelerate launch` or its config file sets gradient_accumulation_steps, change it there. "
        'In the DeepSpeed config leave these sizes "auto". If it has numbers or lacks a key, set:\n'
        f"{keys_text(batch, plan)}"
    )


def _lightning(batch: GlobalBatch, plan: BatchPlan) -> str:
    keys = keys_text(batch, plan).rpartition(",\n")[0]
    return (
        "set in the training script:\n"
        f"  DataLoader(..., batch_size={plan.micro_batch})\n"
        f"  Trainer(accumulate_grad_batches={plan.accumulation})\n"
        "Leave gradient_accumulation_steps out of DeepSpeedStrategy's config, where Lightning "
        "refuses it. If that config has these keys, set them too:\n"
        f"{keys}"
    )


def _fabric(batch: GlobalBatch, plan: BatchPlan) -> str:
    return (
        f"set in the training script:\n  DataLoader(..., batch_size={plan.micro_batch})\n"
        f"and in the config of DeepSpeedStrategy:\n{keys_text(batch, plan)}"
    )


def _trainer_remarks(batch: GlobalBatch) -> Iterator[str]:
    plans = [batch.kept] if batch.kept is not None else batch.nearest
    if any(plan.micro_batch != batch.micro for plan in plans):
        yield (
            "Leave auto_find_batch_size off: with it, Trainer takes the batch size of each rank "
            "from trainer_state.json, not from its arguments."
        )


def _lightning_remarks(batch: GlobalBatch) -> Iterator[str]:
    if batch.micro == 1:
        yield (
            "The checkpoint says that the old job's DataLoader had a batch_size of 1. Lightning "
            "writes 1 also where nothing told it the batch_size. If yours was another one, keep "
            "batch_size x accumulation x ranks as it was."
        )


def _trainer_position(
    source: Source, batch: GlobalBatch | str, job: BatchPlan | None
) -> str | None:
    """Say where Trainer continues; None if it skips just what a running job has seen."""
    if job is not None and not isinstance(batch, str) and job.train_batch_size == batch.total:
        return None
    state = trainer_state(head_of(source, frameworks.TRAINER_STATE, _HEAD_BYTES) or b"")
    return "\n".join(_trainer(state, batch, job)) if state else _TRAINER_UNKNOWN


def _accelerate_position(_: Source, batch: GlobalBatch | str, job: BatchPlan | None) -> str:
    return _ACCELERATE + ("" if isinstance(batch, str) else " " + _batches(batch, job))


def _lightning_position(_: Source, batch: GlobalBatch | str, job: BatchPlan | None) -> str:
    return _LIGHTNING


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
        given = f"With {whose} arguments ({_arguments(current)})"
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


ADVICE: Final[Mapping[str, JobAdvice]] = {
    frameworks.HF_TRAINER: JobAdvice(_hf_trainer, _trainer_remarks, _trainer_position),
    frameworks.ACCELERATE: JobAdvice(_accelerate, position=_accelerate_position),
    frameworks.LIGHTNING: JobAdvice(_lightning, _lightning_remarks, _lightning_position),
    frameworks.FABRIC: JobAdvice(_fabric, _lightning_remarks),
}
