"""Fills checksums into the endings of a file, once all of its spans are done."""

from collections.abc import Iterator

from streamshard.checksums import join_crc32
from streamshard.engine.run.work import Ending, SpanResult, TargetFile
from streamshard.model import Digest


class FileEndings:
    """The endings of one file; collects the CRC-32s of its regions, in any order."""

    def __init__(self, file: TargetFile) -> None:
        self._endings = file.endings
        self._found: dict[int, Digest] = {}
        """Byte offset of a region's content → its digest."""

    def add(self, result: SpanResult) -> None:
        """Add the regions of a span that is done."""
        if self._endings:
            found = (region for region in result.regions if region.content.nbytes)
            self._found.update((region.offset, region.content) for region in found)

    def all(self) -> Iterator[tuple[int, bytes]]:
        """Yield the byte offset and the bytes of each ending."""
        for ending in self._endings:
            yield ending.offset, self.serialize(ending)

    def serialize(self, ending: Ending) -> bytes:
        """Return the bytes of an ending whose regions were all added."""
        data = bytearray(ending.data)
        for place, start, stop in ending.crc32s:
            data[place : place + 4] = self._crc32(start, stop).to_bytes(4, "little")
        return bytes(data)

    def _crc32(self, start: int, stop: int) -> int:
        crc32 = 0
        while start < stop:
            piece = self._found[start]
            crc32, start = join_crc32(crc32, piece.crc32, piece.nbytes), start + piece.nbytes
        return crc32
