"""A record of the files that a run has finished, so that a later run can continue from there.

The first line identifies the run; each other line describes the files that a job finished, and
what was read of the source for them. Each line begins with a CRC-32 of its own. A line says that
files were handed to the system, not that they are on disk: a run that continues reads them back.
So a power failure may lose or tear lines and data; the only effect is that some files are written
again.
"""

import errno
import json
import zlib
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from streamshard.engine.run.source_check import Ranges
from streamshard.engine.run.work import FinishedFile, RegionResult, SpanResult, Written
from streamshard.io.changes import write_durably
from streamshard.io.entries import examine, stream_of
from streamshard.io.files import target_errors
from streamshard.io.sink import AppendedFile
from streamshard.model import Digest

PROOF_PREFIX: Final = ".streamshard.proof."
"""Beginning of the name of a directory next to a journal: see `engine/jobs/proofs.py`."""
HEADER: Final = "0"
"""Name of the object without which the others of an upload's journal are none."""
WHOLE: Final = "whole"
_CRC_BYTES: Final = 9
"""Eight hexadecimal digits and a space."""
_LIMIT: Final = 1 << 62
"""Larger than any file, offset or checksum."""


class Journal:
    """The journal in a directory of target files; reads the lines of an earlier run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: Mapping[str, Any] | None = None
        """Identity of the run; None before it has begun, empty if another version wrote this."""
        self.is_whole = False
        """Whether the earlier run wrote everything."""
        self._file = AppendedFile(path)
        self.is_there = self._look()
        """Whether there is a journal, of whatever run."""
        self._read()
        self.is_empty = not (self.is_whole or len(self._keys))
        """Whether neither an earlier run nor this one has recorded a file."""

    def _look(self) -> bool:
        try:
            status = examine(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        if not (status.is_file or status.is_directory):  # a pipe would wait for a writer
            raise OSError(errno.EINVAL, "it is a pipe or a device; move it away", str(self.path))
        return True

    def _lines(self, start: int = 0) -> Iterator[tuple[int, Any]]:
        if self.is_there:
            with stream_of(self.path) as stream:
                stream.seek(start)
                yield from intact_lines(stream, start)

    def _read(self) -> None:
        rows = array("Q")
        self._end = -1
        """Where the last line of the earlier run begins."""
        try:
            for start, line in self._lines():
                if isinstance(line, dict) and self.header is None:
                    self.header = line
                elif line == WHOLE:
                    self.is_whole = True
                else:
                    for file in parsed(line)[0]:
                        rows.extend((_key(file.path), start))
                    self._end = start
        except (OverflowError, RecursionError, TypeError, ValueError):
            self.header = {}
        if self.header == {}:
            self.is_whole, rows = False, array("Q")
        self._remember(rows)

    def _remember(self, rows: "array[int]") -> None:
        pairs = np.frombuffer(rows, dtype=np.uint64).reshape(-1, 2)[::-1]  # the last line counts
        self._keys, last = np.unique(pairs[:, 0], return_index=True)
        self._starts = pairs[last, 1].astype(np.int64)
        """Where the line of the file with each key begins; -1 if it is to be written again."""
        self._parsed: tuple[int, Mapping[str, FinishedFile]] = (-1, {})
        """Where the line begins that was parsed last, and its files."""

    def _row(self, path: str) -> int | None:
        key = _key(path)
        row = int(np.searchsorted(self._keys, np.uint64(key)))
        return row if row < len(self._keys) and int(self._keys[row]) == key else None

    def _start(self, path: str) -> int:
        row = self._row(path)
        return -1 if row is None else int(self._starts[row])

    def holds(self, path: str) -> bool:
        return self._start(path) >= 0

    def find(self, path: str) -> FinishedFile | None:
        start = self._start(path)
        if start < 0:
            return None
        if self._parsed[0] != start:
            _, line = next(self._lines(start))
            self._parsed = start, {file.path: file for file in parsed(line)[0]}
        return self._parsed[1].get(path)

    def finished(self) -> Iterator[FinishedFile]:
        for start, files, _ in self._all():
            yield from (file for file in files if self._start(file.path) == start)

    def ranges(self) -> Iterator[Ranges]:
        """Yield what the earlier run read of the source for the files that it finished."""
        return (ranges for _, _, ranges in self._all())

    def _all(self) -> Iterator[tuple[int, Sequence[FinishedFile], Ranges]]:
        for start, line in self._lines() if len(self._keys) else ():
            if start > self._end:
                break
            if isinstance(line, list):
                yield start, *parsed(line)

    def forget(self, path: str) -> None:
        row = self._row(path)
        if row is not None:
            self._starts[row] = -1

    def begin(self, header: Mapping[str, Any]) -> None:
        """Start a new journal, which from now on identifies the target as this run's."""
        self._make(header)
        self.header, self.is_whole, self.is_there, self.is_empty = header, False, True, True
        self._remember(array("Q"))
        self.proceed()

    def _make(self, header: Mapping[str, Any]) -> None:
        new = self.path.with_name(f"{self.path.name}.new")
        write_durably(self.path, serialize_line(header), new)

    def proceed(self) -> None:
        self._file.open()

    def note_all(self, files: Sequence[FinishedFile], ranges: Ranges) -> None:
        """Add files that a job has finished, and what it read of the source for them."""
        self._append(serialized(files, ranges))
        self.is_empty = False

    def _append(self, line: bytes) -> None:
        self._file.append(line)

    def note_whole(self) -> None:
        """Record durably that all files are written and durable."""
        self._file.append(serialize_line(WHOLE))
        self.is_empty = False
        self._file.sync()

    def close(self) -> None:
        with target_errors(self.path):
            self._file.close()


def _key(path: str) -> int:
    """Hash a path to 64 bits, as a run may have millions of files."""
    text = path.encode("utf-8", "surrogateescape")
    return int.from_bytes(blake2b(text, digest_size=8).digest())


def serialize_line(line: object) -> bytes:
    """Serialize a line; it starts with a line break, so a torn line before it does no harm."""
    text = json.dumps(line).encode()
    return b"\n%08x %s\n" % (zlib.crc32(text), text)


def intact_lines(stream: Iterable[bytes], start: int) -> Iterator[tuple[int, Any]]:
    """Yield where each line begins whose checksum is correct, and what it holds."""
    for line in stream:
        text = line[_CRC_BYTES:].rstrip(b"\n")
        if line[:_CRC_BYTES] == b"%08x " % zlib.crc32(text):
            yield start, json.loads(text.decode())
        start += len(line)


def serialized(files: Sequence[FinishedFile], ranges: Ranges) -> bytes:
    """Serialize the line of files that a job has finished: a path, an etag and numbers of each."""
    rows = [
        [file.path, file.version, file.written.nbytes, file.written.crc32]
        + [number for result in file.results for number in _numbers(result)]
        for file in files
    ]
    return serialize_line([rows, b64encode(ranges.astype("<i8").tobytes()).decode()])


def parsed(line: object) -> tuple[Sequence[FinishedFile], Ranges]:
    if not isinstance(line, list):
        raise TypeError("not a line of a journal")
    files, (rows, encoded) = list[FinishedFile](), line
    for path, version, *numbers in rows:
        if type(version) is not str or not _is_below(path) or {*map(type, numbers)} != {int}:
            raise TypeError("not a file of a target")
        if not 0 <= min(numbers) <= max(numbers) < _LIMIT:
            raise ValueError("not the numbers of a file")
        nbytes, crc32, *rest = numbers
        files.append(FinishedFile(path, version, Written(nbytes, crc32), [*_results(rest)]))
    ranges = np.frombuffer(b64decode(encoded, validate=True), dtype="<i8")
    return files, ranges.reshape(-1, 4).astype(np.int64)


def _is_below(path: object) -> bool:
    """Tell whether this is a path that leads to no place outside the target."""
    if not isinstance(path, str):
        return False
    path.encode("utf-8", "surrogateescape")
    parts = path.split("/")  # pathlib would keep a name of each in the table of interned strings
    return parts[0] != "" and ".." not in parts and not {*parts} <= {"", "."}


def _numbers(result: SpanResult) -> Iterator[int]:
    yield from (result.offset, result.written.nbytes, result.written.crc32, len(result.regions))
    for region in result.regions:
        content = region.content
        yield from (region.offset, content.nbytes, content.crc32, content.crc32c)
        yield from (region.overflowed, len(region.blocks), *region.blocks)


def _results(numbers: Sequence[int]) -> Iterator[SpanResult]:
    left = iter(numbers)
    for offset in left:
        nbytes, crc32, count = islice(left, 3)
        regions = tuple(_region(left) for _ in range(count))
        yield SpanResult(offset, Written(nbytes, crc32), regions)


def _region(left: Iterator[int]) -> RegionResult:
    offset, nbytes, crc32, crc32c, overflowed, count = islice(left, 6)
    blocks = tuple(islice(left, count))
    return RegionResult(offset, Digest(nbytes, crc32, crc32c), blocks, overflowed)
