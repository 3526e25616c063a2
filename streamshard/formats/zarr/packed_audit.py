"""Checks what a packed store's file holds next to the store's files: headers, padding, descriptors.

Zip readers differ in which of these they go by. What the store's files hold is checked elsewhere.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from streamshard.errors import SourceError
from streamshard.formats.torch.zip_directory import LocalHeader, ZipEntry, descriptors
from streamshard.formats.zarr.packed_directory import PackedDirectory
from streamshard.formats.zarr.packed_layout import OURS
from streamshard.io.entries import open_readable

_PADDING: Final = 0x4246
_LAST_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class AuditedEntry:
    """A file of a packed store, without its content."""

    path: str
    crc32: int
    """Of the content, as the zip records it."""
    last: bytes
    """The last bytes of the content: the checksum of a chunk."""
    problem: str
    """What is wrong with what is around the content; empty if nothing is."""


def audit(directory: PackedDirectory) -> Iterator[AuditedEntry]:
    """Yield what is known of each file from what is around its content."""
    rows = range(directory.count)
    ends = {directory.entry_of(row)[0].unrepeated for row in (*rows[:1], *rows[-1:])}
    is_ours = OURS in ends
    with open_readable(directory.archive) as file:
        for row in rows:
            entry, stop = directory.entry_of(row)
            path, last, problem = entry.name.decode(), b"", ""
            try:
                header = directory.header_of(row, file)
            except SourceError as error:
                problem = str(error.args[0])
            else:
                end = header.start + entry.nbytes
                first = max(header.start, end - _LAST_BYTES)
                found = file.read_at(first, stop - first)
                last, after = found[: end - first], found[end - first :]
                problem = _problem(entry, header, after)
            if is_ours and entry.unrepeated != OURS:
                problem = "the zip's directory tells other attributes of it than were written"
            yield AuditedEntry(path, entry.crc32, last, problem)


def _problem(entry: ZipEntry, header: LocalHeader, after: bytes) -> str:
    if header.common != entry.common:
        return "its header and the zip's directory disagree"
    if not _is_padded(header.extra):
        return "what pads its header is not as it was written"
    return "" if after in descriptors(entry) else "what follows it is not what belongs there"


def _is_padded(extra: bytes) -> bool:
    """Tell whether extra fields fill their place, and padding among them holds nothing."""
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, at)
        held = extra[at + 4 : at + 4 + nbytes]
        at += 4 + nbytes
        if at > len(extra) or (kind == _PADDING and held != bytes(nbytes)):
            return False
    return at == len(extra)
