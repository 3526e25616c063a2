"""A buffer through which bytes are written to a file in large, sequential pieces."""

import threading
from collections.abc import Callable

import numpy as np

from streamshard.io.durability import finish_writeback, start_writeback
from streamshard.io.page_cache import drop_behind
from streamshard.io.retry import StoppedError, try_again
from streamshard.io.sink import LocalSink, Sink


class WriteBuffer:
    """Collects bytes that follow each other, and writes them whenever the buffer is full."""

    def __init__(
        self,
        buffer: memoryview,
        unwritten_bytes: int,
        *,
        drops_behind: bool = False,
        stop: threading.Event | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.buffer = buffer
        self._unwritten_bytes = unwritten_bytes
        self._drops_behind = drops_behind
        self._stop = stop or threading.Event()
        self._progress = progress
        self._file: Sink = LocalSink(-1)
        self._offset = 0
        self._begun = self._filled = 0
        """Start and stop of the part of the buffer that is not written yet."""
        self._start = 0
        """Byte offset where writing began."""

    def begin(self, file: Sink, offset: int) -> None:
        self._file, self._offset, self._start = file, offset, offset
        self._restart()

    def put(self, view: memoryview) -> None:
        while len(view):
            if self._filled == len(self.buffer):
                self.flush()
            piece = view[: len(self.buffer) - self._filled]
            # Other threads run while an array is copied, but not while a view is.
            room = self.buffer[self._filled : self._filled + len(piece)]
            np.frombuffer(room, np.uint8)[:] = np.frombuffer(piece, np.uint8)
            self._filled += len(piece)
            view = view[len(piece) :]

    def put_through(self, view: memoryview) -> None:
        """Write bytes from where they are, behind those in the buffer."""
        if self._filled > self._begun:
            self.flush()
        self._require_going_on()
        self._write_out(view, last=False)

    def flush(self, *, last: bool = False) -> None:
        """Write what is in the buffer; `last`: whether nothing follows."""
        self._require_going_on()
        view = self.buffer[self._begun : self._filled]
        self._write_out(view, last=last)

    def _write_out(self, view: memoryview, *, last: bool) -> None:
        self._deliver(view, last=last)
        self._offset += len(view)
        self.advance(len(view))
        self._restart()

    def _deliver(self, view: memoryview, *, last: bool) -> None:
        self._write(view)
        self._pace(view)

    def _write(self, view: memoryview) -> None:
        try_again(lambda: self._file.write(view, self._offset), self._stop)

    def _pace(self, view: memoryview) -> None:
        """Let the disk keep up with what was written of a view."""
        if len(view) <= len(self.buffer) // 2:
            return
        start_writeback(self._file.descriptor, self._offset, len(view))
        behind = self._offset - self._unwritten_bytes
        if behind >= self._start:
            finish_writeback(self._file.descriptor, behind, len(view))
            if self._drops_behind:
                drop_behind(self._file.descriptor, self._start, behind + len(view))

    def advance(self, nbytes: int) -> None:
        if self._progress is not None:
            self._progress(nbytes)

    def _require_going_on(self) -> None:
        if self._stop.is_set():
            raise StoppedError

    def _restart(self) -> None:
        """Restart the buffer at the file offset's distance from a block boundary."""
        self._begun = self._filled = self._offset % self._file.block_bytes
