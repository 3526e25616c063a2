"""Writes target files with a few workers that have one window each."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from streamshard.engine.run import resident_memory
from streamshard.engine.run.endings import FileEndings
from streamshard.engine.run.phases import SYNCING, WRITING, Watcher
from streamshard.engine.run.source_reader import Decoder, SourceReader
from streamshard.engine.run.staged_files import Partial
from streamshard.engine.run.uploads import Uploads, upload_file
from streamshard.engine.run.window import Window, unwritten_bytes
from streamshard.engine.run.work import Span, SpanResult, TargetFile
from streamshard.io.direct_io import aligned
from streamshard.io.durability import sync_tree
from streamshard.io.entries import exists
from streamshard.io.files import target_errors
from streamshard.io.page_cache import drop_file
from streamshard.io.retry import try_again
from streamshard.io.sink import open_sink
from streamshard.model import SourceFile

_KEPT_FILES: Final = 8
"""The last files written: they are not yet on disk, and cannot be dropped from the cache."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources that a run may use."""

    workers: int
    window_bytes: int
    scratch_bytes: int
    drops_behind: bool = False
    """Whether to drop read and written data from the page cache, to spare other programs' data."""


class _OpenFile:
    """A target file while its spans are being written."""

    def __init__(self, file: TargetFile, path: Path, *, is_new: bool) -> None:
        self.file = file
        self.path = path
        self.is_new = is_new
        nbytes = sum(span.nbytes for span in file.spans)
        self.sink = open_sink(path, is_new=is_new, nbytes=nbytes)
        self._endings = FileEndings(file)
        self._left = len(file.spans)

    def span_done(self, result: SpanResult) -> bool:
        """Take the result of a finished span; returns whether it was the last."""
        self.file.take(result)
        self._endings.add(result)
        self._left -= 1
        return self._left == 0

    def finish(self) -> int:
        """Write the endings; returns their size."""
        endings = list(self._endings.all())
        for offset, data in endings:
            self.sink.write(memoryview(data), offset)
        self.sink.finish(self.file.mode)
        return sum(len(data) for _, data in endings)


class Engine:
    """Writes target files from source files with fixed buffers."""

    def __init__(
        self,
        sources: tuple[SourceFile, ...],
        decoders: Mapping[int, Decoder],
        resources: Resources,
        watcher: Watcher,
        partial_target: Partial | Uploads,
    ) -> None:
        self._sources = sources
        self._decoders = decoders
        self._resources = resources
        self._watcher = watcher
        self._partial = partial_target
        self._local = threading.local()
        self._lock = threading.Lock()
        """Held while a result is taken."""
        self._stop = threading.Event()
        self._readers: list[SourceReader] = []
        self._opened: set[_OpenFile] = set()
        self._finished: deque[Path] = deque()
        """Finished files that are still to be dropped from the page cache."""

    def run(self, files: Iterable[TargetFile]) -> None:
        """Write all files of a staged target, a bounded number at a time, and sync them.

        After the first error or an interrupt, each worker stops within one window.

        Raises
        ------
        TargetError
            A file cannot be written; the message names it.
        SourceError, IntegrityError
            A source cannot be read, or has changed.
        """
        pool = ThreadPoolExecutor(self._resources.workers, thread_name_prefix="streamshard")
        pending: set[Future[None]] = set()
        self._watcher.enter(WRITING)
        try:
            for task, waits in self._tasks(files):
                if waits or len(pending) > 2 * self._resources.workers:
                    how = ALL_COMPLETED if waits else FIRST_COMPLETED
                    done, pending = wait(pending, return_when=how)
                    for future in done:
                        future.result()
                pending.add(pool.submit(task))
            for future in pending:
                future.result()
            self._watcher.enter(SYNCING)
            with target_errors(self._partial.path):
                sync_tree(self._partial.path)
                self._drop(keep=0)
        finally:
            self._stop.set()
            pool.shutdown(cancel_futures=True)
            for reader in self._readers:
                reader.close()
            for left in self._opened:
                left.sink.close()

    def _tasks(self, files: Iterable[TargetFile]) -> Iterator[tuple[Callable[[], None], bool]]:
        """Yield a task for each span of local files, for each whole file of a bucket.

        With each comes whether it waits for all tasks before it.
        """
        partial_target = self._partial
        if isinstance(partial_target, Uploads):
            for file in files:
                yield partial(self._upload, partial_target, file), file.is_last
        else:
            for opened, span in self._spans(files, partial_target):
                yield partial(self._write, partial_target, opened, span), False

    def _upload(self, uploads: Uploads, file: TargetFile) -> None:
        """Upload a file, unless an earlier run did."""
        path, kept = uploads.path / file.path, uploads.journal.results_of(file.path)
        with target_errors(path):
            if kept is None:
                version, results, ending_bytes = try_again(
                    lambda: upload_file(file, path, self._window()), self._stop
                )
                uploads.journal.note(file.path, version, results)
            else:
                results, ending_bytes = list(kept), sum(len(e.data) for e in file.endings)
                nbytes = sum(result.written.nbytes for result in results)
                uploads.keep(nbytes + ending_bytes)
                self._watcher.keep(nbytes + ending_bytes)
                self._watcher.advance(nbytes)
        with self._lock:
            for result in results:
                file.take(result)
        # Progress counts data before compression: add what compression saved.
        saved = sum(s.nbytes for s in file.spans) - sum(r.written.nbytes for r in results)
        self._watcher.advance(ending_bytes + saved)

    def _spans(
        self, files: Iterable[TargetFile], partial_target: Partial
    ) -> Iterator[tuple[_OpenFile, Span]]:
        for file in files:
            path = partial_target.path / file.path
            with target_errors(path):
                # After a power failure, the journal may list a file that is gone.
                is_new = not partial_target.journal.holds(file.path) or not exists(path)
                opened = _OpenFile(file, path, is_new=is_new)
            self._opened.add(opened)
            for span in file.spans:
                yield opened, span

    def _write(self, partial_target: Partial, opened: _OpenFile, span: Span) -> None:
        with target_errors(opened.path):
            result = self._keep_or_write(partial_target, opened, span)
            with self._lock:
                is_last = opened.span_done(result)
            if is_last:
                self._watcher.advance(opened.finish())
                self._opened.discard(opened)
                if self._resources.drops_behind:
                    self._finished.append(opened.path)
                    self._drop(keep=_KEPT_FILES)

    def _keep_or_write(self, partial_target: Partial, opened: _OpenFile, span: Span) -> SpanResult:
        """Keep a span that an earlier run wrote correctly, else write it."""
        window, path = self._window(), opened.file.path
        known = None if opened.is_new else partial_target.journal.find(path, span.offset)
        if known is not None:
            kept = window.recall(span, opened.sink, known)
            if kept is not None:
                partial_target.keep(known.nbytes)
                self._watcher.keep(span.nbytes)
                self._watcher.advance(span.nbytes)
                return kept
        partial_target.make_room(span.nbytes)
        result = window.write(span, opened.sink, is_new=opened.is_new)
        partial_target.journal.note(path, span.offset, result.written)
        # Progress counts data before compression: add what compression saved.
        self._watcher.advance(span.nbytes - result.written.nbytes)
        return result

    def _drop(self, *, keep: int) -> None:
        """Drop finished files from the page cache, except the last, which are not yet on disk."""
        while len(self._finished) > keep:
            drop_file(self._finished.popleft())

    def _window(self) -> Window:
        if not hasattr(self._local, "window"):
            drops = self._resources.drops_behind
            reader = SourceReader(
                self._sources,
                self._decoders,
                drops_behind=drops,
                workers=self._resources.workers,
                stop=self._stop,
            )
            self._readers.append(reader)
            buffer = aligned(self._resources.window_bytes)
            scratch = memoryview(bytearray(self._resources.scratch_bytes))
            behind = unwritten_bytes(resident_memory.available_bytes())
            self._local.window = Window(
                buffer,
                scratch,
                reader,
                behind,
                drops_behind=drops,
                stop=self._stop,
                progress=self._watcher.advance,
            )
        window: Window = self._local.window
        return window
