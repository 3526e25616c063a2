"""Writes a store in one file from files that exist, one after another."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from streamshard.engine.numeric.checksums import crc32
from streamshard.formats.torch.zip_layout import end_records
from streamshard.formats.zarr.packed_layout import PackedEntry
from streamshard.io.changes import open_sink
from streamshard.io.entries import open_readable

_PIECE_BYTES: Final = 1 << 20


class PackedCopy:
    """The one file, which must not exist yet; it is no store before it is finished.

    `advance`: told of bytes that are copied.
    """

    def __init__(self, target: Path, advance: Callable[[int], None]) -> None:
        self._sink = open_sink(target, is_new=True, nbytes=0)
        self._advance = advance
        self._central: list[bytes] = []
        self._end = 0

    def copy(self, path: str, known: Path) -> None:
        """Add a file that is a copy of a known file."""
        piece = memoryview(bytearray(_PIECE_BYTES))
        with open_readable(known) as file:
            entry, offset, found = PackedEntry(path, self._end, file.nbytes), 0, 0
            while count := file.read_into(piece, offset):
                self._sink.write(piece[:count], entry.content + offset)
                offset, found = offset + count, crc32(piece[:count], found)
                self._advance(count)
        self._add(entry, found)

    def write(self, path: str, data: bytes) -> None:
        """Add a small file."""
        entry = PackedEntry(path, self._end, len(data))
        self._sink.write(memoryview(data), entry.content)
        self._add(entry, crc32(data))

    def _add(self, entry: PackedEntry, found: int) -> None:
        self._sink.write(memoryview(entry.header()), entry.start)
        descriptor = entry.descriptor(found)
        self._sink.write(memoryview(descriptor), entry.end - len(descriptor))
        self._central.append(entry.central(found))
        self._end = entry.end

    def finish(self) -> None:
        """Write the zip's directory."""
        directory = b"".join(self._central)
        end = end_records(len(self._central), len(directory), self._end)
        self._sink.write(memoryview(directory + end), self._end)

    def close(self) -> None:
        """Close the file."""
        self._sink.close()
