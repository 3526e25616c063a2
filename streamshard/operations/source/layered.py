"""Reads the files of a pipeline's layers, where their tensors are needed one by one."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from streamshard.engine.run.source_reader import SourceReader
from streamshard.formats.deepspeed.model_parallel.pipeline_layers import LayerCopy, with_layers
from streamshard.io.entries import open_readable
from streamshard.io.readable import Readable
from streamshard.model import SourceFile
from streamshard.operations.source.source import Source
from streamshard.operations.source.stored_file import StoredFile
from streamshard.operations.source.tensors_in_files import with_parts


@dataclass(frozen=True, slots=True)
class Layered:
    """A source; that of a pipeline may have the tensors of its layers."""

    source: Source
    copies: Sequence[LayerCopy] = ()
    """What the layers' files must have in common with other places."""


def layered(opened: Source) -> Layered:
    """Add the tensors of a pipeline's layers to its checkpoint."""
    if opened.checkpoint.layers:
        return Layered(opened)
    with closing(_KeptFiles(opened)) as kept:
        added = with_layers(opened.checkpoint, kept)
    placed = with_parts(opened, added.parts)
    return Layered(replace(placed, checkpoint=added.checkpoint), added.copies)


class _KeptFiles:
    """The files beside the shards of a source, whose own files they are unless it is a store."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._reader = SourceReader(source.files)

    def path(self, file: int) -> Path:
        """Return what messages call the file with this number of its logical tensor."""
        if self._source.kind == "native":
            return self._own(file).path
        return self._source.path / self._source.checkpoint.tensors[file].name

    def open(self, file: int) -> AbstractContextManager[Readable]:
        """Open the file with this number."""
        if self._source.kind == "native":
            return open_readable(self._own(file).path)
        return nullcontext(StoredFile(self._source, self._reader, file))

    def close(self) -> None:
        """Close what was opened to read chunks."""
        self._reader.close()

    def _own(self, file: int) -> SourceFile:
        cutting = self._source.cutting
        return self._source.files[int(cutting.file[cutting.first_piece[file]])]
