"""The global batch of the job that saved, and the settings that keep it at another world size.

They are named in the words of the job's framework. HF Trainer and Accelerate replace "auto" in the
DeepSpeed config with their own numbers; numbers that are there already must agree
(`trainer_config_process` of transformers 5.23, `_prepare_deepspeed` of accelerate 1.15). Lightning
refuses accumulation in that config (`_format_batch_size_and_grad_accum_config` of lightning 2.6).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

from streamshard.formats import frameworks
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.deepspeed import ds_config, names
from streamshard.layout.batch import BatchPlan, keep_global_batch, nearest_plans, ranks_per_sample
from streamshard.sizes import counted

_LIMIT_BATCH: Final = 1 << 24
"""More samples than any global batch has; up to this number, all ways to divide it can be tried."""


_UNKNOWN = (
    "The checkpoint's config lacks the global batch size. The job keeps it if micro batch x "
    "accumulation x world size stays as it was."
)


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The global batch of the job that saved, and the settings that keep it in the new job.

    Ranks that share a sequence count as one rank.
    """

    total: int
    micro: int
    """Micro batch of the old job: samples that a rank processed at once."""
    accumulation: int
    """Micro batches in a step of the old job."""
    ranks: int
    """Ranks of the new job that get samples of their own."""
    where: str
    """The ranks of the new job in words: `6 ranks, 2 for each sequence`."""
    data_parallel_size: int | None
    """Value of this key for the new job's config; None if the config does not need the key."""
    is_sure: bool
    """Whether the checkpoint says among how many ranks a sequence is cut."""

    @property
    def kept(self) -> BatchPlan | None:
        """The settings that keep the global batch; None if the ranks do not divide it."""
        return keep_global_batch(self.total, self.micro, self.ranks)

    @property
    def nearest(self) -> tuple[BatchPlan, ...]:
        """The settings with the nearest other global batches."""
        return nearest_plans(self.total, self.micro, self.ranks)

    @property
    def unchanged(self) -> BatchPlan:
        """The new job's batch if each rank keeps the old job's settings."""
        total = self.micro * self.accumulation * self.ranks
        return BatchPlan(total, self.micro, self.accumulation)


def global_batch(
    checkpoint: Checkpoint, config: ds_config.Config, world_size: int, parts: int | None = None
) -> GlobalBatch | str:
    """Compute the global batch; or return a text that says why it is not known.

    `config`: DeepSpeed config of the new job.
    `world_size`: count of the new job's data-parallel ranks, including those of sequence
    parallelism.
    `parts`: count of the new job's model-parallel ranks, if it is another than the old job's.
    """
    each = now_each = _ranks_counted_per_rank(checkpoint)
    if parts is not None:
        now_each = parts if ds_config.features(config).tensor_parallel > 1 else 1
    saved_ranks, world_size = checkpoint.layout.world_size * each, world_size * now_each
    recorded = _ranks_per_sample(checkpoint, saved_ranks)
    before = 1 if recorded is None else recorded
    if not before or saved_ranks % before:
        return f"{_UNKNOWN} The batch sizes in it do not fit {counted(saved_ranks, 'rank')}."
    known = _complete(*ds_config.batch_sizes(checkpoint.config), saved_ranks // before)
    if known is None:
        return _UNKNOWN
    now = _ranks_per_sample_now(checkpoint, config, before)
    if world_size % now:
        return (
            f"Every sequence is cut among {now} ranks, which do not divide {world_size}: take a "
            f"world size that is a multiple of {now}, or set another sequence_parallel_size."
        )
    total, micro, accumulation = known
    return GlobalBatch(
        # Ranks that share samples count each of them, so the number changes, and no sample does.
        total=total // each * now_each,
        micro=micro,
        accumulation=accumulation,
        ranks=world_size // now,
        where=_where(checkpoint, world_size, now),
        data_parallel_size=world_size if checkpoint.replicas > 1 else None,
        is_sure=recorded is not None,
    )


def _where(checkpoint: Checkpoint, world_size: int, cut: int) -> str:
    parallel = len(checkpoint.model_parts) > _ranks_counted_per_rank(checkpoint)
    parallel = parallel or checkpoint.replicas > 1
    text = counted(world_size, "data-parallel rank" if parallel else "rank")
    return f"{text}, {cut} for each sequence" if cut > 1 else text


def _ranks_counted_per_rank(checkpoint: Checkpoint) -> int:
    """Return how many ranks DeepSpeed counts into the batch for each data-parallel rank.

    With AutoTP there is no model-parallel unit, so all ranks count (`DeepSpeedConfig.__init__`).
    """
    is_auto = ds_config.features(checkpoint.config).tensor_parallel > 1
    return len(checkpoint.model_parts) if is_auto else 1


def _ranks_per_sample(checkpoint: Checkpoint, saved_ranks: int) -> int | None:
    """Find out among how many data-parallel ranks the old job cut each sample.

    Ranks of sequence parallelism count as data-parallel ranks, unless a mesh keeps them apart.
    Returns None if the checkpoint does not say, 0 if its batch sizes do not fit the ranks.
    """
    if checkpoint.replicas > 1:
        return 1
    total, micro, accumulation = ds_config.batch_sizes(checkpoint.config)
    if total and micro and accumulation and min(total, micro, accumulation) > 0:
        return ranks_per_sample(total, micro, accumulation, saved_ranks)
    configured = ds_config.sequence_parallel_size(checkpoint.config)
    if configured is not None:
        return configured
    # DeepSpeed's own unit for sequence parallelism calls itself tensor parallel.
    degrees = checkpoint.model_parts[0].model_state.get(names.PARALLEL_DEGREES)
    recorded = degrees.values() if isinstance(degrees, dict) else ()
    beyond = prod(n for n in recorded if isinstance(n, int)) // len(checkpoint.model_parts)
    return beyond if beyond > 1 else None


def _ranks_per_sample_now(checkpoint: Checkpoint, config: ds_config.Config, before: int) -> int:
    """Return among how many data-parallel ranks the new job cuts each sample."""
    if checkpoint.replicas > 1:
        return 1
    return ds_config.sequence_parallel_size(config) or before


def _complete(
    total: int | None, micro: int | None, accumulation: int | None, batch_ranks: int
) -> tuple[int, int, int] | None:
    """Compute the missing of (global batch, micro batch, accumulation) as DeepSpeed does."""
    if total is None and micro is not None:
        total = micro * (accumulation or 1) * batch_ranks
    if total is not None and micro is None:
        micro = total // batch_ranks // (accumulation or 1)
    if not total or not micro or not 0 < micro <= total <= _LIMIT_BATCH:
        return None
    return total, micro, accumulation or max(1, total // (micro * batch_ranks))


Settings = Callable[[GlobalBatch, BatchPlan], str]


def settings_text(batch: GlobalBatch, framework: str | None, job: BatchPlan | None = None) -> str:
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
    return f"{head}{batch.total:,}. {settings_text(batch, framework)}"


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
