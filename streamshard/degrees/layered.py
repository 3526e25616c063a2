"""Reads the files of a pipeline's layers, or of experts, where their tensors are needed one by one.

A store cuts such a file into chunks at multiples of 64 bytes, to which torch aligns tensors. So no
element lies in two chunks, and a tensor in a file is cut as regularly as the file is.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from streamshard.compare.comparison import Pair, SideElements
from streamshard.errors import Option, UnsupportedError
from streamshard.formats.deepspeed.model_parallel.expert_files import with_expert_files
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import is_pipeline
from streamshard.formats.deepspeed.model_parallel.pipeline_layers import (
    LayerCopy,
    TensorInFile,
    with_layers,
)
from streamshard.formats.pickle.inert import show
from streamshard.io.entries import open_readable
from streamshard.io.readable import Readable
from streamshard.layout.cutting import Cutting
from streamshard.model import ITEMSIZE, MODULE, LogicalTensor, SourceFile
from streamshard.source.source import Source
from streamshard.source.source_access import SourceAccess, TensorBytes


@dataclass(frozen=True, slots=True)
class WithLayerTensors:
    """A source; it may have the tensors in the files of a pipeline's layers, or of experts."""

    source: Source
    copies: Sequence[LayerCopy] = ()
    """What these files must have in common with other places."""


def layered(opened: Source) -> WithLayerTensors:
    """Add the tensors of a pipeline's layers, or of experts, to its checkpoint."""
    if opened.checkpoint.layers:
        return WithLayerTensors(opened)
    read = with_layers if is_pipeline(opened.checkpoint) else with_expert_files
    with closing(_KeptFiles(opened)) as kept:
        checkpoint, parts, copies = read(opened.checkpoint, kept)
    cutting = _with_parts(opened, parts)
    return WithLayerTensors(replace(opened, checkpoint=checkpoint, cutting=cutting), copies)


def with_layer_pairs(opened: Source) -> tuple[Source, Sequence[Pair]]:
    """Add the tensors of a pipeline's layers, or of experts, and pair copies among them."""
    laid = layered(opened)
    return laid.source, [*map(pair_of_copy, laid.copies)]


def pair_of_copy(copy: LayerCopy) -> Pair:
    """Pair a tensor of a layer's file with what it must be equal to."""
    left, right = SideElements(copy.row, copy.dtype), SideElements(copy.like, copy.like_dtype)
    size = ITEMSIZE[copy.dtype]
    tensor = LogicalTensor(MODULE, copy.name, copy.dtype, (copy.numel,))
    return Pair(f"{MODULE} of {copy.name}", left, right, copy.numel, copy.dtype, size, tensor)


def _with_parts(source: Source, parts: Sequence[TensorInFile]) -> Cutting:
    rows = [(part.file, part.offset, part.numel, ITEMSIZE[part.dtype]) for part in parts]
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    divided = np.flatnonzero(source.cutting.is_divided(*columns))
    if len(divided):
        file = source.checkpoint.tensors[parts[divided[0]].file]
        message = f"{source.path}: an element of a tensor in {show(file.name)} lies in two chunks:"
        raise UnsupportedError(
            f"{message} the file is not of torch's present format, or another tool rewrote it. "
            f"Store it in one chunk ({Option('chunk_size', file.nbytes)}), or in multiples of 64 "
            "bytes"
        )
    return source.cutting.with_parts(*columns)


class _KeptFiles:
    """The files next to the shards of a source, whose own files they are unless it is a store."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._access = SourceAccess(source)

    def path(self, file: int) -> Path:
        if self._source.kind.is_store:
            return self._source.path / self._source.checkpoint.tensors[file].name
        return self._own(file).path

    def open(self, file: int) -> AbstractContextManager[Readable]:
        if self._source.kind.is_store:
            return nullcontext(TensorBytes(self._source, self._access, file))
        return open_readable(self._own(file).path)

    def close(self) -> None:
        self._access.close()

    def _own(self, file: int) -> SourceFile:
        cutting = self._source.cutting
        return self._source.files[int(cutting.file[cutting.first_piece[file]])]
