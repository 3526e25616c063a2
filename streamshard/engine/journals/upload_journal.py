"""The journal of a target in a bucket, where no object can be appended to.

It is some objects below one path: the first identifies the run, the others hold lines, a batch
each. What a service has acknowledged is durable and whole, so an object with the recorded etag is
not read again. An object that was uploaded but is not recorded is uploaded once more.
"""

import io
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from streamshard.engine.journals.journal import HEADER, WHOLE, Journal, intact_lines, serialize_line
from streamshard.io.changes import remove, remove_file, write_new
from streamshard.io.entries import entries_below, has_file, read_all
from streamshard.io.place import place_of

_BATCH: Final = 256
"""Lines that are recorded together, unless a batch takes too long or gets too large."""
_BATCH_BYTES: Final = 1 << 20
_SECONDS: Final = 5.0
"""How long uploads may last that a killed run has to repeat, apart from those that it was at."""
_PLACE_BITS: Final = 40
"""Bits of a line's place within its object; those above are the object's number."""


class UploadJournal(Journal):
    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_noted_whole = False
        """Whether this run, or the earlier one, recorded that everything is uploaded."""
        self._names: list[str] = []
        """Names of the objects that an earlier run left."""
        self._content = ("", b"")
        """Name and content of the object that was read last: files are looked for in order."""
        self._clock = clock
        self._batch: list[bytes] = []
        self._flushed = clock()
        self._next = 1
        super().__init__(path)

    def _look(self) -> bool:
        is_there = has_file(self.header_path)
        if is_there:
            below = (entry.path.relative_to(self.path) for entry in entries_below(self.path))
            self._names = sorted(
                (path.as_posix() for path in below), key=lambda name: name.zfill(12)
            )
        return is_there

    def _lines(self, start: int = 0) -> Iterator[tuple[int, Any]]:
        for name in self._names:
            if name == WHOLE:
                self._is_noted_whole = True
                yield 0, WHOLE
                continue
            number = int(name)
            self._next = max(self._next, number + 1)
            if number >= start >> _PLACE_BITS:
                if self._content[0] != name:
                    self._content = name, read_all(self.path / name)
                first = number << _PLACE_BITS
                lines = io.BytesIO(self._content[1])
                skipped = lines.seek(max(0, start - first))
                yield from intact_lines(lines, first + skipped)

    @property
    def header_path(self) -> Path:
        return self.path / HEADER

    def _make(self, header: Mapping[str, Any]) -> None:
        if self.is_there:
            remove(self.path)
        write_new(self.header_path, serialize_line(dict(header)))
        self._next, self._names = 1, []

    def proceed(self) -> None:
        """Go on with the next object."""

    def _append(self, line: bytes) -> None:
        self._batch.append(line)
        is_full = len(self._batch) >= _BATCH or sum(map(len, self._batch)) > _BATCH_BYTES
        if is_full or self._clock() - self._flushed > _SECONDS:
            self.close()

    def note_whole(self) -> None:
        self.close()
        write_new(self.path / WHOLE, b"")
        self._is_noted_whole = True

    def take_back_whole(self) -> None:
        if self._is_noted_whole:
            remove_file(self.path / WHOLE)
            self._is_noted_whole = False

    def close(self) -> None:
        self._flushed = self._clock()
        if self._batch:
            write_new(self.path / str(self._next), b"".join(self._batch))
            self._batch, self._next = [], self._next + 1

    def remove(self) -> None:
        """Remove the journal; its header last, so that what is left of it is still a journal."""
        recent = [str(number) for number in range(1, self._next)] + [WHOLE] * self._is_noted_whole
        others = sorted({*recent, *self._names} - {HEADER})
        place_of(self.path).remove_files(self.path / name for name in others)
        remove_file(self.header_path, missing_ok=True)
        self.header, self.is_whole, self.is_there, self._is_noted_whole = None, False, False, False
        self._batch, self._next, self._names = [], 1, []
        self._remember(array("Q"))
        self.is_empty = True
