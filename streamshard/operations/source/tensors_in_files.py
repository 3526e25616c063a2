"""Places tensors that lie in files which a source keeps as tensors of bytes.

A store cuts such a file into chunks, without regard to what is in it. So a tensor in the file may
lie in several chunks, and the border of two chunks may be inside of an element. Such an element is
a *seam*: a piece of its own, whose bytes are read from both chunks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from streamshard.formats.deepspeed.model_parallel.pipeline_layers import TensorInFile
from streamshard.formats.zarr.store_manifest import BLOCK_BYTES
from streamshard.layout.boxes import grid_of
from streamshard.layout.cutting import Cutting, CuttingBuilder
from streamshard.model import ITEMSIZE, Copies, Joined, Slot
from streamshard.operations.source.source import Source


@dataclass(frozen=True, slots=True)
class _RunInFile:
    """Consecutive elements of a tensor that lie in one file."""

    numel: int
    file: int
    offset: int


Range = tuple[int, int, int]
"""(file, byte offset, count of bytes)."""


def with_parts(source: Source, parts: Sequence[TensorInFile]) -> Source:
    """Add tensors that are parts of kept files behind the rows of a source's cutting."""
    placing = _PlacesInFiles(source)
    pieces = [placing.pieces(part) for part in parts]
    itemsizes = [ITEMSIZE[part.dtype] for part in parts]
    rows = [
        (piece.file, piece.offset, piece.numel, itemsize)
        for each, itemsize in zip(pieces, itemsizes, strict=True)
        for piece in each
    ]
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4)
    cutting = source.cutting.append(Cutting.of_files(*columns.T), columns[:, 2])
    if any(len(each) > 1 for each in pieces):
        known = [tensor.numel for tensor in source.checkpoint.tensors]
        cutting = _joined(cutting, known, pieces, itemsizes)
    return placing.result(cutting)


class _PlacesInFiles:
    """Finds the pieces of tensors, and numbers seams as files behind those of a source."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._files = list(source.files)

    def pieces(self, part: TensorInFile) -> list[_RunInFile]:
        """Return the pieces of a tensor, in order; at least one."""
        itemsize = ITEMSIZE[part.dtype]
        stop = part.offset + part.numel * itemsize
        copies = self._source.region(part.file, part.offset, stop).copies
        found = [self._piece(ranges, itemsize) for ranges in _whole_elements(copies, itemsize)]
        return found or [_RunInFile(0, 0, 0)]

    def _piece(self, ranges: Sequence[Range], itemsize: int) -> _RunInFile:
        if len(ranges) == 1:
            file, offset, nbytes = ranges[0]
            return _RunInFile(nbytes // itemsize, file, offset)
        files = self._source.files
        joined = Joined(tuple((files[file], offset, nbytes) for file, offset, nbytes in ranges))
        self._files.append(replace(files[ranges[0][0]], decoder=joined))
        return _RunInFile(1, len(self._files) - 1, 0)

    def result(self, cutting: Cutting) -> Source:
        """Return the source with the seams, and with another cutting."""
        source, codec_bytes = self._source, self._source.codec_bytes
        if len(self._files) > len(source.files):
            # A seam has a reader of its own, beside the one that keeps the last chunk.
            codec_bytes = 2 * codec_bytes + BLOCK_BYTES
        return replace(
            source,
            cutting=cutting,
            files=tuple(self._files),
            codec_bytes=codec_bytes,
        )


def _whole_elements(copies: Copies, itemsize: int) -> Iterator[list[Range]]:
    """Divide ranges of files that follow each other into whole elements.

    Yields
    ------
    list
        One range of several elements, or the ranges of one.
    """
    begun: list[Range] = []
    held = 0
    columns = copies.file.tolist(), copies.source.tolist(), copies.nbytes.tolist()
    for file, offset, nbytes in zip(*columns, strict=True):
        taken = min(itemsize - held, nbytes) if begun else 0
        if taken:
            begun.append((file, offset, taken))
            held += taken
        if held == itemsize:
            yield begun
            begun, held = [], 0
        rest = (nbytes - taken) % itemsize
        if nbytes - taken > rest:
            yield [(file, offset + taken, nbytes - taken - rest)]
        if rest:
            begun, held = [(file, offset + nbytes - rest, rest)], rest


def _joined(
    cutting: Cutting,
    known: Sequence[int],
    pieces: Sequence[Sequence[_RunInFile]],
    itemsizes: Sequence[int],
) -> Cutting:
    """Return a cutting of tensors that lie in rows of another: one each, then several each.

    Parameters
    ----------
    known
        Counts of elements of the tensors that lie in one row each.
    pieces, itemsizes
        Of the tensors behind them, whose pieces are the further rows.
    """
    builder = CuttingBuilder([*cutting.itemsize[: len(known)].tolist(), *itemsizes])
    rows = np.arange(len(cutting.itemsize), dtype=np.int64)
    first = builder.slot(Slot(rows, np.zeros_like(rows), np.zeros_like(rows)))
    for number, numel in enumerate(known):
        builder.place(number, first + number, piece_numel=numel)
    at = first + len(known)
    for number, each in enumerate(pieces, start=len(known)):
        sizes = np.array([[piece.numel] for piece in each], dtype=np.int64)
        numel = int(sizes.sum())
        if len(each) == 1:
            builder.place(number, at, piece_numel=numel)
        else:
            builder.place_boxes(number, at, grid_of((numel,), np.cumsum(sizes, 0) - sizes, sizes))
        at += len(each)
    return builder.build(cutting)
