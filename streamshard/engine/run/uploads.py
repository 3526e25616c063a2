"""Uploads target files, which an object store takes only from the beginning to the end."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from streamshard.engine.journals.upload_journal import UploadJournal
from streamshard.engine.run.endings import FileEndings
from streamshard.engine.run.window import Window
from streamshard.engine.run.work import SpanResult, TargetFile
from streamshard.io.changes import open_sink
from streamshard.io.sink import Sink


class Uploads:
    """The objects of an unfinished target, with their journal; all workers of a run share it."""

    def __init__(self, path: Path, journal: UploadJournal) -> None:
        self.path = path
        self.journal = journal
        self.kept_bytes = 0
        """Bytes that an earlier run uploaded."""
        self._lock = threading.Lock()

    def keep(self, nbytes: int) -> None:
        """Count bytes that need not be uploaded again."""
        with self._lock:
            self.kept_bytes += nbytes


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A file that was uploaded."""

    version: str
    """The object's etag."""
    results: tuple[SpanResult, ...]
    """The results of its spans."""
    ending_bytes: int
    """Size of its endings."""


def upload_file(
    file: TargetFile, path: Path, window: Window, before_last: Callable[[], None]
) -> Uploaded:
    """Upload a file, span after span, in the order of their bytes.

    `before_last`: called before the request that makes the object exist.
    """
    nbytes = file.span_bytes + sum(len(ending.data) for ending in file.endings)
    sink = open_sink(path, is_new=True, nbytes=nbytes, is_last=file.is_last)
    results: list[SpanResult] = []
    late = _LateEndings(file, sink)
    try:
        for span in file.spans:
            late.write(span.offset)
            results.append(window.write(span, sink, is_new=False))
            late.endings.add(results[-1])
        late.write(None)
        before_last()
        sink.finish(file.mode)
    finally:
        sink.close()
    return Uploaded(sink.version, tuple(results), late.nbytes)


class _LateEndings:
    """The endings of a file, each written as soon as the spans before it are."""

    def __init__(self, file: TargetFile, sink: Sink) -> None:
        self.endings = FileEndings(file)
        self.nbytes = 0
        self._sink = sink
        self._waiting = deque(sorted(file.endings, key=lambda ending: ending.offset))

    def write(self, before: int | None) -> None:
        """Write the endings before an offset, or all that are left."""
        while self._waiting and (before is None or self._waiting[0].offset < before):
            ending = self._waiting.popleft()
            data = self.endings.serialize(ending)
            self._sink.write(memoryview(data), ending.offset)
            self.nbytes += len(data)
