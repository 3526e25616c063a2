"""What a run has written, kept beside it, so that a later run can go on from there.

The first line says what the run is about, every other one what a span of a file holds, each behind
a CRC-32 of its own. A line tells what was handed to the system, not that it has reached the disk:
whoever goes on reads the span back and compares. So lines and data may be lost or torn, by a power
failure for instance, and all that comes of it is that something is written once more.
"""

import json
import os
import threading
import zlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from streamshard.engine.io.durability import sync_path

Numbers = NDArray[np.uint64]

_WHOLE: Final = "whole"
_CRC_BYTES: Final = 9
"""Eight hexadecimal digits and a space."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a span holds."""

    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class _Spans:
    """Spans by their keys, in ascending order, of which there may be millions."""

    keys: Numbers
    nbytes: Numbers
    crc32s: Numbers
    files: Numbers
    """Keys of the files that they are in."""

    @classmethod
    def of(cls, rows: Numbers) -> Self:
        """Sort rows of key, file's key, bytes and CRC-32."""
        # Of a span that was written twice the last row counts.
        keys, last = np.unique(rows[::-1, 0], return_index=True)
        return cls(keys, rows[::-1, 2][last], rows[::-1, 3][last], np.unique(rows[:, 1]))


class Journal:
    """The journal in a directory of targets; reads what an earlier run has left there.

    Raises
    ------
    OSError
        There is one, and it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: Mapping[str, Any] | None = None
        """What the run is about; None before it has begun."""
        self.is_whole = False
        """Whether the earlier run wrote everything."""
        self.is_empty = True
        """Whether nothing was written, neither by an earlier run nor by this one."""
        self._descriptor = -1
        self._lock = threading.Lock()
        self._read()

    def _read(self) -> None:
        rows = array("Q")
        for line in _lines(self.path):
            if isinstance(line, dict) and self.header is None:
                self.header = line
            elif line == _WHOLE:
                self.is_whole = True
            elif isinstance(line, list):
                path, offset, nbytes, crc32 = line
                rows.extend((_key(f"{offset} {path}"), _key(path), nbytes, crc32))
        self._spans = _Spans.of(np.frombuffer(rows, dtype=np.uint64).reshape(-1, 4))
        self.is_empty = not len(self._spans.keys)

    def holds(self, path: str) -> bool:
        """Tell whether the earlier run wrote anything of a file."""
        return _find(self._spans.files, _key(path)) is not None

    def find(self, path: str, offset: int) -> Written | None:
        """Tell what the earlier run wrote into the span at an offset of a file."""
        spans, row = self._spans, _find(self._spans.keys, _key(f"{offset} {path}"))
        return None if row is None else Written(int(spans.nbytes[row]), int(spans.crc32s[row]))

    def begin(self, header: Mapping[str, Any]) -> None:
        """Start afresh: from here on the directory is known to be a run's that is about this."""
        new = self.path.with_name(f"{self.path.name}.new")
        new.write_bytes(_spell(header))
        sync_path(new)
        new.replace(self.path)
        sync_path(self.path.parent)
        self.header = header
        self._spans, self.is_whole, self.is_empty = (
            _Spans.of(np.zeros((0, 4), dtype=np.uint64)),
            False,
            True,
        )
        self.proceed()

    def proceed(self) -> None:
        """Go on with the journal that is there."""
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def note(self, path: str, offset: int, written: Written) -> None:
        """Add what a span of a file holds now; may be called from several threads."""
        self._append([path, offset, written.nbytes, written.crc32])
        self.is_empty = False

    def note_whole(self) -> None:
        """Say, durably, that everything is written and durable."""
        self._append(_WHOLE)
        os.fsync(self._descriptor)

    def _append(self, line: object) -> None:
        data = _spell(line)
        with self._lock:
            while data:
                data = data[os.write(self._descriptor, data) :]

    def close(self) -> None:
        """Close it, unless that is done."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _spell(line: object) -> bytes:
    """Spell a line; as it begins a new one, what was torn before it spoils nothing."""
    text = json.dumps(line).encode()
    return b"\n%08x %s\n" % (zlib.crc32(text), text)


def _lines(path: Path) -> Iterator[Any]:
    """Yield the lines that are as they were written."""
    try:
        stream = path.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        return
    with stream:
        for line in stream:
            text = line[_CRC_BYTES:].rstrip(b"\n")
            if line[:_CRC_BYTES] == b"%08x " % zlib.crc32(text):
                yield json.loads(text)


def _key(text: str) -> int:
    """Shorten what names a span or a file, of which there may be millions."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest())


def _find(keys: Numbers, key: int) -> int | None:
    row = int(np.searchsorted(keys, np.uint64(key)))
    return row if row < len(keys) and int(keys[row]) == key else None
