"""Checks every byte of a torch file's zip container against the rest of the file.

A reader needs little of a zip file: the directory at its end, and the bytes that it points to. The
audit examines everything, so that a damaged byte is found wherever it is. CRCs cover the data; the
code that reads the data must compare them. Values that are in both a record's own header and the
directory must be equal. Values that no reader needs must be the same for all records, as one
writer writes them. The records must fill the file.
"""

import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamshard.errors import SourceError
from streamshard.formats.torch import zip_directory
from streamshard.formats.torch.zip_directory import (
    LocalHeader,
    ZipDirectory,
    ZipEntry,
    descriptors,
    read_header,
)
from streamshard.formats.torch.zip_layout import LIMIT_32
from streamshard.io.entries import open_readable
from streamshard.io.readable import Readable

_ZIP64: Final = 0x0001
_PADDING: Final = 0x4246
"""Extra field by which torch aligns the data."""
_VERSIONS: Final = ((0x031E, 45), (0x002D, 45), (0x032D, 45))
"""Versions in a Zip64 end record, made by and needed, of known writers: torch, then zipfile."""
_MOST_LISTED: Final = 1000
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
        names = zip_directory.names(file)
    own = {name.partition(b"/")[2] for name in names}
    return b"data.pkl" in own and b"constants.pkl" not in own


def audit(path: Path) -> TorchAudit:
    """Check everything in a torch file but the bytes of its records."""
    with open_readable(path) as file:
        return audit_part(file)


def audit_part(source: Readable) -> TorchAudit:
    """Check a torch file that may be a part of another; offsets count from its own beginning."""
    auditor = _Auditor(source)
    records = auditor.run()
    more = auditor.unlisted
    last = [f"{more:,} more problems of its container"] if more else []
    return TorchAudit(auditor.root, tuple(records), (*auditor.problems, *last))


class _Auditor:
    def __init__(self, source: Readable) -> None:
        self.problems: list[str] = []
        self.unlisted = 0
        self.root = ""
        self._source = source

    def run(self) -> list[StoredRecord]:
        records = []
        try:
            zip_directory.refuse_legacy(self._source)
            directory = ZipDirectory(self._source, self._add)
            self._check_directory(directory)
            is_stored = all(entry.is_stored for entry in directory.entries)
            bounded = [*directory.bounded()] if is_stored else []
            directory.prepare(entry for entry, _ in bounded)
        except SourceError as error:
            self._add(error)
            return []
        for entry, stop in bounded:
            try:
                header = read_header(self._source, entry, stop)
            except SourceError as error:
                self._add(error)
                continue
            records.append(self._record(entry, header, stop))
        return records

    def _add(self, error: SourceError) -> None:
        self._say(str(error))

    def _say(self, problem: str) -> None:
        if len(self.problems) < _MOST_LISTED:
            self.problems.append(problem)
        else:
            self.unlisted += 1

    def _check_directory(self, directory: ZipDirectory) -> None:
        """Check the names, and values that no reader needs, which are equal in all records."""
        if directory.versions and directory.versions not in _VERSIONS:
            self._say("its Zip64 end record is not as any known writer leaves it")
        entries = directory.entries
        seen = Counter(entry.unrepeated for entry in entries)
        if len(seen) > 1:
            usual = seen.most_common(1)[0][0]
            odd = next(entry for entry in entries if entry.unrepeated != usual)
            self._say(f"the directory's entry of {_shown(odd.name)} is unlike all others")
        for entry in entries:
            if not {*self._zip64(directory.extra_fields(entry), entry)} <= {
                entry.nbytes,
                entry.header,
            }:
                self._say(f"entry {_shown(entry.name)} of the directory has another Zip64 field")
        roots = Counter(entry.name.partition(b"/")[0] for entry in entries)
        names = Counter(entry.name for entry in entries)
        self.root = _name_text(roots.most_common(1)[0][0]) if roots else ""
        if len(roots) > 1:
            self._say(f"its records lie in {len(roots)} folders, where torch makes one")
        for name, count in names.items():
            if count > 1:
                self._say(f"{count} records are called {_shown(name)}")

    def _zip64(self, extra: bytes, entry: ZipEntry) -> list[int]:
        """Read the Zip64 field among extra fields. The only other field may be torch's padding."""
        numbers: list[int] = []
        at, is_odd = 0, False
        while at < len(extra):
            kind, nbytes = struct.unpack_from("<HH", extra.ljust(at + 4, b"\0"), at)
            field = extra[at + 4 : at + 4 + nbytes]
            at += 4 + nbytes
            if kind == _ZIP64 and nbytes % 8 == 0 and len(field) == nbytes and not numbers:
                numbers = list(struct.unpack(f"<{nbytes // 8}Q", field))
            elif kind != _PADDING or field not in (b"Z" * nbytes, bytes(nbytes)):
                is_odd = True
        if is_odd or at > len(extra):
            self._say(f"the extra fields of {_shown(entry.name)} are not as torch writes them")
        return numbers

    def _record(self, entry: ZipEntry, header: LocalHeader, stop: int) -> StoredRecord:
        """Compare a record's own header, and the bytes after its data, with the directory."""
        crc32, packed, nbytes = header.numbers
        in_zip64 = self._zip64(header.extra, entry)
        sizes = [entry.nbytes, entry.nbytes]
        small = LIMIT_32 if in_zip64 == sizes else min(entry.nbytes, LIMIT_32)
        later = entry.follows and crc32 == 0 and packed == nbytes and nbytes in (0, small)
        is_same = later or (crc32, packed, nbytes) == (entry.crc32, small, small)
        if not is_same or header.common != entry.common:
            self._say(f"record {_shown(entry.name)}: its header and the directory disagree")
        # torch does not know the packed size yet; zipfile, into a pipe, knows neither size.
        early: list[list[int]] = [[], sizes, [entry.nbytes, 0], [0, 0]]
        if in_zip64 not in (*early, *([*numbers, entry.header] for numbers in early)):
            self._say(f"record {_shown(entry.name)}: its Zip64 field and the directory disagree")
        self._check_end(entry, header.start + entry.nbytes, stop)
        folder, _, own = entry.name.partition(b"/")
        return StoredRecord(_name_text(own or folder), header.start, entry.nbytes, entry.crc32)

    def _check_end(self, entry: ZipEntry, data_end: int, stop: int) -> None:
        """Compare the bytes between a record's data and the next record with the directory."""
        between = self._source.read_at(data_end, min(stop - data_end, 64))
        if between not in descriptors(entry) or stop - data_end != len(between):
            self._say(
                f"record {_shown(entry.name)}: what follows its data is not what belongs there"
            )


def _shown(name: bytes) -> str:
    return _name_text(name[:_LIMIT_SHOWN]) + ("..." if len(name) > _LIMIT_SHOWN else "")


def _name_text(name: bytes) -> str:
    return name.decode(errors="backslashreplace")
