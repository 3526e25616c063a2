"""The zip that a packed store is: its entries as they are written, its directory as it is read.

A header has the size of its entry, but not the CRC-32, which is known once the content is written:
it follows the content in a descriptor. TensorStore looks for the descriptor by the header's size.

A store may have hundreds of thousands of files: what is known of them is kept in arrays, and read
from the bytes of the zip's directory when it is asked for.
"""

import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from streamshard.errors import CorruptFileError
from streamshard.formats.deepspeed.names import is_inside
from streamshard.formats.pickle.inert import show
from streamshard.formats.pickle.inert_load import EndedTooEarlyError
from streamshard.formats.pickle.node_checks import of_file
from streamshard.formats.torch.zip_directory import (
    LocalHeader,
    ZipDirectory,
    ZipEntry,
    read_header,
    require_repeated,
)
from streamshard.formats.torch.zip_layout import ALIGNMENT, CENTRAL, LIMIT_32, LOCAL
from streamshard.io.entries import open_readable, resolve
from streamshard.io.readable import OpenedFile, Status

_FILE: int = 0o100000
_DIRECTORY: int = 0o040000
_FLAGS: Final = 0x0808
"""UTF-8 name; the CRC-32 follows."""
_VERSION, _VERSION_64 = 20, 45
_DATE: Final = 0x0021
"""The first of January 1980: the earliest, as the bytes do not depend on the time."""
OURS: Final = (_VERSION_64, 0, 0)
"""What only the zip's directory has of each entry: the version that made it, attributes."""


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """A file of a store as an entry of the zip: its header, its content, its descriptor."""

    path: str
    start: int
    """Byte offset of the header."""
    nbytes: int

    @property
    def is_large(self) -> bool:
        """Whether its size needs Zip64."""
        return self.nbytes >= LIMIT_32

    @property
    def _bare(self) -> int:
        """Byte offset where the content would begin without padding."""
        return self.start + LOCAL.size + len(self.path.encode()) + (20 if self.is_large else 0)

    @property
    def _gap(self) -> int:
        """Length of the padding, an extra field that is not empty: TensorStore refuses such."""
        gap = -self._bare % ALIGNMENT
        return gap if gap == 0 or gap > 4 else gap + ALIGNMENT

    def _common(self) -> tuple[int, ...]:
        needs = self.is_large or self.start >= LIMIT_32
        return (_VERSION_64 if needs else _VERSION, _FLAGS, 0, 0, _DATE)

    def header(self) -> bytes:
        name, gap = self.path.encode(), self._gap
        extra = struct.pack("<HHQQ", 1, 16, self.nbytes, self.nbytes) if self.is_large else b""
        if gap:
            extra += struct.pack("<2sH", b"FB", gap - 4) + bytes(gap - 4)
        size = min(self.nbytes, LIMIT_32)
        numbers = (0x04034B50, *self._common(), 0, size, size, len(name), len(extra))
        return LOCAL.pack(*numbers) + name + extra

    def descriptor(self, crc32: int) -> bytes:
        form = "<IIQQ" if self.is_large else "<IIII"
        return struct.pack(form, 0x08074B50, crc32, self.nbytes, self.nbytes)

    def central(self, crc32: int) -> bytes:
        name, numbers = self.path.encode(), [self.nbytes] * 2 if self.is_large else []
        numbers += [self.start] if self.start >= LIMIT_32 else []
        form = f"<HH{len(numbers)}Q"
        extra = struct.pack(form, 1, 8 * len(numbers), *numbers) if numbers else b""
        size, start = min(self.nbytes, LIMIT_32), min(self.start, LIMIT_32)
        made_by, *attributes = OURS
        fields = (crc32, size, size, len(name), len(extra), 0, 0, *attributes, start)
        return CENTRAL.pack(0x02014B50, made_by, *self._common(), *fields) + name + extra

    @property
    def content(self) -> int:
        """Byte offset of the content, which is aligned."""
        return self._bare + self._gap

    @property
    def end(self) -> int:
        """Byte offset just after the descriptor."""
        return self.content + self.nbytes + (24 if self.is_large else 16)


class PackedDirectory:
    """The files of a packed store, by numbers in the order of their names."""

    def __init__(self, archive: Path, status: Status) -> None:
        self.archive = archive
        self.status = status
        self.around = resolve(archive.parent)
        """Directory that the file lies in, without links."""
        with of_file(archive), open_readable(archive, status.source_file(archive)) as file:
            try:
                self._zip = ZipDirectory(file)
                self._read()
            except EndedTooEarlyError as error:
                message = f"not a whole store in one file ({error}; {status.nbytes:,} bytes). Was"
                message = f"{message} its copying or writing interrupted? Copy or write it again"
                raise CorruptFileError(message) from error

    def _read(self) -> None:
        """Read the directory, and check that its entries are files of their own."""
        names, rows, bounds = list[bytes](), list[tuple[int, int]](), list[tuple[int, int]]()
        for entry in self._zip.parsed():
            if entry.header + entry.nbytes > self._zip.start:
                shown = show(entry.name.decode(errors="replace"))
                raise CorruptFileError(f"entry {shown} is said to reach past the entries' end")
            bounds.append((entry.header, LOCAL.size + len(entry.name) + entry.nbytes))
            if entry.name.endswith(b"/") and not entry.nbytes:
                continue  # some programs list directories too
            if not _is_path(entry.name):
                message = f"entry {show(entry.name.decode(errors='replace'))} is no path in a store"
                raise CorruptFileError(message)
            names.append(entry.name)
            rows.append((entry.at, entry.nbytes))
        self._headers = _require_apart(bounds, self._zip.start)
        order = sorted(range(len(names)), key=names.__getitem__)
        _require_distinct(names[row] for row in order)
        numbers = np.array(rows, dtype=np.int64).reshape(-1, 2)[order]
        lengths = np.array([len(name) for name in names], dtype=np.int64)[order]
        self._at, self._nbytes = numbers[:, 0], numbers[:, 1]
        self._name_starts = self._at - self._zip.start + CENTRAL.size
        self._name_stops = self._name_starts + lengths

    def find(self, path: str) -> int | None:
        name = path.encode(errors="surrogateescape")
        row = self._first_from(name)
        return row if row < self.count and self._name(row) == name else None

    def names(self) -> Iterator[str]:
        return (self._name(row).decode() for row in range(self.count))

    def _name(self, row: int) -> bytes:
        return self._zip.data[self._name_starts[row] : self._name_stops[row]]

    def _first_from(self, name: bytes, row: int = 0) -> int:
        """Return the first number, from one on, of a file whose name is not before this one."""
        return bisect_left(range(self.count), name, row, key=self._name)

    def is_directory(self, path: str) -> bool:
        return next(self.children(path), None) is not None

    def children(self, path: str) -> Iterator[tuple[str, int | None]]:
        """Yield the name of each entry of a directory, and its number; None for a directory."""
        below = f"{path}/".encode(errors="surrogateescape") if path else b""
        row = self._first_from(below)
        while row < self.count and (name := self._name(row)).startswith(below):
            own, is_deeper, _ = name[len(below) :].partition(b"/")
            yield own.decode(), None if is_deeper else row
            # `0` follows `/`.
            row = self._first_from(below + own + b"0", row) if is_deeper else row + 1

    def status_of(self, row: int | None) -> Status:
        whole = self.status
        mode = whole.permissions | (_DIRECTORY if row is None else _FILE)
        nbytes = 0 if row is None else int(self._nbytes[row])
        ids = whole.file_id, whole.device, 1, whole.changed_ns
        return Status(mode, nbytes, whole.modified_ns, whole.version, *ids)

    @property
    def count(self) -> int:
        return len(self._at)

    def entry_of(self, row: int) -> tuple[ZipEntry, int]:
        """Return the entry of a file, and where what follows it in the zip begins."""
        entry = self._zip.parse(int(self._at[row]))[0]
        return entry, int(self._headers[np.searchsorted(self._headers, entry.header, side="right")])

    def start_of(self, row: int, file: OpenedFile) -> int:
        """Return where the content of a file begins in the open zip.

        Where reading takes requests, and the zip's directory leaves room for one header only, of
        ours or without extra fields, the header is not read.
        """
        entry, end = self.entry_of(row)
        expected = PackedEntry(entry.name.decode(), entry.header, entry.nbytes)
        bare = entry.header + LOCAL.size + len(entry.name)
        if file.takes_requests:
            if expected.end == end and self.serialized(entry) == expected.central(entry.crc32):
                return expected.content
            if bare + entry.nbytes == end and not entry.follows:
                return bare
        return self.header_of(row, file).start

    def serialized(self, entry: ZipEntry) -> bytes:
        """Return the bytes of an entry in the zip's directory."""
        return self._zip.serialized(entry)

    def header_of(self, row: int, file: OpenedFile) -> LocalHeader:
        """Read the header of a file from the open zip; it must agree with the zip's directory."""
        entry, end = self.entry_of(row)
        with of_file(self.archive):
            header = read_header(file, entry, end)
            require_repeated(entry, header)
        return header


def _is_path(name: bytes) -> bool:
    try:
        return is_inside(name.decode())
    except UnicodeDecodeError:
        return False


def _require_distinct(names: Iterable[bytes]) -> None:
    """Require of names in order that each is one file's, and no directory's too."""
    begins: list[bytes] = []
    for name in names:
        while begins and not name.startswith(begins[-1]):
            begins.pop()
        for prefix in begins:
            if len(name) == len(prefix):
                raise CorruptFileError(f"two entries are called {show(prefix.decode())}")
            if name.startswith(b"/", len(prefix)):
                raise CorruptFileError(f"entry {show(prefix.decode())} is a file and a directory")
        begins.append(name)


def _require_apart(bounds: Sequence[tuple[int, int]], end: int) -> NDArray[np.int64]:
    """Require that entries fill a zip up to its directory; return where they and that begin."""
    columns = np.array(sorted(bounds), dtype=np.int64).reshape(-1, 2)
    starts = np.append(columns[:, 0], end)
    if starts[0]:
        raise CorruptFileError(f"{starts[0]:,} bytes before its first entry")
    over = np.flatnonzero(starts[:-1] + columns[:, 1] > starts[1:])
    if len(over):
        at = int(starts[over[0]])
        raise CorruptFileError(f"the entry at byte {at:,} reaches into what follows it")
    return starts
