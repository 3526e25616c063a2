"""Takes a checkpoint to other tensor and pipeline parallel degrees."""

from dataclasses import dataclass, replace
from typing import Final

from streamshard.degrees.layered import layered
from streamshard.degrees.recut_source import parts_of, recut_source, require_unused
from streamshard.degrees.shard_values import note_checksums, require_different_shards
from streamshard.errors import Option, StreamshardError, UnsupportedError, UsageError
from streamshard.formats.checkpoint import LIKE, ModelPart
from streamshard.formats.deepspeed import ds_config
from streamshard.formats.deepspeed.model_parallel.cut_rules import CutRules, read_rules
from streamshard.formats.deepspeed.model_parallel.expert_degree import is_own_degree
from streamshard.formats.deepspeed.model_parallel.one_stage import one_stage
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import (
    Degrees,
    degrees_of,
    is_pipeline,
)
from streamshard.formats.deepspeed.model_parallel.parts import ModelInParts, whole_model
from streamshard.formats.pickle.node_checks import of_file
from streamshard.operations.source.degree_change import DegreeChange, JobDegrees
from streamshard.operations.source.source import Source


@dataclass(frozen=True, slots=True)
class TargetJob:
    """A job that is to resume from a source at other degrees."""

    source: Source
    parts: ModelInParts
    """Those of the source."""
    degrees: Degrees
    rules: CutRules | None
    """How both jobs cut parameters; None for what their files tell."""

    def parts_of_model(self) -> ModelInParts:
        """Return how the job cuts the model, by the first that tells it."""
        found = _reference(self) or _whole(self) or _one_stage(self)
        if found is not None:
            return found
        message = f"{self.source.path}: saved with {self.parts.degrees}, and nothing tells how"
        raise UsageError(f"{message} a job with {self.degrees} cuts the model: {_supply()}")


def _reference(job: TargetJob) -> ModelInParts | None:
    """Cut as in a reference checkpoint, which the job saved."""
    checkpoint, known = job.source.like, job.source.reference
    if checkpoint is None:
        return None
    try:
        if job.source.checkpoint.layers and known is not None and is_pipeline(known.checkpoint):
            checkpoint = layered(known).source.checkpoint
        like = ModelInParts(checkpoint, job.rules, keeps_shards=job.parts.keeps_shards)
    except StreamshardError as error:
        raise type(error)(f"{LIKE}: {error}") from error
    if like.degrees != job.degrees:
        message = f"{LIKE} was saved with {like.degrees}, and {job.degrees} are asked for"
        raise UsageError(f"{message}: {_supply()}")
    return like


def _whole(job: TargetJob) -> ModelInParts | None:
    """Leave the model whole, which depends on no choice of the job."""
    if job.degrees.parts > 1 or is_pipeline(job.source.checkpoint):
        return None
    with of_file(job.source.path):
        require_different_shards(job.source, job.parts)
        return whole_model(job.parts)


def _one_stage(job: TargetJob) -> ModelInParts | None:
    """Put all stages of a pipeline together, whose tensor-parallel ranks keep what they have."""
    if job.degrees != Degrees(job.parts.degrees.tensor, 1):
        return None
    try:
        with of_file(job.source.path):
            return one_stage(job.parts)
    except UnsupportedError as error:
        message = f"{error}. A save of that job tells it: {_supply()}"
        raise UnsupportedError(message) from error


def _supply() -> str:
    return (
        'start that job, let it call engine.save_checkpoint("RUN") before its first step, and say '
        f"here {Option('like', 'RUN')} as well"
    )


_MOST_RANKS: Final = 1 << 12
"""More ranks than share a model in any job."""


def at_degrees(opened: Source, wanted: JobDegrees) -> DegreeChange | None:
    """Re-cut a checkpoint, if a job is to resume at other degrees than those that saved it."""
    rules = read_rules(opened.facts.cut_rules)
    if wanted.tensor_parallel is None and wanted.pipeline_parallel is None:
        require_unused(rules)
        return None
    _require_ranks(opened, wanted.tensor_parallel, wanted.pipeline_parallel)
    note_checksums(opened)
    with of_file(opened.path):
        own = degrees_of(opened.checkpoint)
        target = Degrees(
            wanted.tensor_parallel or own.tensor, wanted.pipeline_parallel or own.pipeline
        )
        keeps_shards = target.tensor == own.tensor
        if keeps_shards:
            require_unused(rules)
        if target == own and not _has_other_stages(opened):
            return None
        _require_changeable(opened, target, own, wanted.expert_parallel)
        laid, parts = parts_of(opened, rules, keeps_shards=keeps_shards)
    like = TargetJob(laid.source, parts, target, rules).parts_of_model()
    made = recut_source(laid, parts, like)
    _require_config(made.source, like.degrees, wanted.config)
    cut_rules = {} if rules is None else {"cut_rules": rules.text}
    return replace(made, options={**like.degrees.options, **cut_rules})


def _require_config(made: Source, degrees: Degrees, config: ds_config.Config | None) -> None:
    """Refuse a config of a job with another tensor parallel degree (AutoTP)."""
    if config is None or is_pipeline(made.checkpoint):
        return
    configured = ds_config.features(config).tensor_parallel
    if configured != degrees.tensor:
        asked = Option("tensor_parallel", degrees.tensor)
        message = f"{asked}, but {ds_config.GIVEN} says"
        raise UsageError(f"{message} autotp_size {configured}; make them agree")


def _require_ranks(opened: Source, *degrees: int | None) -> None:
    """Refuse impossible degrees, and sources that have none."""
    for name, degree in zip(("tensor_parallel", "pipeline_parallel"), degrees, strict=True):
        if degree is not None and degree < 1:
            raise UsageError(f"{Option(name, degree)}: at least one rank is needed")
    if opened.kind not in ("native", "store"):
        message = f"{opened.path}: only what an engine saved can be cut for other degrees, and this"
        raise UnsupportedError(f"{message} is neither its files nor a store of them")
    tensor, pipeline = (degree or 1 for degree in degrees)
    if tensor * pipeline > _MOST_RANKS:
        message = (
            f"{Degrees(tensor, pipeline)}: more than {_MOST_RANKS:,} ranks for each replica of"
        )
        raise UsageError(f"{message} the model; give the degrees of the job that will resume")


def _require_changeable(
    opened: Source, wanted: Degrees, own: Degrees, expert_parallel: int | None
) -> None:
    if wanted.pipeline > 1 and not is_pipeline(opened.checkpoint):
        asked = Option("pipeline_parallel", wanted.pipeline)
        message = f"{asked}: but it is not of a pipeline"
        raise UsageError(f"{message} (PipelineModule); leave it out")
    if expert_parallel is not None and not is_own_degree(opened.checkpoint, expert_parallel):
        asked = Option("expert_parallel", expert_parallel)
        message = f"{asked} with {wanted}: experts are spread again"
        raise UnsupportedError(f"{message} only at the other degrees of the source, {own}")


def _has_other_stages(opened: Source) -> bool:
    """Tell whether a reference checkpoint is of a pipeline whose stages begin elsewhere."""
    own, like = opened.checkpoint, opened.like
    if like is None or not (is_pipeline(own) and is_pipeline(like)):
        return False
    return [*map(_params, own.model_parts)] != [*map(_params, like.model_parts)]


def _params(model_part: ModelPart) -> list[tuple[str, ...]]:
    return [group.params for group in model_part.groups]
