"""Explains the effects of another world size on the job that resumes, subject by subject."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Final

from streamshard import registry
from streamshard.formats import frameworks
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.deepspeed import ds_config, names
from streamshard.layout.batch import BatchPlan, keep_global_batch, nearest_plans, ranks_per_sample
from streamshard.sizes import counted
from streamshard.source.source import Source
from streamshard.transfer.report import Change

_SCHEDULER: Final = "lr_scheduler"
_COUNTERS: Final = ("last_epoch", "last_batch_iteration", "num_updates", "_step_count")
"""Keys in which schedulers keep their step: torch's, DeepSpeed's, others'."""
_LIMIT_BATCH: Final = 1 << 24
"""More samples than any global batch has; up to this number, all ways to divide it can be tried."""
_UNKNOWN: Final = (
    "The checkpoint's config lacks the global batch size. The job keeps it if micro batch x "
    "accumulation x world size stays as it was."
)
_UNSURE: Final = (
    "This holds unless sequences are cut among several ranks: the checkpoint's config does not say."
)


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
    sizes = global_batch(checkpoint, config, dp_world_size, parts)
    batch = sizes if isinstance(sizes, str) else settings_text(sizes, framework, job)
    batches = [batch] if batch else []
    if world_size == checkpoint.ranks and parts is None:
        return Resizing((), (*resized.notes, *batches))
    position = _advice_for(framework).position(source, sizes, job)
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
    factor = now_factor = _ranks_counted_per_rank(checkpoint)
    if parts is not None:
        now_factor = parts if ds_config.features(config).tensor_parallel > 1 else 1
    saved_ranks, world_size = checkpoint.layout.world_size * factor, world_size * now_factor
    recorded = _ranks_per_sample(checkpoint, saved_ranks)
    before = 1 if recorded is None else recorded
    if not before or saved_ranks % before:
        return f"{_UNKNOWN} The batch sizes in it do not fit {counted(saved_ranks, 'rank')}."
    sizes = _complete(*ds_config.batch_sizes(checkpoint.config), saved_ranks // before)
    if sizes is None:
        return _UNKNOWN
    is_meshed = checkpoint.replicas > 1
    now = 1 if is_meshed else ds_config.sequence_parallel_size(config) or before
    if world_size % now:
        return (
            f"Every sequence is cut among {now} ranks, which do not divide {world_size}: take a "
            f"world size that is a multiple of {now}, or set another sequence_parallel_size."
        )
    total, micro, accumulation = sizes
    return GlobalBatch(
        # Ranks that share samples count each of them, so the number changes, and no sample does.
        total=total // factor * now_factor,
        micro=micro,
        accumulation=accumulation,
        ranks=world_size // now,
        where=_where(checkpoint, world_size, now),
        data_parallel_size=world_size if is_meshed else None,
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


def settings_text(batch: GlobalBatch, framework: str | None, job: BatchPlan | None = None) -> str:
    """Say how the job keeps its global batch, or which global batches are nearest.

    `job`: the batch of the job, if it runs already. If that is the global batch, the text is empty.
    """
    if job is not None:
        return _text_of_running(batch, framework, job)
    advice = _advice_for(framework)
    settings, notes = advice.settings, [*advice.remarks(batch)]
    if not batch.is_sure:
        notes.append(_UNSURE)
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


def _other_ranks(batch: GlobalBatch) -> str:
    """Name the nearest world sizes that divide the batch, if nothing else limits them."""
    if batch.where != counted(batch.ranks, "rank"):
        return ""
    below, above = range(batch.ranks - 1, 0, -1), range(batch.ranks + 1, batch.total + 1)
    fitting = [next((n for n in sizes if batch.total % n == 0), None) for sizes in (below, above)]
    named = " or ".join(f"{n:,}" for n in fitting if n is not None)
    return f"{named} rank{'s' * (named != '1')} would keep it. "


def _deepspeed(batch: GlobalBatch, plan: BatchPlan) -> str:
    text = f"set in the DeepSpeed config:\n{keys_text(batch, plan)}"
    if batch.data_parallel_size is not None:
        text += f',\n  "data_parallel_size": {batch.data_parallel_size}'
    return text


def keys_text(batch: GlobalBatch, plan: BatchPlan) -> str:
    """Return the keys of a DeepSpeed config as text, the accumulation last."""
    return (
        f'  "train_batch_size": {plan.train_batch_size},\n'
        f'  "train_micro_batch_size_per_gpu": {plan.micro_batch},\n'
        f'  "gradient_accumulation_steps": {plan.accumulation}'
    )


@dataclass(frozen=True, slots=True)
class JobAdvice:
    """What a job is told, in the words of the framework that runs it."""

    settings: Callable[[GlobalBatch, BatchPlan], str]
    """Say what to set for a global batch."""
    remarks: Callable[[GlobalBatch], Iterable[str]] = lambda batch: ()
    """Say in which cases the job does not use these numbers."""
    position: Callable[[Source, GlobalBatch | str, BatchPlan | None], str | None] = (
        lambda source, batch, job: None
    )
    """Say where the job continues in the data, if it is known; it is given the batch of a job that
    runs already."""


_DEEPSPEED: Final = JobAdvice(_deepspeed)


def _advice_for(framework: str | None) -> JobAdvice:
    """Return what a job of a framework is told; None is DeepSpeed alone."""
    if framework is None:
        return _DEEPSPEED
    found: JobAdvice = registry.load(registry.FRAMEWORK_ADVICE)[framework]
    return found
