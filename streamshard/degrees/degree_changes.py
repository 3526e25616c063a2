"""Other degrees as verbs ask for them; see `operations/source/degree_change.py`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from streamshard.degrees.layered import WithLayerTensors
from streamshard.degrees.other_degrees import at_degrees
from streamshard.degrees.recut_source import parts_of, recut_source, require_unused, tells_cut
from streamshard.degrees.shard_values import note_checksums, require_different_shards
from streamshard.errors import Option, UnsupportedError, UsageError
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.deepspeed.model_parallel.cut_rules import CutRules, read_rules
from streamshard.formats.deepspeed.model_parallel.expert_degree import (
    expert_degree,
    is_own_degree,
    spread_note,
    with_expert_degree,
)
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import degrees_of, is_pipeline
from streamshard.formats.deepspeed.model_parallel.parts import ModelInParts, whole_model
from streamshard.formats.deepspeed.model_parallel.pipeline_layers import as_one_module
from streamshard.formats.pickle.node_checks import of_file
from streamshard.model import MASTER, Note
from streamshard.operations.source.degree_change import DegreeChange, JobDegrees, OtherDegrees
from streamshard.operations.source.source import Source
from streamshard.sizes import counted


def whole(opened: Source, rules: CutRules | None) -> DegreeChange | None:
    """Put the tensors of a pipeline or of AutoTP together; None if the checkpoint is of neither.

    `rules`: how tensor parallelism cut parameters; None for what files tell.
    """
    model_parts = opened.checkpoint.model_parts
    is_pipe = is_pipeline(opened.checkpoint)
    if len(model_parts) == 1 or (is_pipe and degrees_of(opened.checkpoint).tensor == 1):
        require_unused(rules)
    if not is_pipe and (len(model_parts) == 1 or not (rules or tells_cut(opened))):
        return None
    try:
        with of_file(opened.path):
            laid, parts = parts_of(opened, rules, keeps_shards=False)
            return _whole_of_parts(laid, parts)
    except UnsupportedError as error:
        hint = "streamshard.open reads its parts one by one"
        if is_pipe and not opened.checkpoint.layout.stage:
            hint = "Its weights are in the layer_*-model_states.pt files, which torch.load reads"
        raise UnsupportedError(f"{error}. {hint}") from error


def _whole_of_parts(laid: WithLayerTensors, parts: ModelInParts) -> DegreeChange:
    note_checksums(laid.source)
    require_different_shards(laid.source, parts)
    made = recut_source(laid, parts, whole_model(parts))
    if not is_pipeline(laid.source.checkpoint):
        return made
    return replace(
        made, source=replace(made.source, checkpoint=as_one_module(made.source.checkpoint))
    )


def _have_equal_parts(one: Checkpoint, other: Checkpoint) -> bool:
    if len(one.model_parts) != len(other.model_parts):
        return False
    are_pipelines = [is_pipeline(side) for side in (one, other)]
    if bool(one.layers) != bool(other.layers):
        return False
    if one.is_dumps or other.is_dumps or not any(are_pipelines):
        return True
    masters = [
        {(t.model_part, t.name) for t in side.tensors if t.state == MASTER} for side in (one, other)
    ]
    return all(are_pipelines) and masters[0] == masters[1]


def _spread_experts(opened: Source, degree: int | None, world_size: int) -> DegreeChange | None:
    """Spread the experts of a checkpoint again; None if they are to stay as they are.

    `degree`: count of ranks that will share the experts; by default as many as in the source, which
    is 1 without experts.
    `world_size`: count of all ranks of the job that resumes.
    """
    if degree is None:
        return None
    with of_file(opened.path):
        if is_own_degree(opened.checkpoint, degree):
            return None
        parts = len(opened.checkpoint.model_parts)
        if degree > 0 and world_size % (degree * parts):
            asked, spread = Option("world_size", world_size), Option("expert_parallel")
            message = f"{asked}: the experts are to be spread over {counted(degree, 'rank')}"
            beside = f" of each of {parts} tensor parallel parts" if parts > 1 else ""
            few = ", ".join(str(degree * parts * k) for k in (1, 2, 3))
            message = f"{message} ({spread}){beside}: give a multiple of"
            raise UsageError(f"{message} {degree * parts} ({few}, …)")
        checkpoint = with_expert_degree(opened.checkpoint, degree, opened.like)
    note = spread_note(expert_degree(opened.checkpoint), degree, opened.like)
    checkpoint = replace(checkpoint, notes=(*checkpoint.notes, Note(note)))
    return DegreeChange(
        source=replace(opened, checkpoint=checkpoint),
        original=opened,
        options={"expert_parallel": str(checkpoint.expert_parallel)},
    )


class _ModelParallelism(OtherDegrees):
    def change(self, source: Source, wanted: JobDegrees) -> DegreeChange | None:
        made = at_degrees(source, wanted)
        return made or _spread_experts(source, wanted.expert_parallel, wanted.world_size)

    def join(self, source: Source) -> DegreeChange | None:
        return whole(source, read_rules(source.facts.cut_rules))

    def join_unequal(
        self, one: Source, other: Source
    ) -> tuple[Source, Source, Sequence[DegreeChange]]:
        if _have_equal_parts(one.checkpoint, other.checkpoint):
            return one, other, []
        found = [self.join(side) for side in (one, other)]
        left, right = (
            side if joined is None else joined.source
            for joined, side in zip(found, (one, other), strict=True)
        )
        return left, right, [joined for joined in found if joined is not None]

    def tells_cut(self, source: Source) -> bool:
        return tells_cut(source)


OTHER_DEGREES: Final = _ModelParallelism()
