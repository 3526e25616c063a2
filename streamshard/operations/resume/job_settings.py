"""Names the settings that keep a global batch, in the words of the job's framework.

HF Trainer and Accelerate replace "auto" in the DeepSpeed config with their own numbers; numbers
that are there already must agree (`trainer_config_process` of transformers 5.23,
`_prepare_deepspeed` of accelerate 1.15). Lightning refuses accumulation in that config
(`_format_batch_size_and_grad_accum_config` of lightning 2.6).
"""

from collections.abc import Callable, Mapping
from typing import Final

from streamshard.formats import frameworks
from streamshard.layout.batch import BatchPlan
from streamshard.operations.resume.advice import GlobalBatch
from streamshard.sizes import counted

Settings = Callable[[GlobalBatch, BatchPlan], str]


def text(batch: GlobalBatch, framework: str | None, job: BatchPlan | None = None) -> str:
    """Say how the job keeps its global batch, or which global batches are nearest.

    `job`: the batch of the job, if it runs already. If that is the global batch, the text is empty.
    """
    if job is not None:
        return _text_of_running(batch, framework, job)
    settings = _SETTINGS.get(framework or "", _deepspeed)
    notes = _remarks(batch, framework)
    kept = batch.kept
    if kept is not None:
        head = f"To keep the global batch of {batch.total:,} on {batch.where}, "
        return "\n".join([head + settings(batch, kept), *notes])
    blocks = (f"For {plan.train_batch_size:,}, {settings(batch, plan)}" for plan in batch.nearest)
    return "\n".join([_not_kept(batch), *blocks, *notes])


def _not_kept(batch: GlobalBatch) -> str:
    sizes = [f"{plan.train_batch_size:,}" for plan in batch.nearest]
    nearest = f"batches are {' and '.join(sizes)}" if len(sizes) > 1 else f"batch is {sizes[0]}"
    return (
        f"The global batch of {batch.total:,} cannot be kept on {batch.where}: it is not a "
        f"multiple of {batch.ranks:,}. {_other_ranks(batch)}The nearest global {nearest}. Another "
        "global batch may need another learning rate."
    )


def _text_of_running(batch: GlobalBatch, framework: str | None, job: BatchPlan) -> str:
    if job.train_batch_size == batch.total:
        return ""
    head = f"This job has a global batch of {job.train_batch_size:,}, the job that saved had "
    is_nearest = job.train_batch_size in {plan.train_batch_size for plan in batch.nearest}
    if batch.kept is None and is_nearest:
        return f"{head}{batch.total:,}. {_not_kept(batch)}"
    return f"{head}{batch.total:,}. {text(batch, framework)}"


def arguments(plan: BatchPlan) -> str:
    """Return the arguments of HF Trainer as Python code."""
    return (
        f"per_device_train_batch_size={plan.micro_batch}, "
        f"gradient_accumulation_steps={plan.accumulation}"
    )


def _other_ranks(batch: GlobalBatch) -> str:
    """Name the nearest world sizes that divide the batch, if nothing else limits them."""
    if batch.where != counted(batch.ranks, "rank"):
        return ""
    below, above = range(batch.ranks - 1, 0, -1), range(batch.ranks + 1, batch.total + 1)
    fitting = [next((n for n in sizes if batch.total % n == 0), None) for sizes in (below, above)]
    named = " or ".join(f"{n:,}" for n in fitting if n is not None)
    return f"{named} rank{'s' * (named != '1')} would keep it. "


def _hf_trainer(batch: GlobalBatch, plan: BatchPlan) -> str:
    return (
        f"set these TrainingArguments:\n  {arguments(plan)}\n"
        "or give these flags:\n"
        f"  --per_device_train_batch_size {plan.micro_batch} "
        f"--gradient_accumulation_steps {plan.accumulation}\n"
        'In the DeepSpeed config leave these sizes "auto". If it has numbers, set them too:\n'
        f"{_keys(batch, plan)}"
    )


def _accelerate(batch: GlobalBatch, plan: BatchPlan) -> str:
    return (
        "set in the training script:\n"
        f"  DataLoader(..., batch_size={plan.micro_batch})\n"
        f"  Accelerator(gradient_accumulation_steps={plan.accumulation})\n"
        f"With split_batches=True, batch_size is {plan.micro_batch * batch.ranks:,}. If "
        "`accelerate launch` or its config file sets gradient_accumulation_steps, change it there. "
        'In the DeepSpeed config leave these sizes "auto". If it has numbers or lacks a key, set:\n'
        f"{_keys(batch, plan)}"
    )


def _lightning(batch: GlobalBatch, plan: BatchPlan) -> str:
    keys = _keys(batch, plan).rpartition(",\n")[0]
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
        f"and in the config of DeepSpeedStrategy:\n{_keys(batch, plan)}"
    )


def _deepspeed(batch: GlobalBatch, plan: BatchPlan) -> str:
    text = f"set in the DeepSpeed config:\n{_keys(batch, plan)}"
    if batch.data_parallel_size is not None:
        text += f',\n  "data_parallel_size": {batch.data_parallel_size}'
    return text


_SETTINGS: Final[Mapping[str, Settings]] = {
    frameworks.HF_TRAINER: _hf_trainer,
    frameworks.ACCELERATE: _accelerate,
    frameworks.LIGHTNING: _lightning,
    frameworks.FABRIC: _fabric,
}


def _keys(batch: GlobalBatch, plan: BatchPlan) -> str:
    """Return the keys of a DeepSpeed config as text, the accumulation last."""
    return (
        f'  "train_batch_size": {plan.train_batch_size},\n'
        f'  "train_micro_batch_size_per_gpu": {plan.micro_batch},\n'
        f'  "gradient_accumulation_steps": {plan.accumulation}'
    )


def _remarks(batch: GlobalBatch, framework: str | None) -> list[str]:
    """Return remarks on cases in which the job does not use these numbers."""
    found = []
    plans = [batch.kept] if batch.kept is not None else batch.nearest
    if framework == frameworks.HF_TRAINER and any(p.micro_batch != batch.micro for p in plans):
        found.append(
            "Leave auto_find_batch_size off: with it, Trainer takes the batch size of each rank "
            "from trainer_state.json, not from its arguments."
        )
    if framework in (frameworks.LIGHTNING, frameworks.FABRIC) and batch.micro == 1:
        found.append(
            "The checkpoint says that the old job's DataLoader had a batch_size of 1. Lightning "
            "writes 1 also where nothing told it the batch_size. If yours was another one, keep "
            "batch_size x accumulation x ranks as it was."
        )
    if not batch.is_sure:
        found.append(
            "This holds unless sequences are cut among several ranks: the checkpoint's config does "
            "not say."
        )
    return found
