"""Reads torch.save's container, a zip of stored records, as extents; `zip_layout` writes it."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from streamshard.errors import CorruptFileError, UnsupportedError
from streamshard.formats.pickle import inert_load
from streamshard.formats.pickle.inert import LIMIT_BYTES, Node, show
from streamshard.formats.pickle.inert_load import EndedTooEarlyError
from streamshard.formats.pickle.node_checks import of_file
from streamshard.formats.torch import zip_directory
from streamshard.formats.torch.torch_tensor import Storage, storage_from_id
from streamshard.formats.torch.zip_directory import ZipRecord
from streamshard.formats.torch.zip_layout import PICKLE
from streamshard.io.entries import open_readable
from streamshard.io.readable import Readable
from streamshard.model import ITEMSIZE, RecordCrcs

LACKS_CHECKSUMS: Final = (
    "its writer left the checksums of tensor data out, which can therefore not be checked."
)
LOOKED_INTO: Final = frozenset({PICKLE, "byteorder"})
"""Records whose content is read. Of other records only the place and the size are used."""
_KNOWN: Final = LOOKED_INTO | {
    "version", ".format_version", ".storage_alignment", ".data/serialization_id"
}  # fmt: skip
"""Records that torch writes in addition to the storages."""
_PIECE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class TorchFile:
    """The contents of a file saved by torch: its inert object, and the places of its storages."""

    root: Node
    storages: Mapping[str, Storage]
    records: tuple[ZipRecord, ...] = ()
    """Records of a zip, in file order."""
    unknown: tuple[str, ...] = ()
    """Names of records that torch does not write, or of storages that the object does not use."""

    @property
    def recorded(self) -> RecordCrcs:
        """The checksums of its records."""
        listed = [(record.name.partition("/")[2], record) for record in self.records]
        records = [r for name, r in listed if r.nbytes and r.crc32 and name not in LOOKED_INTO]
        starts = np.array([record.start for record in records], dtype=np.int64)
        nbytes = np.array([record.nbytes for record in records], dtype=np.int64)
        crc32s = np.array([record.crc32 for record in records], dtype=np.uint32)
        names = tuple(record.name.partition("/")[2] for record in records)
        return RecordCrcs(starts, starts + nbytes, crc32s, names)

    @property
    def lacks_checksums(self) -> bool:
        """Whether its writer left the checksums of tensor data out, as torch can be told to."""
        return any(s.nbytes and s.crc32 is None for s in self.storages.values())


def read(path: Path, file: int) -> TorchFile:
    """Open a file saved by torch without reading tensor data or running anything from it.

    `file`: index by which the storages refer to this file.
    """
    with open_readable(path) as source:
        found = read_content(source, path, file)
    for storage in found.storages.values():
        storage.path = path
    return found


def read_content(source: Readable, path: Path, file: int) -> TorchFile:
    """Open a torch file whose bytes may be kept elsewhere; see `read`."""
    with of_file(path):
        try:
            zip_directory.refuse_legacy(source)
            archive = read_archive(source)
        except EndedTooEarlyError as error:
            message = f"not a whole torch file ({error}; {source.nbytes} bytes). Was the save"
            message = f"{message} interrupted? Copy the file again or take an earlier tag"
            raise CorruptFileError(message) from error
    for storage in archive.storages.values():
        storage.file = file
    return archive


def pickled(path: Path, found: TorchFile) -> bytes:
    """Read the pickle of an opened zip: its contents without the storages."""
    record = next(record for record in found.records if record.name.endswith(f"/{PICKLE}"))
    with open_readable(path) as file:
        return file.read_at(record.start, record.nbytes)


def checksum(storage: Storage) -> int:
    """Return the CRC-32 of a source storage: as the file records it, else of the bytes."""
    if storage.crc32 is None:
        if storage.path is None:
            raise CorruptFileError("a storage of no file")
        with open_readable(storage.path) as file:
            storage.crc32 = checksum_in(file, storage, storage.path)
    return storage.crc32


def checksum_in(source: Readable, storage: Storage, path: Path) -> int:
    """Compute the CRC-32 of a storage's bytes in its file, which messages call `path`."""
    crc32, unread = 0, storage.nbytes
    while unread:
        piece = source.read_at(storage.offset + storage.nbytes - unread, min(unread, _PIECE_BYTES))
        if not piece:
            raise CorruptFileError(f"ends {unread} bytes before its last storage", path=path)
        crc32, unread = zlib.crc32(piece, crc32), unread - len(piece)
    return crc32


def read_archive(source: Readable) -> TorchFile:
    """Open a zip that torch saved, which may be a part of another file.

    Offsets of its storages count from its own beginning. See `read` for errors; these do not name
    the file.
    """
    records: dict[str, ZipRecord] = {}
    roots: set[str] = set()
    listed = zip_directory.read(source)
    for name, record in listed.items():
        root, _, path = name.partition("/")
        roots.add(root)
        records[path] = record
    if PICKLE not in records or len(roots) > 1:
        raise CorruptFileError("a zip file, but not one that torch.save wrote")
    if "constants.pkl" in records:
        raise UnsupportedError("a TorchScript program, not a checkpoint")
    if "byteorder" in records and _content(source, records["byteorder"]) != b"little":
        raise UnsupportedError("written on a big-endian machine")
    storages: dict[str, Storage] = {}

    def persistent_load(identifier: Node) -> Storage:
        storage, key = storage_from_id(identifier)
        if key in storages:
            return storages[key].require_like(storage, key)
        record = records.get(f"data/{key}")
        have = -1 if record is None else record.nbytes
        # If a storage's size is not a multiple of the element size, only whole elements count.
        if record is None or not 0 <= have - storage.nbytes < ITEMSIZE[storage.dtype]:
            what = "no record" if record is None else f"{have} bytes"
            message = f"storage {show(key)} of {storage.nbytes} bytes has {what} in the file"
            raise CorruptFileError(message)
        storage.offset, storage.crc32 = record.start, record.crc32
        storages[key] = storage
        return storage

    pickled = _content(source, records[PICKLE], LIMIT_BYTES)
    root_node = inert_load.load(pickled, persistent_load)
    known = _KNOWN | {f"data/{key}" for key in storages}
    unknown = tuple(sorted(records.keys() - known))
    return TorchFile(root_node, storages, records=tuple(listed.values()), unknown=unknown)


def _content(source: Readable, record: ZipRecord, limit: int = 64) -> bytes:
    if record.nbytes > limit:
        message = f"record {show(record.name)} of {record.nbytes:,} bytes, for at most {limit:,}"
        raise UnsupportedError(message)
    data = source.read_at(record.start, record.nbytes)
    if record.crc32 is not None and zlib.crc32(data) != record.crc32:
        raise CorruptFileError(f"record {show(record.name)} is damaged: its checksum differs")
    return data
