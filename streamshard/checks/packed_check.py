"""Checks what the file of a packed store holds next to the store's files, and what the zip records.

That is headers, padding and descriptors: zip readers differ in which of these they go by.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from streamshard.checks.problems import DAMAGED, Findings
from streamshard.checksums import crc32, join_crc32
from streamshard.errors import SourceError
from streamshard.formats.torch.zip_directory import ZipEntry
from streamshard.formats.zarr.packed_directory import OURS, PackedDirectory, PackedEntry
from streamshard.formats.zarr.packed_place import directory_of, is_packed
from streamshard.formats.zarr.store_index import MANIFEST_FILES, StoreIndex
from streamshard.io.entries import open_readable, read_all
from streamshard.io.readable import OpenedFile
from streamshard.model import BlockDigests

_LAST_BYTES: Final = 4


def has_directory(root: Path, findings: Findings) -> bool:
    """Tell whether the files of a store can be found; if not, the reason is added."""
    try:
        if is_packed(root):
            directory_of(root)
    except SourceError as error:
        findings.add_error(error, root)
        return False
    return True


def check_packed(index: StoreIndex, findings: Findings) -> None:
    """Compare what the zip says of each file with its header and with the store's manifest."""
    if not is_packed(index.root):
        return
    for entry, last, problem in audit(directory_of(index.root)):
        path = entry.name.decode()
        place = index.root / path
        if not problem and (wanted := _crc32(index, path, last)) not in (entry.crc32, None):
            problem = f"the zip records the CRC-32 {entry.crc32:08x}, and {wanted:08x} was written"
        if problem:
            findings.add(DAMAGED, place, f"{place}: {problem}")


def audit(directory: PackedDirectory) -> Iterator[tuple[ZipEntry, bytes, str]]:
    """Yield each file's entry, its last bytes (a chunk's checksum), and what is wrong around it."""
    rows = range(directory.count)
    ends = {directory.entry_of(row)[0].unrepeated for row in (*rows[:1], *rows[-1:])}
    with open_readable(directory.archive) as file:
        for row in rows:
            yield _checked(directory, row, file, is_ours=OURS in ends)


def _checked(
    directory: PackedDirectory, row: int, file: OpenedFile, *, is_ours: bool
) -> tuple[ZipEntry, bytes, str]:
    """Check one file's headers: of a zip of ours to the bit, of others what readers go by."""
    entry, stop = directory.entry_of(row)
    own = PackedEntry(entry.name.decode(), entry.header, entry.nbytes)
    start, problem = own.content, "what the zip holds around it is not as it was written"
    try:
        if not is_ours:
            start = directory.header_of(row, file).start
        elif (
            own.end != stop
            or directory.serialized(entry) != own.central(entry.crc32)
            or file.read_at(entry.header, start - entry.header) != own.header()
        ):
            return entry, b"", problem
    except SourceError as error:
        return entry, b"", str(error.args[0])
    end = start + entry.nbytes
    first = max(start, end - _LAST_BYTES)
    tail = file.read_at(first, stop - first)
    is_as_written = not is_ours or tail[end - first :] == own.descriptor(entry.crc32)
    return entry, tail[: end - first], "" if is_as_written else problem


def _crc32(index: StoreIndex, path: str, last: bytes) -> int | None:
    """Return the CRC-32 of a file as it was written; None if it is not known."""
    if path in MANIFEST_FILES:
        return crc32(read_all(index.root / path))
    number = index.numbers.get(path)
    record = index.manifest.records.get(path) if index.manifest else None
    if record is None or number is None:
        return None
    digests, found = index.files[number].decoder, 0
    if not isinstance(digests, BlockDigests):
        return int(record.crc32s[0]) if len(record.crc32s) == 1 else None
    for block, checksum in enumerate(digests.crc32s.tolist()):
        left = digests.nbytes - block * digests.block_bytes
        found = join_crc32(found, checksum, min(digests.block_bytes, left))
    return crc32(last, found)
