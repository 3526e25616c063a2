"""A directory of unfinished target files: its journal, the space for the rest, and its jobs."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from streamshard.engine.jobs.executor import Job, current_executor
from streamshard.engine.journals.journal import Journal
from streamshard.engine.run.phases import Watcher
from streamshard.engine.run.runner import Jobs
from streamshard.engine.run.span_writer import (
    FilledSpan,
    Resources,
    SmallFiles,
    SpanTask,
    SpanWriter,
    TargetFiles,
)
from streamshard.engine.run.work import FileEndings, Span, SpanResult, TargetFile
from streamshard.io.changes import NewFiles, open_sink
from streamshard.io.entries import examine, exists
from streamshard.io.files import target_errors
from streamshard.io.page_cache import drop_file
from streamshard.io.preallocation import Reservation
from streamshard.io.writable import LEAST_BYTES

if TYPE_CHECKING:
    from streamshard.engine.jobs.proofs import StagedProof

_KEPT_FILES: Final = 8
"""The last files written: they are not yet on disk, and cannot be dropped from the cache."""


class Partial:
    """A staging directory; all workers of a run share it."""

    def __init__(
        self, path: Path, journal: Journal, reservation: Reservation | None = None
    ) -> None:
        self.path = path
        self.journal = journal
        self.kept_bytes = 0
        """Bytes that an earlier run wrote, and that this run found correct."""
        self._reservation = reservation

    def make_room(self, nbytes: int) -> None:
        """Free preallocated space for bytes that are about to be written."""
        if self._reservation is not None:
            self._reservation.give_back(nbytes)

    def jobs(self, resources: Resources, watcher: Watcher) -> Jobs:
        return _SpanJobs(self, resources, watcher)

    def begin_proof(self) -> "StagedProof":
        from streamshard.engine.jobs.proofs import (
            StagedProof,  # not at the top: for other processes
        )

        return StagedProof.begin(self.path)


class _OpenFile:
    """A target file while its spans are being written."""

    def __init__(self, file: TargetFile, path: Path, *, is_new: bool) -> None:
        self.file = file
        self.path = path
        self.is_new = is_new
        self.nbytes = file.span_bytes
        self.found_bytes = 0 if is_new else examine(path).nbytes
        """Size of the file that an earlier run left."""
        self.sink = open_sink(path, is_new=is_new, nbytes=self.nbytes)
        self._endings = FileEndings(file)
        self._left = len(file.spans)

    def span_done(self, done: FilledSpan) -> bool:
        """Take the result of a finished span; returns whether it was the last."""
        for offset, data in done.ends:
            self.sink.write(memoryview(data), offset)
        self.file.take(done.result)
        self._endings.add(done.result)
        self._left -= 1
        return self._left == 0

    def finish(self) -> int:
        """Write the endings; returns their size."""
        endings = list(self._endings.all())
        for offset, data in endings:
            self.sink.write(memoryview(data), offset)
        self.sink.finish(self.file.mode)
        return sum(len(data) for _, data in endings)


class _SpanJobs(Jobs):
    """The jobs of local files: a span each. All but the bytes of spans is done here.

    Workers that are threads make small new files too, many in one job.
    """

    def __init__(self, staged: Partial, resources: Resources, watcher: Watcher) -> None:
        self._staged = staged
        self._resources = resources
        self._watcher = watcher
        self._shares_memory = current_executor().shares_memory
        self._waiting: dict[int, tuple[_OpenFile, SpanTask]] = {}
        """Number of a job → its file and its span."""
        self._small: dict[int, SmallFiles] = {}
        """Number of a job → its files."""
        self._opened: set[_OpenFile] = set()
        self._finished: deque[Path] = deque()
        """Finished files that are still to be dropped from the page cache."""

    def all(self, files: Iterable[TargetFiles]) -> Iterator[Job[SpanWriter, Any]]:
        """Make all files, and yield the jobs that fill them."""
        number = count()
        for some in files:
            if isinstance(some, TargetFile) or self._is_begun(some):
                for opened in self._files(some.singly()):
                    for span in opened.file.spans:
                        task = self._task(opened, span)
                        self._waiting[next(number)] = opened, task
                        yield self._job(opened, task)
                continue
            with target_errors(self._staged.path):
                self._staged.make_room(some.nbytes)
            self._small[next(number)] = some
            yield partial(_write_small, some, self._staged.path)

    def _is_begun(self, files: SmallFiles) -> bool:
        """Tell whether files are looked at one by one: workers cannot make them, or one exists."""
        return not self._shares_memory or any(map(self._staged.journal.holds, files.paths))

    def _files(self, files: Iterable[TargetFile]) -> Iterator[_OpenFile]:
        for file in files:
            path = self._staged.path / file.path
            with target_errors(path):
                # After a power failure, the journal may list a file that is gone.
                is_new = not self._staged.journal.holds(file.path) or not exists(path)
                opened = _OpenFile(file, path, is_new=is_new)
            self._opened.add(opened)
            yield opened

    def _task(self, opened: _OpenFile, span: Span) -> SpanTask:
        """Describe a span; frees space for what will be written."""
        known = None
        if not opened.is_new:
            known = self._staged.journal.find(opened.file.path, span.offset)
        if known is not None and span.offset + known.nbytes > opened.found_bytes:
            known = None  # the file was cut off
        if known is None:
            with target_errors(opened.path):
                self._staged.make_room(span.nbytes)
        return SpanTask(opened.path, span, opened.is_new, known)

    def _job(self, opened: _OpenFile, task: SpanTask) -> Job[SpanWriter, FilledSpan]:
        if self._shares_memory:
            return partial(SpanWriter.write, task=task, sink=opened.sink)
        is_shared = len(opened.file.spans) > 1 or bool(opened.file.endings)
        is_direct = opened.is_new and opened.nbytes >= LEAST_BYTES
        return partial(SpanWriter.fill, task=task, is_shared=is_shared, is_direct=is_direct)

    def take(self, number: int, done: Any) -> None:  # noqa: ANN401
        if number in self._small:
            self._take_small(self._small.pop(number), done)
        else:
            self._take_span(*self._waiting.pop(number), done)

    def _take_small(self, files: SmallFiles, results: Sequence[SpanResult]) -> None:
        with target_errors(self._staged.path):
            both = zip(files.paths, results, strict=True)
            self._staged.journal.note_all((path, 0, result.written) for path, result in both)
        files.take(results)
        self._watcher.advance(files.nbytes - sum(result.written.nbytes for result in results))
        if self._resources.drops_behind:
            self._finished.extend(self._staged.path / path for path in files.paths)
            self._drop(keep=_KEPT_FILES)

    def _take_span(self, opened: _OpenFile, task: SpanTask, done: FilledSpan) -> None:
        """Record a span; after the last one of a file, complete the file."""
        span, written = task.span, done.result.written
        with target_errors(opened.path):
            is_last = opened.span_done(done)
            if done.is_kept:
                self._staged.kept_bytes += written.nbytes
                self._watcher.keep(span.nbytes)
                self._watcher.advance(span.nbytes)
            else:
                self._staged.journal.note(opened.file.path, span.offset, written)
                # Progress counts data before compression: add what compression saved.
                self._watcher.advance(span.nbytes - written.nbytes)
            if is_last:
                self._watcher.advance(opened.finish())
                self._opened.discard(opened)
                if self._resources.drops_behind:
                    self._finished.append(opened.path)
                    self._drop(keep=_KEPT_FILES)

    def _drop(self, *, keep: int) -> None:
        """Drop finished files from the page cache, except the last, which are not yet on disk."""
        while len(self._finished) > keep:
            drop_file(self._finished.popleft())

    def synced(self) -> None:
        self._drop(keep=0)

    def close(self) -> None:
        for left in self._opened:
            left.sink.close()


def _write_small(files: SmallFiles, root: Path, writer: SpanWriter) -> Sequence[SpanResult]:
    with target_errors(root):
        return files.write(writer, NewFiles(root, writer.stop))
