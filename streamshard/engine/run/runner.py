"""Writes target files: hands spans to workers, and does the rest in the order of their results."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

from streamshard.engine.jobs.executor import Job, current_executor
from streamshard.engine.jobs.target_proof import BucketProof, StagedProof, TargetProof
from streamshard.engine.journals.staged_files import Partial
from streamshard.engine.run.endings import FileEndings
from streamshard.engine.run.phases import SYNCING, WRITING, Watcher
from streamshard.engine.run.span_writer import (
    FilledSpan,
    Resources,
    SpanTask,
    SpanWriter,
    WritingTools,
)
from streamshard.engine.run.uploads import Uploaded, Uploads
from streamshard.engine.run.work import Span, SpanResult, TargetFile, are_of, ignore
from streamshard.io.changes import open_sink, sync_tree
from streamshard.io.entries import examine, exists
from streamshard.io.files import target_errors
from streamshard.io.page_cache import drop_file
from streamshard.io.writable import LEAST_BYTES
from streamshard.model import SourceFile

_KEPT_FILES: Final = 8
"""The last files written: they are not yet on disk, and cannot be dropped from the cache."""


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


class _SpanJobs:
    """The jobs of local files: a span each. All but the bytes of spans is done here."""

    def __init__(
        self, staged: Partial, resources: Resources, watcher: Watcher, *, shares_memory: bool
    ) -> None:
        self._staged = staged
        self._resources = resources
        self._watcher = watcher
        self._shares_memory = shares_memory
        self._waiting: dict[int, tuple[_OpenFile, SpanTask]] = {}
        """Number of a job → its file and its span."""
        self._opened: set[_OpenFile] = set()
        self._finished: deque[Path] = deque()
        """Finished files that are still to be dropped from the page cache."""

    def all(self, files: Iterable[TargetFile]) -> Iterator[Job[SpanWriter, FilledSpan]]:
        """Make all files, and yield the jobs that fill them."""
        number = count()
        for opened in self._files(files):
            for span in opened.file.spans:
                task = self._task(opened, span)
                self._waiting[next(number)] = opened, task
                yield self._job(opened, task)

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

    def take(self, number: int, done: FilledSpan) -> None:
        """Record a span; after the last one of a file, complete the file."""
        opened, task = self._waiting.pop(number)
        span, written = task.span, done.result.written
        with target_errors(opened.path):
            is_last = opened.span_done(done)
            if done.is_kept:
                self._staged.keep(written.nbytes)
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
        """Take note that all files are on disk."""
        self._drop(keep=0)

    def close(self) -> None:
        """Close the files that are not complete."""
        for left in self._opened:
            left.sink.close()


class _UploadJobs:
    """The jobs of a bucket: a file each, as an object grows only at its end."""

    def __init__(self, uploads: Uploads, watcher: Watcher) -> None:
        self._uploads = uploads
        self._watcher = watcher
        self._waiting: dict[int, TargetFile] = {}

    def all(self, files: Iterable[TargetFile]) -> Iterator[Job[SpanWriter, Uploaded] | None]:
        """Yield the jobs that upload files, unless an earlier run did."""
        number = count()
        for file in files:
            kept = self._uploads.journal.results_of(file.path)
            if kept is not None and are_of(kept, file):
                self._keep(file, kept)
                continue
            if file.is_last:
                yield None
            self._waiting[next(number)] = file
            path = self._uploads.path / file.path
            yield partial(SpanWriter.upload, file=replace(file, take=ignore), path=path)

    def _keep(self, file: TargetFile, results: Sequence[SpanResult]) -> None:
        ending_bytes = sum(len(ending.data) for ending in file.endings)
        nbytes = sum(result.written.nbytes for result in results)
        self._uploads.keep(nbytes + ending_bytes)
        self._watcher.keep(nbytes + ending_bytes)
        self._watcher.advance(nbytes)
        self._finish(file, results, ending_bytes)

    def take(self, number: int, done: Uploaded) -> None:
        """Record an upload."""
        file = self._waiting.pop(number)
        with target_errors(self._uploads.path / file.path):
            self._uploads.journal.note(file.path, done.version, done.results)
        self._finish(file, done.results, done.ending_bytes)

    def _finish(self, file: TargetFile, results: Sequence[SpanResult], ending_bytes: int) -> None:
        for result in results:
            file.take(result)
        # Progress counts data before compression: add what compression saved.
        saved = file.span_bytes - sum(r.written.nbytes for r in results)
        self._watcher.advance(ending_bytes + saved)

    def synced(self) -> None:
        """Do nothing: what a service acknowledged is durable."""

    def close(self) -> None:
        """Do nothing: no file is open."""


class Engine:
    """Writes target files from source files with fixed buffers.

    Only this process makes, completes and records files. Workers, which may be on other machines,
    write at offsets that are theirs alone: a span that is written twice does no harm.
    """

    def __init__(
        self,
        sources: tuple[SourceFile, ...],
        resources: Resources,
        watcher: Watcher,
        partial_target: Partial | Uploads,
    ) -> None:
        self._tools = WritingTools(sources, resources)
        self._resources = resources
        self._watcher = watcher
        self._partial = partial_target

    def run(self, files: Iterable[TargetFile]) -> None:
        """Write all files of a staged target, a bounded number at a time, and sync them.

        After the first error or an interrupt, each worker stops within one window.
        """
        self._watcher.enter(WRITING)
        jobs: _SpanJobs | _UploadJobs
        if isinstance(self._partial, Uploads):
            jobs = _UploadJobs(self._partial, self._watcher)
        else:
            shares_memory = current_executor().shares_memory
            jobs = _SpanJobs(
                self._partial, self._resources, self._watcher, shares_memory=shares_memory
            )
        with closing(jobs):
            with self._proof() as proof:
                self._run(jobs, files, replace(self._tools, target=proof))
            self._watcher.enter(SYNCING)
            with target_errors(self._partial.path):
                sync_tree(self._partial.path)
                jobs.synced()

    def _run(self, jobs: Any, files: Iterable[TargetFile], tools: WritingTools) -> None:  # noqa: ANN401
        """Run all jobs, of either kind."""
        found = current_executor().run(
            jobs.all(files),
            tools,
            workers=self._resources.workers,
            progress=self._watcher.advance,
            needed_bytes=self._resources.needed_bytes,
        )
        with closing(found):
            for number, done in found:
                jobs.take(number, done)

    @contextmanager
    def _proof(self) -> Iterator[TargetProof | None]:
        """Let other processes tell this run's target from others, as long as it goes on."""
        if current_executor().shares_memory:
            yield None
            return
        proof: TargetProof
        with target_errors(self._partial.path):
            if isinstance(self._partial, Uploads):
                proof = BucketProof.begin(self._partial.journal.header_path)
            else:
                proof = StagedProof.begin(self._partial.path)
        try:
            yield proof
        finally:
            with target_errors(self._partial.path):
                proof.end()
