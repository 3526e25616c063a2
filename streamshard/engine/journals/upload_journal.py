"""A record of the objects that a run has uploaded, so that a later run can continue from there.

An object cannot be appended to, so the journal is some objects below one path: the first identifies
the run, the others describe uploaded objects, a batch each. What a service has acknowledged is
durable and whole, so an object with the recorded etag is not read again. An object that was
uploaded but is not recorded is uploaded once more.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from streamshard.engine.journals.journal import (
    HEADER,
    Written,
    header_of,
    intact_lines,
    serialize_line,
)
from streamshard.engine.run.work import RegionResult, SpanResult
from streamshard.io.changes import remove, remove_file, write_new
from streamshard.io.entries import entries_below, has_file, read_all
from streamshard.io.place import place_of
from streamshard.model import Digest

_WHOLE: Final = "whole"
_BATCH: Final = 256
"""Uploaded objects that are recorded together, unless a batch takes too long or gets too large."""
_BATCH_BYTES: Final = 1 << 20
_LIMIT: Final = 1 << 62
"""Larger than any object, offset or checksum."""
_SECONDS: Final = 5.0
"""How long uploads may last that a killed run has to repeat, apart from those that it was at."""


class UploadJournal:
    """The journal of a target in a bucket; reads what an earlier run recorded.

    `path`: path below which the journal's objects lie.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self.header: Mapping[str, Any] | None = None
        """Identity of the run; None before it has begun, empty if another version wrote this."""
        self.is_whole = False
        """Whether the earlier run uploaded everything."""
        self._is_noted_whole = False
        """Whether this run, or the earlier one, recorded that everything is uploaded."""
        self._clock = clock
        self._known: dict[str, list[Any]] = {}
        """Path of an uploaded object → its etag and the results of its spans."""
        self._names: list[str] = []
        """Names of the objects that an earlier run left."""
        self._batch: list[bytes] = []
        self._flushed = clock()
        self._next = 1
        self.is_there = has_file(header_of(path))
        """Whether there is a journal, of whatever run."""
        if self.is_there:
            self._read()

    def _read(self) -> None:
        found = sorted((entry.name.zfill(12), entry.path) for entry in entries_below(self.path))
        self._names = [path.relative_to(self.path).as_posix() for _, path in found]
        try:
            for _, path in found:
                self._read_object(path)
        except (OverflowError, RecursionError, TypeError, ValueError):
            self.header, self.is_whole = {}, False
            self._known.clear()

    def _read_object(self, path: Path) -> None:
        lines = intact_lines(read_all(path).splitlines())
        if path.name == HEADER:
            first = next(lines, None)
            self.header = first if isinstance(first, dict) else None
        elif path.name == _WHOLE:
            self.is_whole = self._is_noted_whole = True
        else:
            self._next = max(self._next, int(path.name) + 1)
            for name, version, spans in lines:
                if type(name) is not str or type(version) is not str:
                    raise TypeError("not an object")
                self._known[name] = [version, spans]
                for span in spans:
                    _parsed(span)

    @property
    def is_empty(self) -> bool:
        """Whether no upload is recorded."""
        return not self._known

    @property
    def header_path(self) -> Path:
        """Path of the object that identifies the run."""
        return header_of(self.path)

    def paths(self) -> Collection[str]:
        """Return the paths of all recorded objects."""
        return self._known.keys()

    def version_of(self, path: str) -> str | None:
        """Return the etag that an object had when it was uploaded; None if it is not recorded."""
        known = self._known.get(path)
        return None if known is None else str(known[0])

    def results_of(self, path: str) -> Sequence[SpanResult] | None:
        """Return the results of an uploaded object's spans; None if it is not recorded."""
        known = self._known.get(path)
        return None if known is None else [_parsed(span) for span in known[1]]

    def keep_only(self, there: Collection[str]) -> None:
        """Forget all objects but those that are still there as they were uploaded."""
        self._known = {path: known for path, known in self._known.items() if path in there}

    def begin(self, header: Mapping[str, Any]) -> None:
        """Start a new journal, which from now on identifies the target as this run's."""
        if self.is_there:
            remove(self.path)
        write_new(self.header_path, serialize_line(dict(header)))
        self.header, self.is_whole, self._next, self.is_there = header, False, 1, True
        self._names = []
        self._known.clear()

    def note(self, path: str, version: str, results: Sequence[SpanResult]) -> None:
        """Record an uploaded object, with others if that is not due yet."""
        line = [path, version, [_serialized(result) for result in results]]
        self._known[path] = line[1:]
        self._batch.append(serialize_line(line))
        is_full = len(self._batch) >= _BATCH or sum(map(len, self._batch)) > _BATCH_BYTES
        if is_full or self._clock() - self._flushed > _SECONDS:
            self.close()

    def note_whole(self) -> None:
        """Record that everything is uploaded."""
        self.close()
        write_new(self.path / _WHOLE, b"")
        self._is_noted_whole = True

    def take_back_whole(self) -> None:
        """Record that not everything is there any more."""
        if self._is_noted_whole:
            remove_file(self.path / _WHOLE)
            self._is_noted_whole = False

    def close(self) -> None:
        """Record what is not recorded yet."""
        self._flushed = self._clock()
        if self._batch:
            write_new(self.path / str(self._next), b"".join(self._batch))
            self._batch, self._next = [], self._next + 1

    def remove(self) -> None:
        """Remove the journal; its header last, so that what is left of it is still a journal."""
        own = [str(number) for number in range(1, self._next)] + [_WHOLE] * self._is_noted_whole
        others = sorted({*own, *self._names} - {HEADER})
        place_of(self.path).remove_files(self.path / name for name in others)
        remove_file(self.header_path, missing_ok=True)
        self.header, self.is_whole, self.is_there, self._is_noted_whole = None, False, False, False
        self._batch, self._next, self._names = [], 1, []
        self._known.clear()


def _serialized(result: SpanResult) -> list[Any]:
    regions = [
        [
            region.offset,
            [region.content.nbytes, region.content.crc32, region.content.crc32c],
            list(region.blocks),
            region.overflowed,
        ]
        for region in result.regions
    ]
    return [result.offset, result.written.nbytes, result.written.crc32, regions]


def _parsed(span: Sequence[Any]) -> SpanResult:
    offset, nbytes, crc32, regions = span
    found = tuple(
        RegionResult(at, Digest(*content), tuple(blocks), overflowed)
        for at, content, blocks, overflowed in regions
    )
    numbers = [offset, nbytes, crc32]
    for one in found:
        content = one.content
        numbers += [one.offset, content.nbytes, content.crc32, content.crc32c, *one.blocks]
    if {type(number) for number in numbers} != {int} or not 0 <= min(numbers) <= max(
        numbers
    ) < _LIMIT:
        raise TypeError("not the result of a span")
    return SpanResult(offset, Written(nbytes, crc32), found)
