"""Writes a store in one file from files that exist, one after another."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from streamshard.engine.numeric.checksums import crc32
from streamshard.errors import CorruptFileError
from streamshard.formats.torch.zip_layout import end_records
from streamshard.formats.zarr.packed_layout import PackedEntry
from streamshard.io.changes import open_sink
from streamshard.io.entries import ahead_of, open_readable

_PIECE_BYTES: Final = 1 << 20


class PackedCopy:
    """The one file, which must not exist yet; it is no store before it is finished.

    `nbytes`: its size at most.
    `advance`: told of bytes that are copied.
    """

    def __init__(self, target: Path, nbytes: int, advance: Callable[[int], None]) -> None:
        self._sink = open_sink(target, is_new=True, nbytes=nbytes, is_last=True)
        self._advance = advance
        self._central: list[bytes] = []
        self._end = 0

    def copy(self, path: str, known: Path) -> None:
        """Add a file that is a copy of a known file."""
        piece = memoryview(bytearray(_PIECE_BYTES))
        with open_readable(known) as file:
            entry, offset, found = PackedEntry(path, self._end, file.nbytes), 0, 0
            self._write(entry.header())
            while count := file.read_into(piece, offset):
                self._write(piece[:count])
                offset, found = offset + count, crc32(piece[:count], found)
                self._advance(count)
                if file.takes_requests:
                    file.will_need(offset, ahead_of([known]).ahead)
        self._close_entry(entry, found)

    def write(self, path: str, data: bytes) -> None:
        """Add a small file."""
        entry = PackedEntry(path, self._end, len(data))
        self._write(entry.header() + data)
        self._close_entry(entry, crc32(data))

    def _close_entry(self, entry: PackedEntry, found: int) -> None:
        self._write(entry.descriptor(found))
        self._central.append(entry.central(found))
        if self._end != entry.end:
            raise CorruptFileError("changed its size while it was copied", path=Path(entry.path))

    def _write(self, data: bytes | memoryview) -> None:
        """Write what comes next: an object is uploaded from its beginning to its end."""
        self._sink.write(memoryview(data), self._end)
        self._end += len(data)

    def finish(self) -> None:
        """Write the zip's directory, and complete the file."""
        directory = b"".join(self._central)
        self._write(directory + end_records(len(self._central), len(directory), self._end))
        self._sink.finish(None)

    def close(self) -> None:
        """Close the file; an object that is not finished is given up."""
        self._sink.close()
