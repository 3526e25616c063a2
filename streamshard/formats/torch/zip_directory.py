"""Reads a zip's directory, and trusts nothing in it; the data must be stored as it is.

A zip stores most values twice, and readers that use different copies see different files in it. So
both copies must agree here, and records must not overlap. What neither torch's files nor packed
stores have, such as compression or comments, is refused.
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from streamshard.errors import CorruptFileError, SourceError, UnsupportedError
from streamshard.formats.pickle.inert import show
from streamshard.formats.pickle.inert_load import EndedTooEarlyError
from streamshard.formats.torch.zip_layout import (
    CENTRAL,
    END,
    END_64,
    LIMIT_32,
    LOCAL,
    LOCATOR_64,
    Record,
)
from streamshard.io.readable import Readable
from streamshard.model import Literal

_MAGIC: Final = b"PK\x03\x04"
"""First bytes of a zip, unless something was put before it."""
_PICKLE: Final = b"\x80"
"""First byte of a pickle of protocol 2 or later."""
_LIMIT_BYTES: Final = 1 << 28
"""Size of the largest directory that is read: room for millions of records."""
_LIMIT_16: Final = 0xFFFF
_DESCRIPTOR: Final = 0x0008
"""Flag: checksum and sizes follow the data, and may be missing before it."""
_ENCRYPTED: Final = 0x0001
_FLAGS: Final = _DESCRIPTOR | 0x0800
_ZIP64: Final = 1
_SHORTEST_DESCRIPTOR: Final = 12
_USUAL_EXTRA: Final = 96
"""Enough for the extra fields of torch's local headers, so that one read gets a whole header."""
NAME_IN_HEADER: Final = LOCAL.size
"""Offset of the record's name in a local header."""
NAME_IN_ENTRY: Final = CENTRAL.size
"""Offset of the record's name in an entry of the directory."""


@dataclass(frozen=True, slots=True)
class ZipRecord:
    name: str
    start: int
    """Byte offset of its data."""
    nbytes: int
    crc32: int | None
    """None if the writer left checksums out, as torch can be told to."""
    header: int
    """Byte offset of its local header; of its data if the header was not read."""
    entry: int
    """Byte offset of its entry in the directory."""


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """A record's entry in the central directory."""

    name: bytes
    common: tuple[int, ...]
    """Values that the local header repeats: version needed, flags, method, time, date."""
    unrepeated: tuple[int, ...]
    """Values that no header repeats and no reader needs: version made by, attributes."""
    crc32: int
    nbytes: int
    is_stored: bool
    """Whether the data lies in the file as it is, neither compressed nor encrypted."""
    extra_bytes: int
    header: int
    """Byte offset of the local header."""
    at: int
    """Byte offset of the entry itself."""

    @property
    def follows(self) -> bool:
        """Whether checksum and sizes follow the data."""
        return bool(self.common[1] & _DESCRIPTOR)


@dataclass(frozen=True, slots=True)
class LocalHeader:
    """The header before a record's data."""

    common: tuple[int, ...]
    """See `ZipEntry.common`."""
    numbers: tuple[int, int, int]
    """Checksum, stored size and size, as 32 bits hold them."""
    extra: bytes
    start: int
    """Byte offset of the data."""


_HEADER_BYTES: Final = 256
"""More than most local headers have, with the padding that aligns the data."""


def read(source: Readable) -> dict[str, ZipRecord]:
    """List the records of a zip by name, in file order.

    Where reading takes requests, the headers of records that torch placed are not read.
    """
    directory = ZipDirectory(source)
    records: dict[str, ZipRecord] = {}
    bounded = [
        (entry, end, directory.torch_start(entry, end) if source.takes_requests else None)
        for entry, end in directory.bounded()
    ]
    directory.prepare(entry for entry, _, start in bounded if start is None)
    for entry, end, placed in bounded:
        begin = start = placed or entry.header
        if placed is None:
            header = read_header(source, entry, end)
            require_repeated(entry, header)
            start = header.start
        # For a record that is not empty, 0 means that torch was told to leave checksums out.
        crc32 = entry.crc32 if entry.crc32 or not entry.nbytes else None
        name = _decoded(entry.name)
        if name in records:
            raise CorruptFileError(f"two records are called {show(name)}")
        records[name] = ZipRecord(name, start, entry.nbytes, crc32, begin, entry.at)
    return records


def refuse_legacy(source: Readable) -> None:
    """Refuse what torch saved before it wrote zips: one pickle after the other, then the data.

    As torch does, decide by the first bytes: the end of such a file may look like that of a zip.
    """
    if source.read_at(0, len(_PICKLE)) == _PICKLE:
        message = (
            'a pickle, as in torch\'s legacy format ("checkpoint_serialization": false), where'
        )
        raise UnsupportedError(
            f"{message} a zip belongs; load it with torch.load, and save it once with torch.save"
        )


def names(source: Readable) -> list[bytes]:
    """List the names of a zip's records, even if the zip is damaged at one end."""
    start = source.read_at(0, LOCAL.size + _LIMIT_16)
    record_names = []
    if start.startswith(_MAGIC) and len(start) > LOCAL.size:
        name_bytes = LOCAL.unpack_from(start)[-2]
        record_names.append(start[LOCAL.size : LOCAL.size + name_bytes])
    with suppress(SourceError):
        record_names += [entry.name for entry in ZipDirectory(source, lambda _: None).entries]
    return record_names


def _refuse(error: SourceError) -> None:
    raise error


class ZipDirectory:
    """The central directory of a zip, and the local headers that it leads to.

    `report`: called with errors after which parsing can go on; by default, raises them.
    """

    def __init__(self, source: Readable, report: Callable[[SourceError], None] = _refuse) -> None:
        self._source = source
        self._report = report
        self.versions: tuple[int, int] | None = None
        """Version made by and version needed in the Zip64 end record; None without one."""
        self.start, self._count, self.data = self._read()
        """`start` is the byte offset of the directory, `data` its bytes."""

    @cached_property
    def entries(self) -> list[ZipEntry]:
        """The entries in the order of the records in the file."""
        return sorted(self.parsed(), key=lambda entry: entry.header)

    def bounded(self) -> Iterator[tuple[ZipEntry, int]]:
        """Yield the entries, each with the offset where what follows its record begins."""
        bounds = [*(entry.header for entry in self.entries), self.start]
        if bounds[0]:
            self._report(CorruptFileError(f"{bounds[0]} bytes before the first record"))
        yield from zip(self.entries, bounds[1:], strict=True)

    def prepare(self, entries: Iterable[ZipEntry]) -> None:
        """Get the local headers of records that are read next."""
        self._source.prepare([(entry.header, entry.header + _HEADER_BYTES) for entry in entries])

    def torch_start(self, entry: ZipEntry, end: int) -> int | None:
        """Return where a record's data begins, if torch wrote its entry and placed it.

        Torch leaves one place for the data between the local header and `end`.
        """
        with suppress(UnicodeDecodeError):
            record = Record(entry.name.decode(), entry.header, entry.nbytes, Literal(b""))
            if record.end == end and self.serialized(entry) == record.central(entry.crc32):
                return record.data_start
        return None

    def serialized(self, entry: ZipEntry) -> bytes:
        """Return the bytes of an entry; no comment follows them."""
        begin = entry.at - self.start
        return self.data[begin : begin + CENTRAL.size + len(entry.name) + entry.extra_bytes]

    def _read(self) -> tuple[int, int, bytes]:
        """Find the directory from the end; return its offset, record count and bytes."""
        size = self._source.nbytes
        span = END_64.size + LOCATOR_64.size + END.size
        tail = self._source.read_at(max(size - span, 0), span)
        if len(tail) < END.size or tail[-END.size :][:4] != b"PK\x05\x06":
            raise EndedTooEarlyError("no end record of a zip at its end")
        _, *disks, here, count, nbytes, start, comment = END.unpack(tail[-END.size :])
        stop = size - END.size
        if comment or any(disks) or here != count:
            message = "the end record of the zip names a comment or another volume"
            self._report(CorruptFileError(message))
        locator = tail[: -END.size][-LOCATOR_64.size :]
        if locator[:4] == b"PK\x06\x07" and len(tail) == span:
            stop -= LOCATOR_64.size + END_64.size
            small = (count, nbytes, start)
            count, nbytes, start = self._read_end_64(tail[: END_64.size], locator, stop)
            limits = (_LIMIT_16, LIMIT_32, LIMIT_32)
            for first, second, limit in zip(small, (count, nbytes, start), limits, strict=True):
                if first not in (min(second, limit), limit):
                    message = "the two end records of the zip do not agree"
                    self._report(CorruptFileError(message))
        if start + nbytes != stop:
            message = f"the zip's directory is said to fill bytes {start} to {start + nbytes}, not"
            raise CorruptFileError(f"{message} to {stop}")
        if nbytes > _LIMIT_BYTES or count * CENTRAL.size > nbytes:
            raise CorruptFileError(f"a zip directory of {nbytes:,} bytes for {count:,} records")
        return start, count, self._source.read_at(start, nbytes)

    def _read_end_64(self, end: bytes, locator: bytes, at: int) -> tuple[int, int, int]:
        """Read the Zip64 end record: count of records, size of the directory, its offset."""
        _, disk, where, disks = LOCATOR_64.unpack(locator)
        signature, size, *versions, volume, first, local, count, nbytes, start = END_64.unpack(end)
        self.versions = versions[0], versions[1]
        if (signature, size, where, disk, disks) != (0x06064B50, END_64.size - 12, at, 0, 1):
            raise CorruptFileError("the zip's Zip64 end record is not where it is said to be")
        if volume or first or local != count:
            message = "the zip's Zip64 end record names another volume"
            self._report(CorruptFileError(message))
        return count, nbytes, start

    def parsed(self) -> Iterator[ZipEntry]:
        """Read the entries in the directory's own order; they must fill it."""
        at = self.start
        for _ in range(self._count):
            entry, at = self.parse(at)
            yield entry
        if at != self.start + len(self.data):
            message = f"{self.start + len(self.data) - at} bytes of the zip's directory"
            raise CorruptFileError(f"{message} are no entry")

    def parse(self, at: int) -> tuple[ZipEntry, int]:
        """Read the entry at a byte offset of the file; returns the offset after it too."""
        data, begin = self.data, at - self.start
        if len(data) - begin < CENTRAL.size:
            raise CorruptFileError("the zip's directory ends before its last entry")
        fields = CENTRAL.unpack_from(data, begin)
        _, flags, method, _, _, crc32, stored, nbytes = fields[2:10]
        name_bytes, extra_bytes, comment, disk, internal, external, header = fields[10:]
        middle = begin + CENTRAL.size + name_bytes
        name, extra = data[middle - name_bytes : middle], data[middle : middle + extra_bytes]
        if fields[0] != 0x02014B50 or middle + extra_bytes > len(data):
            raise CorruptFileError("the zip's directory holds something that is not an entry")
        if max(nbytes, stored, header) == LIMIT_32:
            nbytes, stored, header, disk = _large(extra, nbytes, stored, header, disk)
        is_stored = not method and stored == nbytes and not flags & _ENCRYPTED
        if not is_stored or flags & ~_FLAGS or comment or disk:
            self._report(_not_plain(name, flags, method))
        entry = ZipEntry(
            name, fields[2:7], (fields[1], internal, external), crc32, nbytes, is_stored,
            extra_bytes, header, at,
        )  # fmt: skip
        return entry, self.start + middle + extra_bytes + comment

    def extra_fields(self, entry: ZipEntry) -> bytes:
        at = entry.at - self.start + CENTRAL.size + len(entry.name)
        return self.data[at : at + entry.extra_bytes]


def read_header(source: Readable, entry: ZipEntry, end: int) -> LocalHeader:
    """Read a record's local header. Its data must not reach past `end`."""
    wanted = LOCAL.size + len(entry.name)
    data = source.read_at(entry.header, wanted + _USUAL_EXTRA)
    if len(data) < wanted or not data.startswith(_MAGIC):
        raise CorruptFileError(f"record {_shown(entry.name)} has no local header")
    fields = LOCAL.unpack_from(data)
    common, (name_bytes, extra_bytes) = fields[1:6], fields[9:]
    if common[1:3] != (entry.common[1], 0) or (
        (name_bytes, data[LOCAL.size : wanted]) != (len(entry.name), entry.name)
    ):
        raise CorruptFileError(f"record {_shown(entry.name)} is another one in its local header")
    start = entry.header + wanted + extra_bytes
    stop = start + entry.nbytes + (_SHORTEST_DESCRIPTOR if entry.follows else 0)
    if stop > end:
        message = f"record {_shown(entry.name)} reaches to byte {stop}, others begin at {end}"
        raise CorruptFileError(message)
    extra = data[wanted : wanted + extra_bytes]
    if extra_bytes > _USUAL_EXTRA:
        extra = source.read_at(entry.header + wanted, extra_bytes)
    return LocalHeader(common, fields[6:9], extra, start)


def require_repeated(entry: ZipEntry, header: LocalHeader) -> None:
    """Compare checksum and sizes in a record's local header with its entry."""
    crc32, stored, nbytes = header.numbers
    if max(nbytes, stored) == LIMIT_32:
        nbytes, stored, *_ = _large(header.extra, nbytes, stored)
    for local, central in ((crc32, entry.crc32), (stored, entry.nbytes), (nbytes, entry.nbytes)):
        if local != central and (local or not entry.follows):
            message = f"record {_shown(entry.name)}: its local header says {local:,} where the"
            raise CorruptFileError(f"{message} directory says {central:,}")


def descriptors(entry: ZipEntry) -> set[bytes]:
    """Return what may follow a record's data: either form of the descriptor, or nothing."""
    if not entry.follows:
        return {b""}
    values = (0x08074B50, entry.crc32, entry.nbytes, entry.nbytes)
    forms = ["<IIQQ"] if entry.nbytes > LIMIT_32 else ["<IIQQ", "<IIII"]
    return {struct.pack(form, *values) for form in forms}


def _not_plain(name: bytes, flags: int, method: int) -> CorruptFileError | UnsupportedError:
    if flags & _ENCRYPTED:
        return UnsupportedError(f"record {_shown(name)} is encrypted")
    if method:
        return UnsupportedError(f"record {_shown(name)} is compressed")
    return CorruptFileError(f"record {_shown(name)} is not stored as torch does it")


def _shown(name: bytes) -> str:
    return show(name.decode(errors="replace"))


def _large(extra: bytes, *numbers: int) -> tuple[int, ...]:
    """Replace numbers that do not fit by those in the Zip64 field, which must hold just these."""
    limits = (LIMIT_32, LIMIT_32, LIMIT_32, _LIMIT_16)[: len(numbers)]
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, at)
        field = extra[at + 4 : at + 4 + nbytes]
        at += 4 + nbytes
        if kind != _ZIP64:
            continue
        replacements = []
        for number, limit in zip(numbers, limits, strict=True):
            width = 0 if number != limit else 4 if limit == _LIMIT_16 else 8
            if len(field) < width:
                break
            replacements.append(int.from_bytes(field[:width], "little") if width else number)
            field = field[width:]
        if len(replacements) == len(numbers) and not field:
            return tuple(replacements)
        break
    raise CorruptFileError("a record's Zip64 field does not hold the numbers that it has to")


def _decoded(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        raise CorruptFileError(f"a record's name {_shown(name)} is not text") from error
