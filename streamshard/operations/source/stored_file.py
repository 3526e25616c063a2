"""Reads the files that a source keeps as tensors of bytes, whatever these are cut into."""

from collections.abc import Sequence

from streamshard.engine.run.source_reader import SourceReader
from streamshard.operations.source.source import Source


class StoredFile:
    """The bytes of a file that a store keeps."""

    takes_requests = False

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
        copies = self._source.region(self._tensor, offset, stop).copies
        data = bytearray(max(stop - offset, 0))
        rows = zip(copies.file, copies.source, copies.target, copies.nbytes, strict=True)
        for file, start, target, nbytes in rows:
            view = memoryview(data)[target : target + nbytes]
            self._reader.read_into(int(file), int(start), view)
        return bytes(data)
