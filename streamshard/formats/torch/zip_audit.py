"""Checks every byte of a torch file's zip container against the rest of the file.

A reader needs little of a zip file: the directory at its end, and the bytes that it points to. The
audit examines everything, so that a damaged byte is found wherever it is. CRCs cover the data; the
code that reads the data must compare them. Values that are in both a record's own header and the
directory must be equal. Values that no reader needs must be the same for all records, as one
writer writes them. The records must fill the file.
"""

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamshard.io.entries import open_readable, read_all
from streamshard.io.readable import Readable

_LOCAL: Final = struct.Struct("<IHHHHHIIIHH")
_CENTRAL: Final = struct.Struct("<IHHHHHHIIIHHHHHII")
_END_64: Final = struct.Struct("<IQHHIIQQQQ")
_LOCATOR_64: Final = struct.Struct("<IIQI")
_END: Final = struct.Struct("<IHHHHIIH")

_LIMIT_16: Final = 0xFFFF
_LIMIT_32: Final = 0xFFFFFFFF
_FOLLOWS: Final = 0x0008
"""Flag: CRC and sizes follow the data."""
_FLAGS: Final = (0x0000, 0x0008, 0x0800, 0x0808)
_ZIP64: Final = 0x0001
_PADDING: Final = 0x4246
"""Extra field by which torch aligns the data."""
_MADE_BY: Final = (0x031E, 0x002D, 0x032D)
"""Values of "version made by" in a Zip64 end record of known writers: torch, then zipfile."""
_MOST_RECORDS: Final = 1 << 22
_MOST_TOLD: Final = 1000
"""Most problems of one file that are listed one by one."""
_LIMIT_SHOWN: Final = 100

DATA: Final = "data/"
"""Prefix of the names of the records that hold storages."""


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record of a torch file, as the directory at the file's end lists it."""

    name: str
    """Without the root folder."""
    start: int
    """Byte offset of the data."""
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class TorchAudit:
    """The result of an audit: everything in a torch file but the bytes of its records."""

    root: str
    """Folder of all records: the name under which the file was saved, or `archive`."""
    records: tuple[StoredRecord, ...]
    """Records that can be found, in file order."""
    problems: tuple[str, ...]


def is_torch_file(path: Path) -> bool:
    """Tell whether torch.save wrote a file, even if the file is damaged at one end.

    TorchScript's archives look alike, but also have constants; they do not count.
    """
    with open_readable(path) as file:
        start = file.read_at(0, _LOCAL.size + _LIMIT_16)
        names = _Auditor(file).names()
    if start.startswith(b"PK\x03\x04") and len(start) > _LOCAL.size:
        name_bytes = _LOCAL.unpack_from(start)[-2]
        names = [*names, start[_LOCAL.size : _LOCAL.size + name_bytes]]
    own = {name.partition(b"/")[2] for name in names}
    return b"data.pkl" in own and b"constants.pkl" not in own


def is_legacy(path: Path) -> bool:
    """Tell whether a file begins like a pickle, as in torch's legacy format."""
    return read_all(path, 1) == b"\x80"


def audit(path: Path) -> TorchAudit:
    """Check everything in a torch file but the bytes of its records."""
    with open_readable(path) as file:
        auditor = _Auditor(file)
        records = auditor.run()
    more = auditor.untold
    last = [f"{more:,} more problems of its container"] if more else []
    return TorchAudit(auditor.root, tuple(records), (*auditor.problems, *last))


@dataclass(frozen=True, slots=True)
class _End:
    """The place of the directory, as the end records give it."""

    start: int
    stop: int
    count: int


@dataclass(frozen=True, slots=True)
class _AuditedEntry:
    """An entry of the directory."""

    name: bytes
    common: tuple[int, ...]
    """Values that the record's own header repeats: version needed, flags, method, time, date."""
    unrepeated: tuple[int, ...]
    """Values that no header repeats and no reader needs: version made by, attributes."""
    crc32: int
    nbytes: int
    header: int
    """Byte offset of the record's own header."""
    is_stored: bool
    """Whether the data is not compressed."""

    @property
    def follows(self) -> bool:
        """Whether CRC and sizes follow the data."""
        return bool(self.common[1] & _FOLLOWS)


class _Damaged(Exception):
    """A structure cannot be read, nor anything that depends on it."""


class _Auditor:
    def __init__(self, file: Readable) -> None:
        self.problems: list[str] = []
        self.untold = 0
        self.root = ""
        self._file = file
        self._nbytes = file.nbytes

    def run(self) -> list[StoredRecord]:
        try:
            end = self._end()
            entries = sorted(self._entries(end), key=lambda entry: entry.header)
        except _Damaged as error:
            self._say(str(error))
            return []
        self._check_alike(entries)
        self._check_names(entries)
        packed = [_shown(entry.name) for entry in entries if not entry.is_stored]
        if packed:
            self._say(f"record {packed[0]} is compressed, as torch leaves none")
            return []
        if (entries[0].header if entries else end.start) != 0:
            self._say("begins with bytes that are of no record")
        behind = [*(entry.header for entry in entries[1:]), end.start]
        found = []
        for entry, stop in zip(entries, behind, strict=True):
            try:
                found.append(self._record(entry, stop))
            except _Damaged as error:
                self._say(f"record {_shown(entry.name)}: {error}")
        return found

    def names(self) -> list[bytes]:
        """List the names in the directory; none if the directory is damaged."""
        try:
            return [entry.name for entry in self._entries(self._end())]
        except _Damaged:
            return []

    def _say(self, problem: str) -> None:
        if len(self.problems) < _MOST_TOLD:
            self.problems.append(problem)
        else:
            self.untold += 1

    def _read(self, form: struct.Struct, offset: int, signature: bytes, what: str) -> list[int]:
        """Read a structure; return its fields without the signature."""
        data = self._bytes(offset, form.size)
        if len(data) < form.size or not data.startswith(signature):
            raise _Damaged(f"no {what} at byte {max(offset, 0)} of {self._nbytes}")
        return list(form.unpack(data)[1:])

    def _bytes(self, offset: int, nbytes: int) -> bytes:
        return self._file.read_at(offset, nbytes) if offset >= 0 else b""

    # The end of the file -----------------------------------------------------------------------

    def _end(self) -> _End:
        """Find the directory by the end records, which must be the last bytes of the file."""
        at = self._nbytes - _END.size
        what = "end record (truncated, or something was appended)"
        disk, first, here, count, size, start, comment = self._read(_END, at, b"PK\x05\x06", what)
        said = (here, count, size, start)
        if self._bytes(at - _LOCATOR_64.size, 4) == b"PK\x06\x07":
            at, large = self._end_64(at - _LOCATOR_64.size)
            limits = (_LIMIT_16, _LIMIT_16, _LIMIT_32, _LIMIT_32)
            if said != tuple(map(min, large, limits)):
                self._say(f"its end records disagree: {said} and {large}")
            here, count, size, start = large
        if (disk, first, comment) != (0, 0, 0) or here != count:
            self._say("its end record is not that of one whole file")
        if start + size != at:
            raise _Damaged(f"its directory ends at byte {start + size}, the end record is at {at}")
        if count > _MOST_RECORDS:
            raise _Damaged(f"{count} records, which is more than any checkpoint has")
        return _End(start, at, count)

    def _end_64(self, locator: int) -> tuple[int, tuple[int, ...]]:
        """Read the Zip64 end records; return their offset, and (count, count, size, start)."""
        disk, at, disks = self._read(_LOCATOR_64, locator, b"PK\x06\x07", "Zip64 locator")
        size, made_by, needed, *numbers = self._read(_END_64, at, b"PK\x06\x06", "Zip64 end record")
        known = (disk, disks, size, needed, *numbers[:2]) == (0, 1, _END_64.size - 12, 45, 0, 0)
        if not known or made_by not in _MADE_BY or at + _END_64.size != locator:
            self._say("its Zip64 end record is not as any known writer leaves it")
        return at, tuple(numbers[2:])

    # The directory -----------------------------------------------------------------------------

    def _entries(self, end: _End) -> Iterator[_AuditedEntry]:
        at = end.start
        for number in range(end.count):
            fields = self._read(_CENTRAL, at, b"PK\x01\x02", f"entry {number} of the directory")
            made_by, *common = fields[:6]
            crc32, packed, nbytes, name_bytes, extra_bytes, comment_bytes = fields[6:12]
            disk, internal, external, header = fields[12:]
            behind = self._bytes(at + _CENTRAL.size, name_bytes + extra_bytes)
            at += _CENTRAL.size + name_bytes + extra_bytes + comment_bytes
            if at > end.stop:
                raise _Damaged(f"entry {number} of the directory ends at byte {at} of {end.stop}")
            name = behind[:name_bytes]
            numbers = [nbytes, packed, header]
            held = iter(self._zip64(behind[name_bytes:], _shown(name)))
            large = [next(held, -1) if n == _LIMIT_32 else n for n in numbers]
            if next(held, None) is not None or min(large) < 0:
                raise _Damaged(f"entry {_shown(name)} of the directory has another Zip64 field")
            nbytes, packed, header = large
            if (disk, comment_bytes) != (0, 0) or common[1] not in _FLAGS:
                self._say(f"entry {_shown(name)} of the directory is not as torch writes it")
            unrepeated = (made_by, internal, external)
            is_stored = packed == nbytes and common[2] == 0
            yield _AuditedEntry(name, tuple(common), unrepeated, crc32, nbytes, header, is_stored)
        if at != end.stop:
            raise _Damaged(f"its directory of {end.count} records ends at byte {at} of {end.stop}")

    def _zip64(self, extra: bytes, name: str) -> list[int]:
        """Read the Zip64 field among extra fields. The only other field may be torch's padding."""
        found: list[int] = []
        at, is_odd = 0, False
        while at < len(extra):
            kind, nbytes = struct.unpack_from("<HH", extra.ljust(at + 4, b"\0"), at)
            held = extra[at + 4 : at + 4 + nbytes]
            at += 4 + nbytes
            if at > len(extra):
                raise _Damaged(f"the extra fields of {name} end too early")
            if kind == _ZIP64 and nbytes % 8 == 0 and not found:
                found = list(struct.unpack(f"<{nbytes // 8}Q", held))
            elif kind != _PADDING or held not in (b"Z" * nbytes, bytes(nbytes)):
                is_odd = True
        if is_odd:
            self._say(f"the extra fields of {name} are not as torch writes them")
        return found

    def _check_alike(self, entries: Sequence[_AuditedEntry]) -> None:
        """Check that values on which nothing depends are equal in all records."""
        seen = Counter(entry.unrepeated for entry in entries)
        if len(seen) > 1:
            usual = seen.most_common(1)[0][0]
            odd = next(entry for entry in entries if entry.unrepeated != usual)
            self._say(f"the directory's entry of {_shown(odd.name)} is unlike all others")

    def _check_names(self, entries: Sequence[_AuditedEntry]) -> None:
        roots = Counter(entry.name.partition(b"/")[0] for entry in entries)
        names = Counter(entry.name for entry in entries)
        self.root = _spelled(roots.most_common(1)[0][0]) if roots else ""
        if len(roots) > 1:
            self._say(f"its records lie in {len(roots)} folders, where torch makes one")
        for name, count in names.items():
            if count > 1:
                self._say(f"{count} records are called {_shown(name)}")

    # The records -------------------------------------------------------------------------------

    def _record(self, entry: _AuditedEntry, stop: int) -> StoredRecord:
        """Compare a record's own header, and the bytes after its data, with the directory."""
        fields = self._read(_LOCAL, entry.header, b"PK\x03\x04", "header")
        common, (crc32, packed, nbytes, name_bytes, extra_bytes) = fields[:5], fields[5:]
        # Checked first: without overlaps, each byte is read once, however many records there are.
        data_end = entry.header + _LOCAL.size + name_bytes + extra_bytes + entry.nbytes
        if data_end > stop:
            raise _Damaged(f"its data ends at byte {data_end}, where what follows begins at {stop}")
        behind = self._bytes(entry.header + _LOCAL.size, name_bytes + extra_bytes)
        name, start = behind[:name_bytes], entry.header + _LOCAL.size + name_bytes + extra_bytes
        if name != entry.name or tuple(common) != entry.common:
            raise _Damaged("its header and the directory disagree")
        held = self._zip64(behind[name_bytes:], _shown(name))
        sizes = [entry.nbytes, entry.nbytes]
        small = _LIMIT_32 if held == sizes else min(entry.nbytes, _LIMIT_32)
        later = entry.follows and crc32 == 0 and packed == nbytes and nbytes in (0, small)
        if not later and (crc32, packed, nbytes) != (entry.crc32, small, small):
            self._say(f"record {_shown(name)}: its header and the directory disagree")
        # torch does not know the packed size yet; zipfile, into a pipe, knows neither size.
        early: list[list[int]] = [[], sizes, [entry.nbytes, 0], [0, 0]]
        if held not in (*early, *([*numbers, entry.header] for numbers in early)):
            self._say(f"record {_shown(name)}: its Zip64 field and the directory disagree")
        self._check_end(entry, data_end, stop)
        folder, _, own = name.partition(b"/")
        return StoredRecord(_spelled(own or folder), start, entry.nbytes, entry.crc32)

    def _check_end(self, entry: _AuditedEntry, data_end: int, stop: int) -> None:
        """Compare the bytes between a record's data and the next record with the directory."""
        between = self._bytes(data_end, min(stop - data_end, 64))
        expected = {b""}
        if entry.follows:
            values = (0x08074B50, entry.crc32, entry.nbytes, entry.nbytes)
            wide = entry.nbytes > _LIMIT_32
            expected = {struct.pack("<IIQQ", *values)}
            expected |= set() if wide else {struct.pack("<IIII", *values)}
        if between not in expected or stop - data_end != len(between):
            self._say(
                f"record {_shown(entry.name)}: what follows its data is not what belongs there"
            )


def _shown(name: bytes) -> str:
    return _spelled(name[:_LIMIT_SHOWN]) + ("..." if len(name) > _LIMIT_SHOWN else "")


def _spelled(name: bytes) -> str:
    return name.decode(errors="backslashreplace")
