"""A directory of unfinished target files: its journal, the space for the rest, and its jobs."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from streamshard.engine.jobs.executor import Job, current_executor
from streamshard.engine.journals.journal import Journal
from streamshard.engine.run.runner import FileEndings, StagedFiles
from streamshard.engine.run.source_check import Ranges
from streamshard.engine.run.span_writer import FileBatch, FilledSpan, SpanWriter, TargetFiles
from streamshard.engine.run.work import FinishedFile, Span, SpanResult, TargetFile
from streamshard.io.changes import open_sink, remove_file, write_small
from streamshard.io.durability import Reservation
from streamshard.io.entries import exists
from streamshard.io.files import target_errors
from streamshard.io.page_cache import drop_file
from streamshard.io.sink import open_to_fill
from streamshard.io.writable import LEAST_BYTES

if TYPE_CHECKING:
    from streamshard.engine.jobs.proofs import StagedProof

_KEPT_FILES: Final = 8
"""The last files written: they are not yet on disk, and cannot be dropped from the cache."""


class _OpenFile:
    """A target file while its spans are being written."""

    def __init__(self, file: TargetFile, path: Path) -> None:
        self.file = file
        self.path = path
        self.nbytes = file.span_bytes
        self.sink = open_sink(path, nbytes=self.nbytes)
        self._endings = FileEndings(file)
        self._ranges = list[Ranges]()
        self._left = len(file.spans)

    def span_done(self, done: FilledSpan, ranges: Ranges) -> bool:
        """Take the result of a finished span; returns whether it was the last."""
        for offset, data in done.ends:
            self.sink.write(memoryview(data), offset)
        self._endings.add(done.result)
        self._ranges.append(ranges)
        self._left -= 1
        return self._left == 0

    def finish(self) -> tuple[FinishedFile, Ranges]:
        """Write the endings; returns what the file is now, and what was read for it."""
        for offset, data in self._endings.all():
            self.sink.write(memoryview(data), offset)
        self.sink.finish(self.file.mode)
        return self.file.finish(self._endings.finished()), np.concatenate(self._ranges)


class Partial(StagedFiles):
    """A staging directory, whose files are written by jobs of a span each.

    Workers that are threads make small files too, many in one job. First of all, what an earlier
    run finished is read back.
    """

    def __init__(
        self, path: Path, journal: Journal, reservation: Reservation | None = None
    ) -> None:
        self.path = path
        self._journal = journal
        self._reservation = reservation
        self._is_read_back = journal.is_empty
        self._shares_memory = current_executor().shares_memory
        self._earlier: dict[int, FinishedFile] = {}
        """Number of a job → the file that it reads back."""
        self._waiting: dict[int, tuple[_OpenFile, Span]] = {}
        """Number of a job → its file and its span."""
        self._small: dict[int, FileBatch] = {}
        """Number of a job → its files."""
        self._opened: set[_OpenFile] = set()
        self._finished: deque[Path] = deque()
        """Finished files that are still to be dropped from the page cache."""

    def ranges(self) -> Iterator[Ranges]:
        return self._journal.ranges()

    def begin_proof(self) -> "StagedProof":
        # Not at the top: for other processes.
        from streamshard.engine.jobs.proofs import StagedProof

        return StagedProof.begin(self.path)

    def _finished_before(self) -> Iterator[FinishedFile]:
        """Yield, once, what an earlier run finished, and is still there."""
        if self._is_read_back:
            return
        self._is_read_back = True
        for file in self._journal.finished():
            path = self.path / file.path
            with target_errors(path):
                # After a power failure, the journal may list a file that is gone.
                if exists(path):
                    open_to_fill(path, is_direct=False).close()  # a link to another one is refused
                    yield file
                else:
                    self._journal.forget(file.path)

    def _take_back(self, file: FinishedFile) -> None:
        with target_errors(self.path / file.path):
            remove_file(self.path / file.path)
        self._journal.forget(file.path)

    def _make_room(self, path: Path, nbytes: int) -> None:
        if self._reservation is not None:
            with target_errors(path):
                self._reservation.give_back(nbytes)

    def jobs(self, files: Iterable[TargetFiles]) -> Iterator[Job[SpanWriter, Any] | None]:
        number = count()
        for file in self._finished_before():
            self._earlier[next(number)] = file
            yield partial(SpanWriter.is_so, path=self.path / file.path, written=file.written)
        if self._earlier:
            yield None
        for target_files in files:
            if isinstance(target_files, TargetFile) or self._is_begun(target_files):
                for opened in self._new(target_files.singly()):
                    for span in opened.file.spans:
                        self._make_room(opened.path, span.nbytes)
                        self._waiting[next(number)] = opened, span
                        yield self._job(opened, span)
                continue
            self._make_room(self.path, target_files.nbytes)
            self._small[next(number)] = target_files
            yield partial(_write_small, target_files, self.path)

    def _is_begun(self, files: FileBatch) -> bool:
        """Tell whether files are looked at one by one: workers cannot make them, or one exists."""
        return not self._shares_memory or any(map(self._journal.holds, files.paths))

    def _new(self, files: Iterable[TargetFile]) -> Iterator[_OpenFile]:
        for file in files:
            path, earlier = self.path / file.path, self._journal.find(file.path)
            if earlier is not None and not file.fits(earlier):
                self._take_back(earlier)
            elif earlier is not None:
                self._keep(file, earlier, path)
                continue
            with target_errors(path):
                opened = _OpenFile(file, path)
            self._opened.add(opened)
            yield opened

    def _keep(self, file: TargetFile, earlier: FinishedFile, path: Path) -> None:
        if file.mode is not None:
            with target_errors(path):
                open_to_fill(path, is_direct=False).finish(file.mode)
        self.kept_bytes += earlier.written.nbytes
        self._watcher.keep(earlier.written.nbytes)
        # Progress counts data before compression: add what compression saved.
        self._watcher.advance(file.nbytes)
        file.finish(earlier)

    def _job(self, opened: _OpenFile, span: Span) -> Job[SpanWriter, FilledSpan]:
        if self._shares_memory:
            return partial(SpanWriter.write, path=opened.path, span=span, sink=opened.sink)
        is_shared = len(opened.file.spans) > 1 or bool(opened.file.endings)
        is_direct = opened.nbytes >= LEAST_BYTES
        fill = partial(SpanWriter.fill, is_shared=is_shared, is_direct=is_direct)
        return partial(fill, path=opened.path, span=span)

    def take(self, number: int, done: Any, ranges: Ranges) -> None:  # noqa: ANN401
        if number in self._earlier:
            earlier = self._earlier.pop(number)
            if not done:
                self._take_back(earlier)
        elif number in self._small:
            self._take_small(self._small.pop(number), done, ranges)
        else:
            self._take_span(*self._waiting.pop(number), done, ranges)

    def _take_small(self, files: FileBatch, results: Sequence[SpanResult], ranges: Ranges) -> None:
        finished = [
            FinishedFile(path, "", result.written, [result])
            for path, result in zip(files.paths, results, strict=True)
        ]
        with target_errors(self.path):
            self._journal.note_all(finished, ranges)
        files.take(results)
        self._watcher.advance(files.nbytes - sum(result.written.nbytes for result in results))
        if self._resources.drops_behind:
            self._finished.extend(self.path / path for path in files.paths)
            self._drop(keep=_KEPT_FILES)

    def _take_span(self, opened: _OpenFile, span: Span, done: FilledSpan, ranges: Ranges) -> None:
        with target_errors(opened.path):
            # Progress counts data before compression: add what compression saved.
            self._watcher.advance(span.nbytes - done.result.written.nbytes)
            if opened.span_done(done, ranges):
                finished, read = opened.finish()
                self._journal.note_all([finished], read)
                self._watcher.advance(opened.file.nbytes - opened.nbytes)
                self._opened.discard(opened)
                if self._resources.drops_behind:
                    self._finished.append(opened.path)
                    self._drop(keep=_KEPT_FILES)

    def _drop(self, *, keep: int) -> None:
        while len(self._finished) > keep:
            drop_file(self._finished.popleft())

    def synced(self) -> None:
        self._drop(keep=0)

    def stop(self) -> None:
        for left in self._opened:
            left.sink.close()


def _write_small(files: FileBatch, root: Path, writer: SpanWriter) -> Sequence[SpanResult]:
    with target_errors(root):
        return files.write(writer, partial(write_small, root, writer.stop))
