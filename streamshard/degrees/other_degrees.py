"""Takes a checkpoint to other tensor and pipeline parallel degrees."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from streamshard.degrees.averaged_parameters import AVERAGE
from streamshard.degrees.blob_checksums import note_checksums
from streamshard.degrees.recut_source import parts_of, recut_source, require_unused
from streamshard.degrees.target_parts import TargetJob, instead_of
from streamshard.errors import Option, UnsupportedError, UsageError
from streamshard.formats.checkpoint import LIKE
from streamshard.formats.deepspeed import ds_config
from streamshard.formats.deepspeed.model_parallel.cut_rules import read_rules
from streamshard.formats.deepspeed.model_parallel.expert_degree import is_own_degree
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import (
    Degrees,
    degrees_of,
    is_pipeline,
)
from streamshard.formats.deepspeed.model_parallel.stage_starts import (
    STAGES,
    count_stages,
    have_equal_stages,
    listed,
)
from streamshard.formats.pickle.node_checks import of_file
from streamshard.operations.source.degree_change import DegreeChange, JobDegrees
from streamshard.operations.source.source import Source

_MOST_RANKS: Final = 1 << 12
"""More ranks than share a model in any job."""


def at_degrees(opened: Source, wanted: JobDegrees) -> DegreeChange | None:
    """Re-cut a checkpoint, if a job is to resume at other degrees than those that saved it."""
    rules, average = read_rules(wanted.cut_rules_file), wanted.average
    stages, pipeline = wanted.stages, wanted.pipeline_parallel
    if stages is not None:
        pipeline = count_stages(stages, pipeline)
    if wanted.tensor_parallel is None and pipeline is None:
        require_unused(rules, average=average)
        return None
    _require_ranks(opened, wanted.tensor_parallel, pipeline)
    note_checksums(opened)
    with of_file(opened.path):
        own = degrees_of(opened.checkpoint)
        target = Degrees(wanted.tensor_parallel or own.tensor, pipeline or own.pipeline)
        keeps_shards = target.tensor == own.tensor
        if opened.like is None and keeps_shards and target.pipeline == 1 < own.pipeline:
            stages = stages or (0,)
        if keeps_shards:
            require_unused(rules, average=average)
        if stages is not None:
            _require_use_of_stages(opened, stages, target, keeps_shards=keeps_shards)
        elif target == own and not _has_other_stages(opened):
            return None
        _require_changeable(opened, target, own, wanted.expert_parallel)
        laid, parts = parts_of(opened, rules, keeps_shards=keeps_shards, average=average)
    like = TargetJob(laid.source, parts, target, rules, stages).parts_of_model()
    if stages is not None and have_equal_stages(like.checkpoint, opened.checkpoint):
        if wanted.if_needed:
            return None
        message = f"{opened.path}: {Option(STAGES, stages)}: there its stages begin already"
        raise UsageError(f"{message}; leave it out")
    made = recut_source(laid, parts, like)
    _require_config(made.source, like.degrees, wanted.config)
    options = {
        **like.degrees.options,
        **({} if stages is None else {STAGES: listed(stages)}),
        **({AVERAGE.name: ""} if average else {}),
        **({} if rules is None else {"cut_rules_file": rules.text}),
    }
    return replace(made, options=options)


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
    if opened.is_elastic:
        message = "saved with elastic_checkpoint, whose reference supplies hyper-parameters"
        raise UnsupportedError(f"{message}: its degrees cannot change")


def _has_other_stages(opened: Source) -> bool:
    """Tell whether a reference checkpoint is of a pipeline whose stages begin elsewhere."""
    own, like = opened.checkpoint, opened.like
    if like is None or not (is_pipeline(own) and is_pipeline(like)):
        return False
    return not have_equal_stages(own, like)


def _require_use_of_stages(
    opened: Source, stages: Sequence[int], wanted: Degrees, *, keeps_shards: bool
) -> None:
    """Refuse a list of stages where there are none, or where it does not tell all."""
    asked = f"{opened.path}: {Option(STAGES, stages)}"
    if not is_pipeline(opened.checkpoint):
        raise UsageError(f"{asked}: but it is not of a pipeline (PipelineModule); leave it out")
    if opened.like is not None:
        raise UsageError(f"{asked}: {LIKE} tells that too; give one of them")
    if not keeps_shards:
        what = (
            "how tensor-parallel ranks cut tensors"
            if wanted.tensor > 1
            else "the names of layers' files"
        )
        message = f"{asked}: does not tell {what} in a job with {wanted}"
        raise UsageError(f"{message}. {instead_of(stages)}")
