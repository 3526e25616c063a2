"""Spreads the experts of a source over another count of ranks."""

from dataclasses import replace

from streamshard.errors import Option, UnsupportedError, UsageError
from streamshard.formats.deepspeed.model_parallel.expert_degree import (
    expert_degree,
    is_own_degree,
    spread_note,
    with_expert_degree,
)
from streamshard.formats.deepspeed.model_parallel.expert_groups import AS_SAVED
from streamshard.formats.pickle.node_checks import of_file
from streamshard.model import Note
from streamshard.operations.source.degree_change import DegreeChange
from streamshard.operations.source.source import Source


def spread_experts(opened: Source, degree: int | None, world_size: int) -> DegreeChange | None:
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
        if opened.is_elastic:
            message = "its experts cannot be spread over another count of ranks: it was saved with"
            raise UnsupportedError(f"{message} elastic_checkpoint. {AS_SAVED}")
        parts = len(opened.checkpoint.model_parts)
        if degree > 0 and world_size % (degree * parts):
            asked, spread = Option("world_size", world_size), Option("expert_parallel")
            message = f"{asked}: the experts are to be spread over {degree} ranks"
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
