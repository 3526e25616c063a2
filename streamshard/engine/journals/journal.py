"""A record of the spans that a run has written, so that a later run can continue from there.

The first line identifies the run; each other line describes the content of one span of a file.
Each line begins with a CRC-32 of its own. A line says that a span was handed to the system, not
that it is on disk: a run that continues reads the span back and compares. So a power failure may
lose or tear lines and data; the only effect is that some spans are written again.
"""

import errno
import json
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

import numpy as np
from numpy.typing import NDArray

from streamshard.io.changes import write_durably
from streamshard.io.entries import examine, stream_of
from streamshard.io.files import target_errors
from streamshard.io.sink import AppendedFile

Numbers = NDArray[np.uint64]

PROOF_PREFIX: Final = ".streamshard.proof."
"""Beginning of the name of a directory next to a journal: see `engine/jobs/proofs.py`."""
HEADER: Final = "0"
"""Name of the object without which the others of an upload's journal are none."""
_WHOLE: Final = "whole"
_CRC_BYTES: Final = 9
"""Eight hexadecimal digits and a space."""


@dataclass(frozen=True, slots=True)
class Written:
    """Size and checksum of a span's content."""

    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class _Spans:
    """Spans in ascending order of their keys; there may be millions."""

    keys: Numbers
    nbytes: Numbers
    crc32s: Numbers
    files: Numbers
    """Keys of the files that contain the spans."""

    @classmethod
    def of(cls, rows: Numbers) -> Self:
        """Sort rows of key, file's key, bytes and CRC-32."""
        # If a span was written twice, the last row counts.
        keys, last = np.unique(rows[::-1, 0], return_index=True)
        return cls(keys, rows[::-1, 2][last], rows[::-1, 3][last], np.unique(rows[:, 1]))


class Journal:
    """The journal in a directory of target files; reads the lines of an earlier run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: Mapping[str, Any] | None = None
        """Identity of the run; None before it has begun, empty if another version wrote this."""
        self.is_there = False
        """Whether there is a journal, of whatever run."""
        self.is_whole = False
        """Whether the earlier run wrote everything."""
        self.is_empty = True
        """Whether neither an earlier run nor this one has recorded anything that was written."""
        self._file = AppendedFile(path)
        self._read()

    def _read(self) -> None:
        rows = array("Q")
        stream = _open_if_there(self.path)
        self.is_there = stream is not None
        try:
            for line in () if stream is None else _lines_of(stream):
                if isinstance(line, dict):
                    self.header = line if self.header is None else self.header
                elif line == _WHOLE:
                    self.is_whole = True
                else:
                    rows.extend(_row(*line))
        except (OverflowError, RecursionError, TypeError, ValueError):
            self.header = {}
        if self.header == {}:
            self.is_whole, rows = False, array("Q")
        self._spans = _Spans.of(np.frombuffer(rows, dtype=np.uint64).reshape(-1, 4))
        self.is_empty = not (self.is_whole or len(self._spans.keys))

    def holds(self, path: str) -> bool:
        """Tell whether the earlier run wrote any span of a file."""
        return bool(len(self._spans.files)) and _find(self._spans.files, _key(path)) is not None

    def find(self, path: str, offset: int) -> Written | None:
        """Return what the earlier run wrote into the span at an offset of a file, if anything."""
        spans, row = self._spans, _find(self._spans.keys, _key(f"{offset} {path}"))
        return None if row is None else Written(int(spans.nbytes[row]), int(spans.crc32s[row]))

    def begin(self, header: Mapping[str, Any]) -> None:
        """Start a new journal, which from now on identifies the directory as this run's."""
        new = self.path.with_name(f"{self.path.name}.new")
        write_durably(self.path, serialize_line(header), new)
        self.header = header
        self._spans, self.is_whole, self.is_empty = (
            _Spans.of(np.zeros((0, 4), dtype=np.uint64)),
            False,
            True,
        )
        self.proceed()

    def proceed(self) -> None:
        """Open the existing journal to append to it."""
        self._file.open()

    def note(self, path: str, offset: int, written: Written) -> None:
        """Add the content of a written span."""
        self.note_all([(path, offset, written)])

    def note_all(self, spans: Iterable[tuple[str, int, Written]]) -> None:
        """Add the content of written spans, each with its file and its offset there."""
        lines = (  # as `json` does it, faster
            f"[{encode_basestring_ascii(path)}, {at}, {one.nbytes}, {one.crc32}]"
            for path, at, one in spans
        )
        self._file.append(b"".join(map(_checked, lines)))
        self.is_empty = False

    def note_whole(self) -> None:
        """Record durably that all files are written and durable."""
        self._file.append(serialize_line(_WHOLE))
        self.is_empty = False
        self._file.sync()

    def close(self) -> None:
        """Close the journal, unless that is done."""
        with target_errors(self.path):
            self._file.close()


def header_of(path: Path) -> Path:
    """Return the path of the object that the journal of an upload below a path begins with."""
    return path / HEADER


def serialize_line(line: object) -> bytes:
    """Serialize a line; it starts with a line break, so a torn line before it does no harm."""
    return _checked(json.dumps(line))


def _checked(line: str) -> bytes:
    text = line.encode()
    return b"\n%08x %s\n" % (zlib.crc32(text), text)


def _open_if_there(path: Path) -> BinaryIO | None:
    try:
        status = examine(path)
        if not (status.is_file or status.is_directory):  # a pipe would wait for a writer
            raise OSError(errno.EINVAL, "it is a pipe or a device; move it away", str(path))
        return stream_of(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _lines_of(stream: BinaryIO) -> Iterator[Any]:
    with stream:
        yield from intact_lines(stream)


def _row(path: str, offset: int, nbytes: int, crc32: int) -> tuple[int, int, int, int]:
    if type(path) is not str or {type(offset), type(nbytes), type(crc32)} != {int}:
        raise TypeError("not a span")
    return _key(f"{offset} {path}"), _key(path), nbytes, crc32


def intact_lines(stream: Iterable[bytes]) -> Iterator[Any]:
    """Yield the lines whose checksum is correct."""
    for line in stream:
        text = line[_CRC_BYTES:].rstrip(b"\n")
        if line[:_CRC_BYTES] == b"%08x " % zlib.crc32(text):
            yield json.loads(text.decode())


def _key(text: str) -> int:
    """Hash the name of a span or a file to 64 bits, as there may be millions."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest())


def _find(keys: Numbers, key: int) -> int | None:
    row = int(np.searchsorted(keys, np.uint64(key)))
    return row if row < len(keys) and int(keys[row]) == key else None
