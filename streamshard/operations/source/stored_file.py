"""Reads the files that a source keeps as tensors of bytes, whatever these are cut into."""

from collections.abc import Sequence

import numpy as np

from streamshard.engine.run.source_reader import SourceReader
from streamshard.layout.cutting import Segments
from streamshard.operations.source.source import Source


class StoredFile:
    """The bytes of a file that a store keeps."""

    def __init__(self, source: Source, reader: SourceReader, tensor: int) -> None:
        self._source = source
        self._reader = reader
        self._tensor = tensor
        self.nbytes = source.checkpoint.tensors[tensor].nbytes
        """Size in bytes."""

    def prepare(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Do nothing: what is read is a part of a larger piece."""

    def read_at(self, offset: int, count: int) -> bytes:
        """Read bytes from an offset; fewer than `count` only at the end of the file."""
        stop = min(offset + count, self.nbytes)
        one = np.array([self._tensor], dtype=np.int64)
        wanted = Segments(one, np.array([offset]), np.array([stop]), np.zeros_like(one))
        copies = self._source.cutting.locate(wanted, target_itemsize=1)
        data = bytearray(max(stop - offset, 0))
        rows = zip(copies.file, copies.source, copies.target, copies.nbytes, strict=True)
        for file, start, target, nbytes in rows:
            view = memoryview(data)[target : target + nbytes]
            self._reader.read_into(int(file), int(start), view)
        return bytes(data)
