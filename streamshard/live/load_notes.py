"""Tells the user of a job what a load on another number of ranks means for it."""

from streamshard.layout.batch import BatchPlan
from streamshard.live.live_engine import Engine
from streamshard.model import NoteKind
from streamshard.operations.native.resharding import Resharding
from streamshard.operations.native.target_settings import left_out


def notes_of(engine: Engine, resharding: Resharding, *, goes_on: bool) -> tuple[str, ...]:
    """Return what the user has to know or to do; nothing that the running job does already.

    Of the notes of a conversion, those about the files that it writes say nothing here.

    Parameters
    ----------
    goes_on
        Whether the training goes on. Else the weights alone are of interest.
    """
    checkpoint = resharding.source.checkpoint
    mixed = [note.text for note in checkpoint.notes if note.kind is NoteKind.MIXED and goes_on]
    if resharding.has_these_files():
        return tuple(mixed)
    of_content = [note.text for note in checkpoint.notes if note.kind is NoteKind.LEFT_OUT]
    if not goes_on:
        return tuple(of_content)
    job = BatchPlan(
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
    )
    return (
        *mixed,
        *of_content,
        *left_out(checkpoint, resharding.settings.layout.stage),
        *resharding.explain(job).notes,
    )
