"""Files of a target that are packed into one file, in their order, whatever sizes they come to.

Workers encode files side by side. Each waits only until the sizes of all files before its own are
known, and then writes to its place. So the order of the plan alone decides where a file lies, and
a worker holds no more than its own file's bytes.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

from streamshard.engine.jobs.executor import Job, current_executor
from streamshard.engine.journals.journal import Journal, Written
from streamshard.engine.run.phases import Watcher
from streamshard.engine.run.runner import Jobs
from streamshard.engine.run.span_writer import (
    FilledSpan,
    Resources,
    SpanTask,
    SpanWriter,
    TargetFiles,
)
from streamshard.engine.run.staged_files import Partial
from streamshard.engine.run.work import Span, TargetFile
from streamshard.errors import IntegrityError, Option, UsageError
from streamshard.formats.torch.zip_layout import directory_of
from streamshard.formats.zarr.packed_layout import PackedEntry
from streamshard.io.changes import open_sink
from streamshard.io.entries import exists
from streamshard.io.files import target_errors
from streamshard.io.preallocation import Reservation
from streamshard.io.retry import StoppedError
from streamshard.io.sink import Sink

LOOK_SECONDS: Final = 0.05
"""How often a waiting worker looks whether the run goes on."""


class _Memory(Sink):
    """Takes the bytes of one file."""

    only_grows = True

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def write(self, view: memoryview, offset: int) -> None:
        self.pieces.append(bytes(view))

    def read_into(self, view: memoryview, offset: int) -> int:
        return 0


class _PlacedPart(Sink):
    """A part of a file that is being written."""

    def __init__(self, sink: Sink, start: int, nbytes: int) -> None:
        self._sink = sink
        self._start = start
        self._nbytes = nbytes

    def write(self, view: memoryview, offset: int) -> None:
        if offset + len(view) > self._nbytes:
            raise _other_size()
        self._sink.write(view, self._start + offset)

    def read_into(self, view: memoryview, offset: int) -> int:
        count = max(0, min(len(view), self._nbytes - offset))
        return self._sink.read_into(view[:count], self._start + offset)


def _other_size() -> IntegrityError:
    message = "what an earlier run wrote here has another size now: the libraries that compress it"
    again = f"Start from the beginning with {Option('overwrite', True)}"
    return IntegrityError(f"{message} are others. {again}")


class _Places:
    """Gives files their places, in their order."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self.entries: list[PackedEntry] = []
        self.end = 0
        """Byte offset behind the last file that has a place."""

    def take(self, number: int, path: str, nbytes: int, stop: threading.Event) -> PackedEntry:
        """Return the place of a file, once those before it have theirs."""
        with self._condition:
            while len(self.entries) < number:
                if stop.is_set():
                    raise StoppedError
                self._condition.wait(LOOK_SECONDS)
            entry = PackedEntry(path, self.end, nbytes)
            self.entries.append(entry)
            self.end = entry.end
            self._condition.notify_all()
        return entry


class Packed(ABC):
    """The one file that files are packed into; all workers of a run share it."""

    def __init__(self, path: Path) -> None:
        self.file = path
        """Path of the one file."""
        self.places = _Places()
        self.crc32s: dict[int, int] = {}
        """Number of each file that is written → its CRC-32."""
        self.kept_bytes = 0
        """Bytes that an earlier run wrote, and that this run found correct."""

    @abstractmethod
    def open(self, *, is_new: bool) -> Sink:
        """Open the one file."""

    def leave(self, sink: Sink) -> None:  # noqa: B027
        """Take back what `open` returned, at the end of a pass."""

    @abstractmethod
    def for_worker(self, sink: Sink, stop: threading.Event) -> Sink:
        """Return what a worker writes to; `stop` is set when it is not to wait any more."""

    def known(self, number: int) -> Written | None:
        """Return what an earlier run wrote of a file, if this goes on from there."""
        return None

    def note(self, number: int, written: Written) -> None:  # noqa: B027
        """Record a file, for a later run."""

    def make_room(self, nbytes: int) -> None:  # noqa: B027
        """Free preallocated space for bytes that are about to be written."""

    def directory(self) -> bytes:
        """Serialize the zip's directory, once all files are written."""
        entries = enumerate(self.places.entries)
        central = [entry.central(self.crc32s[number]) for number, entry in entries]
        return directory_of(central, self.places.end)


class PackedPartial(Packed, Partial):
    """A staging directory whose files are packed into one of this name."""

    def __init__(
        self, path: Path, journal: Journal, reservation: Reservation | None, name: str
    ) -> None:
        Packed.__init__(self, path / name)
        Partial.__init__(self, path, journal, reservation)

    def open(self, *, is_new: bool) -> Sink:
        return open_sink(self.file, is_new=is_new and not exists(self.file), nbytes=0)

    def leave(self, sink: Sink) -> None:
        sink.close()

    def for_worker(self, sink: Sink, stop: threading.Event) -> Sink:
        return sink

    def known(self, number: int) -> Written | None:
        return self.journal.find(self.file.name, number)

    def note(self, number: int, written: Written) -> None:
        self.journal.note(self.file.name, number, written)

    def make_room(self, nbytes: int) -> None:
        Partial.make_room(self, nbytes)

    def jobs(self, resources: Resources, watcher: Watcher) -> Jobs:
        return PackingJobs(self, Partial.jobs(self, resources, watcher), watcher)


class PackingJobs(Jobs):
    """The jobs of files that are packed; the one file itself is written as files are anywhere.

    `plain`: the jobs of the one file itself, where all is known before it is written.
    """

    def __init__(self, staged: Packed, plain: Jobs, watcher: Watcher) -> None:
        self._staged = staged
        self._plain = plain
        self._watcher = watcher
        self._path = staged.file
        self._sink: Sink | None = None
        self._first = len(staged.places.entries)
        """Number of the first file."""
        self._waiting: dict[int, tuple[TargetFile, Span]] = {}
        self._is_last = False
        """Whether no files come after those that are waiting, neither here nor later."""

    def all(self, files: Iterable[TargetFiles]) -> Iterator[Job[SpanWriter, Any] | None]:
        rest = _one_by_one(files)
        first = next(rest)
        if first.path == self._path.name:
            yield from self._plain.all([first])
            return
        require_threads(self._path, "compressed store in one file")
        with target_errors(self._path):
            self._sink = self._staged.open(is_new=not self._first)
        is_last = False
        for number, file in enumerate(chain([first], rest), self._first):
            is_last = is_last or file.is_last
            yield self._job(number, file, self._sink)
        self._is_last = is_last

    def _job(self, number: int, file: TargetFile, sink: Sink) -> Job[SpanWriter, FilledSpan]:
        (span,) = file.spans
        known = self._staged.known(number)
        if known is None:
            with target_errors(self._path):
                self._staged.make_room(span.nbytes)
        self._waiting[number] = file, span
        task = SpanTask(self._path, span, is_new=True, known=known)
        sink_for = partial(self._staged.for_worker, sink)
        places = self._staged.places
        return partial(_pack, task, number, file.path, places, sink_for)

    def take(self, number: int, done: FilledSpan) -> None:
        """Record a file; after the last one, write the zip's directory."""
        if self._sink is None:
            self._plain.take(number, done)
            return
        number += self._first
        (file, span), written = self._waiting.pop(number), done.result.written
        file.take(done.result)
        self._staged.crc32s[number] = written.crc32
        self._watcher.advance(span.nbytes if done.is_kept else span.nbytes - written.nbytes)
        if done.is_kept:
            self._staged.kept_bytes += written.nbytes
            self._watcher.keep(span.nbytes)
        else:
            self._staged.note(number, written)
        if self._is_last and not self._waiting:
            with target_errors(self._path):
                self._sink.write(memoryview(self._staged.directory()), self._staged.places.end)

    def synced(self) -> None:
        self._plain.synced()

    def close(self) -> None:
        self._plain.close()
        if self._sink is not None:
            self._staged.leave(self._sink)


def require_threads(path: Path, what: str) -> None:
    """Refuse workers in other processes."""
    if not current_executor().shares_memory:
        message = f"{path.name}: a {what} is written by threads, not by a cluster"
        raise UsageError(f"{message}. Give a name that ends in .zarr")


def _one_by_one(files: Iterable[TargetFiles]) -> Iterator[TargetFile]:
    for some in files:
        yield from [some] if isinstance(some, TargetFile) else some.singly()


def _pack(
    task: SpanTask,
    number: int,
    path: str,
    places: _Places,
    sink_for: Callable[[threading.Event], Sink],
    writer: SpanWriter,
) -> FilledSpan:
    """Write a file at its place, or keep what an earlier run wrote there."""
    memory, pieces, sink = _Memory(), list[bytes](), sink_for(writer.stop)
    if task.known is None:
        done = writer.write(task, memory)
        pieces = memory.pieces
        entry = places.take(number, path, done.result.written.nbytes, writer.stop)
    else:
        entry = places.take(number, path, task.known.nbytes, writer.stop)
        done = writer.write(task, _PlacedPart(sink, entry.content, entry.nbytes))
        if done.result.written.nbytes != entry.nbytes:
            raise _other_size()
    with target_errors(task.path):
        sink.write(memoryview(entry.header()), entry.start)
        at = entry.content
        for piece in pieces:
            sink.write(memoryview(piece), at)
            at += len(piece)
        descriptor = entry.descriptor(done.result.written.crc32)
        sink.write(memoryview(descriptor), entry.content + entry.nbytes)
    return done
