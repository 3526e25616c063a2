"""Takes a checkpoint to other tensor and pipeline parallel degrees."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from streamshard.degrees.averaged_parameters import AVERAGE
from streamshard.degrees.layered import layered
from streamshard.degrees.recut_source import parts_of, recut_source, require_unused, universal_info
from streamshard.degrees.shard_values import note_checksums, require_different_shards
from streamshard.errors import Option, StreamshardError, UnsupportedError, UsageError
from streamshard.formats.checkpoint import LIKE
from streamshard.formats.deepspeed import ds_config
from streamshard.formats.deepspeed.model_parallel.affine_maps import AffineMaps
from streamshard.formats.deepspeed.model_parallel.cut_rules import CutRules, read_rules
from streamshard.formats.deepspeed.model_parallel.expert_degree import is_own_degree
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import (
    Degrees,
    degrees_of,
    is_pipeline,
)
from streamshard.formats.deepspeed.model_parallel.parts import ModelInParts, whole_model
from streamshard.formats.deepspeed.model_parallel.recomputed_widths import (
    WidthRule,
    at_degree,
    grain_of,
)
from streamshard.formats.deepspeed.model_parallel.stage_starts import (
    STAGES,
    count_stages,
    have_equal_stages,
    listed,
    with_stages,
)
from streamshard.formats.pickle.node_checks import of_file
from streamshard.formats.pretrained import CONFIG
from streamshard.operations.source.degree_change import DegreeChange, JobDegrees
from streamshard.operations.source.source import Source
from streamshard.operations.source.source_access import head_of

_MOST_BYTES: Final = 1 << 20
"""More than any config has."""


@dataclass(frozen=True, slots=True)
class TargetJob:
    """A job that is to resume from a source at other degrees."""

    source: Source
    parts: ModelInParts
    """Those of the source."""
    degrees: Degrees
    rules: CutRules | None
    """How both jobs cut parameters; None for what their files tell."""
    stages: Sequence[int] | None
    """First layer of each stage; None for what a reference checkpoint tells."""

    def parts_of_model(self) -> ModelInParts:
        """Return how the job cuts the model, by the first that tells it."""
        for ask in _TELLING:
            found = ask(self)
            if found is not None:
                return found
        raise UsageError(self._unstated())

    @property
    def has_maps(self) -> bool:
        """Whether the source's files hold AutoTP's maps."""
        return AffineMaps.are_in(universal_info(self.source))

    def _unstated(self) -> str:
        source, target = self.source, self.degrees
        message = f"{source.path}: saved with {self.parts.degrees}, and nothing tells how a job"
        message = f"{message} with {target} cuts the model: {_supply()}"
        if is_pipeline(source.checkpoint) and target.tensor == self.parts.degrees.tensor:
            return f"{message}; or list with {Option(STAGES)} the first layer of each stage"
        if self.has_maps and _kv_heads(source) is None:
            message = f"{message}. If AutoTP cut by heads, the model's {CONFIG} in {source.path}"
            return f"{message} may do, with num_key_value_heads in it"
        return message


def _listed_stages(job: TargetJob) -> ModelInParts | None:
    """Begin the stages at the layers that the user lists."""
    if job.stages is None:
        return None
    try:
        with of_file(job.source.path):
            return with_stages(job.parts, job.stages)
    except UnsupportedError as error:
        raise UnsupportedError(f"{error}. {_instead_of(job.stages)}") from error


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


def _recomputed_widths(job: TargetJob) -> ModelInParts | None:
    """Cut by the rule by which AutoTP cut the source."""
    with of_file(job.source.path):
        if job.degrees.pipeline > 1 or job.rules is not None or not job.has_maps:
            return None
        grain = grain_of(job.source.checkpoint.config)
        return at_degree(job.parts, WidthRule(job.degrees.tensor, _kv_heads(job.source), grain))


_TELLING: Final[Sequence[Callable[[TargetJob], ModelInParts | None]]] = (
    _listed_stages, _reference, _whole, _recomputed_widths
)  # fmt: skip
"""What may tell how a job cuts the model."""


def _instead_of(stages: Sequence[int]) -> str:
    """Say what to give in place of the first layers of stages."""
    degree = Option("pipeline_parallel", len(stages))
    return f"In place of {Option(STAGES)}, say {degree}, and {_supply()}"


def _supply() -> str:
    return (
        'start that job, let it call engine.save_checkpoint("RUN") before its first step, and say '
        f"here {Option('like', 'RUN')} as well"
    )


def _kv_heads(source: Source) -> int | None:
    """Return the model's count of key and value heads, if its `config.json` has it by that name.

    AutoTP looks for others too, and for what the model's class calls them; only this name is read,
    which comes first (`AutoTPMeta.from_model_config` of `deepspeed/module_inject/tp_shard.py`,
    0.19.8).
    """
    try:
        # As transformers reads it, which writes Infinity too.
        config = json.loads(head_of(source, CONFIG, _MOST_BYTES) or b"")
    except (RecursionError, ValueError):
        return None
    inner = config.get("text_config") if isinstance(config, dict) else None
    section = inner if isinstance(inner, dict) else config
    found = section.get("num_key_value_heads") if isinstance(section, dict) else None
    return found if isinstance(found, int) and found > 0 else None


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
        raise UsageError(f"{message}. {_instead_of(stages)}")
