"""Lays out the zip that torch.save writes, before a byte of it is written.

The layout is that of `PyTorchStreamWriter` (torch 2.13): record data aligned to 64 bytes by an
`FB` extra field, CRC and sizes in a data descriptor after the data, Zip64 fields only where a
number needs them, a Zip64 end record always. `tests/formats/test_torch_file.py` compares our files
with torch's, byte by byte.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from streamshard.formats.pickle import inert_dump
from streamshard.formats.pickle.inert import Node
from streamshard.formats.torch.torch_tensor import Storage, storage_id
from streamshard.model import Literal

PICKLE: Final = "data.pkl"
"""Record that holds the object."""
ALIGNMENT: Final = 64
LIMIT_32: Final = 0xFFFFFFFF
LOCAL: Final = struct.Struct("<IHHHHHIIIHH")
"""Header in front of a record."""
CENTRAL: Final = struct.Struct("<IHHHHHHIIIHHHHHII")
"""Entry of the directory."""
END_64: Final = struct.Struct("<IQHHIIQQQQ")
LOCATOR_64: Final = struct.Struct("<IIQI")
END: Final = struct.Struct("<IHHHHIIH")
CRC32_IN_ENTRY: Final = 16
"""Offset of the checksum in an entry of the directory."""
_FLAGS: Final = 0x0808
"""UTF-8 name; CRC and sizes follow the data."""
_FLAGS_EMPTY: Final = 0x0800


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
        return self.nbytes >= LIMIT_32 or self.start >= LIMIT_32

    def zip64(self) -> bytes:
        """Serialize the extra field for the numbers that 32 bits cannot hold."""
        numbers = [self.nbytes, self.nbytes] if self.nbytes >= LIMIT_32 else []
        numbers += [self.start] if self.start >= LIMIT_32 else []
        return struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""

    @property
    def data_start(self) -> int:
        """Byte offset of the data, which is aligned."""
        bare = self.start + LOCAL.size + len(self.name.encode()) + len(self.zip64()) + 4
        return bare + -bare % ALIGNMENT

    def header(self) -> bytes:
        """Serialize the local header with the padding that aligns the data."""
        name, extra = self.name.encode(), self.zip64()
        gap = self.data_start - (self.start + LOCAL.size + len(name) + len(extra) + 4)
        extra += struct.pack("<2sH", b"FB", gap) + b"Z" * gap
        flags = _FLAGS if self.nbytes else _FLAGS_EMPTY
        numbers = (0x04034B50, 0, flags, 0, 0, 0, 0, 0, 0, len(name), len(extra))
        return LOCAL.pack(*numbers) + name + extra

    def descriptor(self, crc32: int) -> bytes:
        """Serialize the descriptor that follows the data. Empty records have none."""
        if not self.nbytes:
            return b""
        form = "<IIQQ" if self.is_large else "<IIII"
        return struct.pack(form, 0x08074B50, crc32, self.nbytes, self.nbytes)

    def central(self, crc32: int) -> bytes:
        """Serialize the record's entry in the central directory."""
        name, extra = self.name.encode(), self.zip64()
        size, start = min(self.nbytes, LIMIT_32), min(self.start, LIMIT_32)
        flags = _FLAGS if self.nbytes else _FLAGS_EMPTY
        numbers = (crc32, size, size, len(name), len(extra), 0, 0, 0, 0, start)
        return CENTRAL.pack(0x02014B50, 0, 0, flags, 0, 0, 0, *numbers) + name + extra

    @property
    def end(self) -> int:
        """Byte offset just after the descriptor."""
        return self.data_start + self.nbytes + len(self.descriptor(0))


@dataclass(frozen=True, slots=True)
class TorchLayout:
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
        both = zip(self.records, crc32s, strict=True)
        return directory_of([record.central(crc) for record, crc in both], self.records[-1].end)


def directory_of(entries: Sequence[bytes], start: int) -> bytes:
    """Serialize the directory, which begins at `start`, and what follows it, of these entries."""
    central = b"".join(entries)
    count, nbytes = len(entries), len(central)
    end_64 = END_64.pack(0x06064B50, 44, 0x031E, 45, 0, 0, count, count, nbytes, start)
    locator = LOCATOR_64.pack(0x07064B50, 0, start + nbytes, 1)
    small, size, at = min(count, 0xFFFF), min(nbytes, LIMIT_32), min(start, LIMIT_32)
    return central + end_64 + locator + END.pack(0x06054B50, 0, 0, small, small, size, at, 0)


@dataclass(frozen=True, slots=True)
class Serialized:
    """An object as torch.save pickles it, and the storages that it refers to by their numbers."""

    pickled: bytes
    storages: Sequence[Storage]


@dataclass(frozen=True, slots=True)
class FileImage:
    """A torch file to be written."""

    path: str
    """Relative to the run directory."""
    serialized: Callable[[], Serialized]
    """Serializes the object in it, or returns one that differs only in what fills its storages."""
    rank: int | None = None
    """Rank whose shares fill storages that do not say it."""
    alike: str = ""
    """The same for files that are laid out alike; empty if that is not known of any other."""


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
