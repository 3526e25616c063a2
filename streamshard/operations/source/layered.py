"""Reads the files of a pipeline's layers, where their tensors are needed one by one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from streamshard.errors import UnsupportedError
from streamshard.formats.checkpoint import Reading
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import degrees_of
from streamshard.formats.deepspeed.model_parallel.pipeline_layers import LayerCopy, with_layers
from streamshard.operations.source.source import Source


@dataclass(frozen=True, slots=True)
class Layered:
    """A source; that of a pipeline may have the tensors of its layers."""

    source: Source
    copies: Sequence[LayerCopy] = ()
    """What the layers' files must have in common with other places."""


def layered(opened: Source) -> Layered:
    """Add the tensors of a pipeline's layers to its checkpoint.

    Raises
    ------
    UnsupportedError
        It is a store, which holds these files as they are.
    SourceError
        A file is missing, or is not the one that the stages' files list; the message names it.
    """
    if opened.kind != "native" and not opened.checkpoint.layers:
        message = f"{opened.path}: a store of the files of a pipeline's layers"
        message = f"{message} ({degrees_of(opened.checkpoint)}), whose tensors are not read in it"
        hint = "'streamshard repartition' writes such files from it, of which this can be made"
        if opened.checkpoint.dropped is not None:
            hint = "it holds weights only, of which streamshard.open reads the parts one by one"
        raise UnsupportedError(f"{message}; {hint}")
    added = with_layers(Reading(opened.checkpoint, opened.cutting, opened.files))
    held = added.reading
    return Layered(replace(opened, checkpoint=held.checkpoint, cutting=held.cutting), added.copies)
