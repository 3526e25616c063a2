"""torch.save's container: a zip of stored records, read as extents and laid out before writing.

`legacy_file` reads files of the older format. Files are always written as a zip, which every torch
since 1.6 loads with the same result.

The layout is that of `PyTorchStreamWriter` (torch 2.13): record data aligned to 64 bytes by an
`FB` extra field, CRC and sizes in a data descriptor behind the data, Zip64 fields only where a
number needs them, a Zip64 end record always. `tests/formats/test_torch_file.py` compares our files
with torch's, byte by byte.
"""

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamshard.errors import CorruptFileError, UnsupportedError
from streamshard.formats.pickle import inert_dump, inert_load
from streamshard.formats.pickle.inert import Node, show
from streamshard.formats.pickle.node_checks import of_file
from streamshard.formats.pickle.opcode_arguments import EndedTooEarlyError
from streamshard.formats.torch import legacy_file, zip_directory
from streamshard.formats.torch.torch_tensor import Storage, storage_from_id, storage_id
from streamshard.formats.torch.zip_directory import CRC32_IN_ENTRY, ZipRecord
from streamshard.io.entries import open_readable
from streamshard.io.readable import Readable
from streamshard.model import ITEMSIZE, Literal

PICKLE: Final = "data.pkl"
"""Record that holds the object."""
LOOKED_INTO: Final = frozenset({PICKLE, "byteorder"})
"""Records whose content is read. Of other records only the place and the size are used."""
_KNOWN: Final = LOOKED_INTO | {
    "version", ".format_version", ".storage_alignment", ".data/serialization_id"
}  # fmt: skip
"""Records that torch writes besides the storages."""
_PIECE_BYTES: Final = 1 << 20
ALIGNMENT: Final = 64
_LIMIT_32: Final = 0xFFFFFFFF
_FLAGS: Final = 0x0808
"""UTF-8 name; CRC and sizes follow the data."""
_FLAGS_EMPTY: Final = 0x0800
_LOCAL: Final = struct.Struct("<IHHHHHIIIHH")
_CENTRAL: Final = struct.Struct("<IHHHHHHIIIHHHHHII")
_END_64: Final = struct.Struct("<IQHHIIQQQQ")
_LOCATOR_64: Final = struct.Struct("<IIQI")
_END: Final = struct.Struct("<IHHHHIIH")


@dataclass(frozen=True, slots=True)
class TorchFile:
    """The contents of a file saved by torch: its inert object, and the places of its storages."""

    root: Node
    storages: Mapping[str, Storage]
    is_legacy: bool = False
    """Whether the file has torch's legacy format, older than the zip container."""
    records: tuple[ZipRecord, ...] = ()
    """Records of a zip, in file order."""
    unknown: tuple[str, ...] = ()
    """Names of records that torch does not write, or of storages that the object does not use."""


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
            # As torch does, decide by the first bytes: the end may look like the other format.
            if legacy_file.is_legacy(source.read_at(0, len(zip_directory.MAGIC))):
                found = TorchFile(*legacy_file.read(source), is_legacy=True)
            else:
                found = read_archive(source)
        except EndedTooEarlyError as error:
            message = f"not a whole torch file ({error}; {source.nbytes} bytes). Was the save"
            message = f"{message} interrupted? Copy the file again or take an earlier tag"
            raise CorruptFileError(message) from error
    for storage in found.storages.values():
        storage.file = file
    return found


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
    found, left = 0, storage.nbytes
    while left:
        piece = source.read_at(storage.offset + storage.nbytes - left, min(left, _PIECE_BYTES))
        if not piece:
            raise CorruptFileError(f"ends {left} bytes before its last storage", path=path)
        found, left = zlib.crc32(piece, found), left - len(piece)
    return found


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
            held = "no record" if record is None else f"{have} bytes"
            message = f"storage {show(key)} of {storage.nbytes} bytes has {held} in the file"
            raise CorruptFileError(message)
        storage.offset, storage.crc32 = record.start, record.crc32
        storages[key] = storage
        return storage

    pickled = _content(source, records[PICKLE], inert_load.LIMIT_BYTES)
    root_node = inert_load.load(pickled, persistent_load)
    known = _KNOWN | {f"data/{key}" for key in storages}
    unknown = tuple(sorted(records.keys() - known))
    return TorchFile(root_node, storages, records=tuple(listed.values()), unknown=unknown)


def _content(source: Readable, record: ZipRecord, limit: int = 64) -> bytes:
    """Read a small record whole."""
    if record.nbytes > limit:
        message = f"record {show(record.name)} of {record.nbytes:,} bytes, for at most {limit:,}"
        raise UnsupportedError(message)
    data = source.read_at(record.start, record.nbytes)
    if record.crc32 is not None and zlib.crc32(data) != record.crc32:
        raise CorruptFileError(f"record {show(record.name)} is damaged: its checksum differs")
    return data


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a file to be written: its header, then its data, then its descriptor."""

    name: str
    start: int
    """Byte offset of the local header."""
    nbytes: int
    content: Storage | Literal

    @property
    def is_large(self) -> bool:
        """Whether one of its numbers needs Zip64."""
        return self.nbytes >= _LIMIT_32 or self.start >= _LIMIT_32

    def zip64(self) -> bytes:
        """Serialize the extra field for the numbers that 32 bits cannot hold."""
        numbers = [self.nbytes, self.nbytes] if self.nbytes >= _LIMIT_32 else []
        numbers += [self.start] if self.start >= _LIMIT_32 else []
        return struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""

    @property
    def data_start(self) -> int:
        """Byte offset of the data, which is aligned."""
        bare = self.start + _LOCAL.size + len(self.name.encode()) + len(self.zip64()) + 4
        return bare + -bare % ALIGNMENT

    def header(self) -> bytes:
        """Serialize the local header with the padding that aligns the data."""
        name, extra = self.name.encode(), self.zip64()
        gap = self.data_start - (self.start + _LOCAL.size + len(name) + len(extra) + 4)
        extra += struct.pack("<2sH", b"FB", gap) + b"Z" * gap
        flags = _FLAGS if self.nbytes else _FLAGS_EMPTY
        numbers = (0x04034B50, 0, flags, 0, 0, 0, 0, 0, 0, len(name), len(extra))
        return _LOCAL.pack(*numbers) + name + extra

    def descriptor(self, crc32: int) -> bytes:
        """Serialize the descriptor that follows the data. Empty records have none."""
        if not self.nbytes:
            return b""
        form = "<IIQQ" if self.is_large else "<IIII"
        return struct.pack(form, 0x08074B50, crc32, self.nbytes, self.nbytes)

    def central(self, crc32: int) -> bytes:
        """Serialize the record's entry in the central directory."""
        name, extra = self.name.encode(), self.zip64()
        size, start = min(self.nbytes, _LIMIT_32), min(self.start, _LIMIT_32)
        flags = _FLAGS if self.nbytes else _FLAGS_EMPTY
        numbers = (crc32, size, size, len(name), len(extra), 0, 0, 0, 0, start)
        return _CENTRAL.pack(0x02014B50, 0, 0, flags, 0, 0, 0, *numbers) + name + extra

    @property
    def end(self) -> int:
        """Byte offset just behind the descriptor."""
        return self.data_start + self.nbytes + len(self.descriptor(0))


@dataclass(frozen=True, slots=True)
class TorchLayout:
    """The layout of a file to be written."""

    records: tuple[Record, ...]

    @property
    def nbytes(self) -> int:
        """Size of the whole file, known before a byte of it is written."""
        return self.records[-1].end + len(self.ending([0] * len(self.records)))

    def crc32_places(self) -> Iterator[int]:
        """Yield the place of each record's CRC-32 in the ending."""
        entry = 0
        for record in self.records:
            yield entry + CRC32_IN_ENTRY
            entry += len(record.central(0))

    def ending(self, crc32s: Sequence[int]) -> bytes:
        """Serialize the central directory and the end records, given each record's CRC-32."""
        start = self.records[-1].end
        central = b"".join(
            record.central(crc) for record, crc in zip(self.records, crc32s, strict=True)
        )
        count, size = len(self.records), len(central)
        end_64 = _END_64.pack(0x06064B50, 44, 0x031E, 45, 0, 0, count, count, size, start)
        locator = _LOCATOR_64.pack(0x07064B50, 0, start + size, 1)
        small = min(count, 0xFFFF)
        end = _END.pack(
            0x06054B50, 0, 0, small, small, min(size, _LIMIT_32), min(start, _LIMIT_32), 0
        )
        return central + end_64 + locator + end


@dataclass(frozen=True, slots=True)
class Serialized:
    """An object as torch.save pickles it, and the storages that it refers to by their numbers."""

    pickled: bytes
    storages: Sequence[Storage]


def serialize(root: Node) -> Serialized:
    """Serialize an object as torch.save does."""
    keys: dict[int, str] = {}
    storages: list[Storage] = []

    def persistent_id(node: Node) -> Node | None:
        if not isinstance(node, Storage):
            return None
        if id(node) not in keys:
            keys[id(node)] = str(len(storages))
            storages.append(node)
        return storage_id(node, keys[id(node)])

    return Serialized(inert_dump.dump(root, persistent_id), storages)


def lay_out(serialized: Serialized, stem: str) -> TorchLayout:
    """Lay out the file that torch.save would write for an object, under `stem` as root folder."""
    contents: list[tuple[str, Storage | Literal]] = [
        (PICKLE, Literal(serialized.pickled)),
        (".format_version", Literal(b"1")),
        (".storage_alignment", Literal(str(ALIGNMENT).encode())),
        ("byteorder", Literal(b"little")),
        *((f"data/{key}", storage) for key, storage in enumerate(serialized.storages)),
        ("version", Literal(b"3\n")),
    ]
    records: list[Record] = []
    start = 0
    for name, content in contents:
        nbytes = len(content.data) if isinstance(content, Literal) else content.nbytes
        records.append(Record(f"{stem}/{name}", start, nbytes, content))
        start = records[-1].end
    return TorchLayout(tuple(records))
