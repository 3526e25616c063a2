"""Runs the work: a few workers, one window each, files finished as they complete."""

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamshard.engine.io.direct_io import LEAST_BYTES, aligned, open_direct
from streamshard.engine.io.durability import sync_tree
from streamshard.engine.io.files import Decoder, SourceReader, open_target, target_errors, write_all
from streamshard.engine.io.page_cache import drop_file
from streamshard.engine.run import resident_memory
from streamshard.engine.run.phases import SYNCING, WRITING, Watcher
from streamshard.engine.run.staged_files import Partial
from streamshard.engine.run.window import Window, unwritten_bytes
from streamshard.engine.run.work import Span, TargetFile
from streamshard.model import SourceFile

_KEPT_FILES: Final = 8
"""So many that were written last are not yet on the disk, and cannot be forgotten."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a run may use."""

    workers: int
    window_bytes: int
    scratch_bytes: int
    drops_behind: bool = False
    """Whether the system is to forget what was read and written, and not what others need."""


class _OpenFile:
    """A target file while its spans are being written."""

    def __init__(self, file: TargetFile, path: Path, *, is_new: bool) -> None:
        self.file = file
        self.path = path
        self.is_new = is_new
        self.descriptor = open_target(path, is_new=is_new)
        # Of what was there before, the cache may hold more than was written through it.
        goes_past = is_new and sum(span.nbytes for span in file.spans) >= LEAST_BYTES
        self.direct = open_direct(path, self.descriptor) if goes_past else -1
        self._left = len(file.spans)
        self._lock = threading.Lock()

    def span_done(self) -> bool:
        """Count a span; True for the one that was last."""
        with self._lock:
            self._left -= 1
            return self._left == 0

    def finish(self) -> int:
        """Write the endings; returns their size."""
        endings = self.file.endings()
        for offset, data in endings:
            write_all(self.descriptor, memoryview(data), offset)
        if self.file.mode is not None:
            os.fchmod(self.descriptor, self.file.mode)
        self.close()
        return sum(len(data) for _, data in endings)

    def close(self) -> None:
        """Close the file unless that is done."""
        for descriptor in (self.descriptor, self.direct):
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptor = self.direct = -1


class Engine:
    """Writes target files from source files with fixed buffers."""

    def __init__(
        self,
        sources: tuple[SourceFile, ...],
        decoders: Mapping[int, Decoder],
        resources: Resources,
        watcher: Watcher,
        partial: Partial,
    ) -> None:
        self._sources = sources
        self._decoders = decoders
        self._resources = resources
        self._watcher = watcher
        self._partial = partial
        self._local = threading.local()
        self._stop = threading.Event()
        self._readers: list[SourceReader] = []
        self._opened: set[_OpenFile] = set()
        self._finished: deque[Path] = deque()
        """Files that the system is still to forget."""

    def run(self, files: Iterable[TargetFile]) -> None:
        """Write all files of a partial target, a bounded number at a time, and sync them.

        The first error, or an interrupt, stops the run within a window of each worker.

        Raises
        ------
        TargetError
            A file cannot be written; the message names it.
        SourceError, IntegrityError
            A source cannot be read, or is not what it was.
        """
        pool = ThreadPoolExecutor(self._resources.workers, thread_name_prefix="streamshard")
        pending: set[Future[None]] = set()
        self._watcher.enter(WRITING)
        try:
            for opened, span in self._spans(files):
                pending.add(pool.submit(self._write, opened, span))
                if len(pending) > 2 * self._resources.workers:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    for future in done:
                        future.result()
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
                left.close()

    def _spans(self, files: Iterable[TargetFile]) -> Iterator[tuple[_OpenFile, Span]]:
        for file in files:
            path = self._partial.path / file.path
            with target_errors(path):
                # A power failure may take a name, and leave the note of what the file held.
                is_new = not self._partial.journal.holds(file.path) or not path.exists()
                opened = _OpenFile(file, path, is_new=is_new)
            self._opened.add(opened)
            for span in file.spans:
                yield opened, span

    def _write(self, opened: _OpenFile, span: Span) -> None:
        with target_errors(opened.path):
            self._keep_or_write(opened, span)
            if opened.span_done():
                self._watcher.advance(opened.finish())
                self._opened.discard(opened)
                if self._resources.drops_behind:
                    self._finished.append(opened.path)
                    self._drop(keep=_KEPT_FILES)

    def _keep_or_write(self, opened: _OpenFile, span: Span) -> None:
        """Have a span as it is to be."""
        window, partial, path = self._window(), self._partial, opened.file.path
        known = None if opened.is_new else partial.journal.find(path, span.offset)
        if known is not None and window.recall(span, opened.descriptor, known):
            partial.keep(known.nbytes)
            self._watcher.keep(span.nbytes)
            self._watcher.advance(span.nbytes)
            return
        partial.make_room(span.nbytes)
        written = window.write(span, opened.descriptor, opened.direct, is_new=opened.is_new)
        partial.journal.note(path, span.offset, written)
        # What is compressed was counted with its size before that.
        self._watcher.advance(span.nbytes - written.nbytes)

    def _drop(self, *, keep: int) -> None:
        """Have the system forget files, but for the last, which are still on their way to disk."""
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
                told=self._watcher.advance,
            )
        window: Window = self._local.window
        return window
