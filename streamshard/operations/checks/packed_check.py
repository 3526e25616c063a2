"""Checks the zip that a packed store is, whatever its files hold."""

from pathlib import Path

from streamshard.engine.numeric.checksums import crc32, join_crc32
from streamshard.errors import SourceError
from streamshard.formats.zarr.packed_audit import AuditedEntry, audit
from streamshard.formats.zarr.packed_place import directory_of, is_packed
from streamshard.formats.zarr.store_index import MANIFEST_FILES, StoreIndex
from streamshard.io.entries import read_all
from streamshard.model import BlockDigests
from streamshard.operations.checks.problems import DAMAGED, Findings


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
    for entry in audit(directory_of(index.root)):
        place = index.root / entry.path
        problem = entry.problem
        if not problem and (wanted := _crc32(index, entry, place)) not in (entry.crc32, None):
            problem = f"the zip records the CRC-32 {entry.crc32:08x}, and {wanted:08x} was written"
        if problem:
            findings.add(DAMAGED, place, f"{place}: {problem}")


def _crc32(index: StoreIndex, entry: AuditedEntry, place: Path) -> int | None:
    """Return the CRC-32 of a file as it was written; None if it is not known."""
    if entry.path in MANIFEST_FILES:
        return crc32(read_all(place))
    number = index.numbers.get(entry.path)
    record = index.manifest.records.get(entry.path) if index.manifest else None
    if record is None or number is None:
        return None
    digests, found = index.files[number].decoder, 0
    if not isinstance(digests, BlockDigests):
        return int(record.crc32s[0]) if len(record.crc32s) == 1 else None
    for block, checksum in enumerate(digests.crc32s.tolist()):
        left = digests.nbytes - block * digests.block_bytes
        found = join_crc32(found, checksum, min(digests.block_bytes, left))
    return crc32(entry.last, found)
