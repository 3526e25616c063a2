"""Uploads target files, which an object store takes only from the beginning to the end."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Self

from streamshard.engine.jobs.executor import Job
from streamshard.engine.jobs.proofs import TargetProof
from streamshard.engine.journals.upload_journal import UploadJournal
from streamshard.engine.run.endings import FileEndings
from streamshard.engine.run.phases import Watcher
from streamshard.engine.run.span_writer import Resources, SpanWriter, TargetFiles
from streamshard.engine.run.work import SpanResult, TargetFile, are_of, ignore
from streamshard.errors import TargetError
from streamshard.io.changes import open_sink
from streamshard.io.entries import read_all
from streamshard.io.files import target_errors
from streamshard.io.retry import try_again
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

    def jobs(self, resources: Resources, watcher: Watcher) -> "_UploadJobs":
        return _UploadJobs(self, watcher)

    def begin_proof(self) -> TargetProof:
        return _BucketProof.begin(self.journal.header_path)


@dataclass(frozen=True, slots=True)
class _BucketProof:
    """Proof of a target in a bucket: there, the journal's first object tells runs apart."""

    place: Path
    content: bytes

    @classmethod
    def begin(cls, header: Path) -> Self:
        """Read the object."""
        return cls(header, read_all(header))

    def end(self) -> None:
        """Leave the object, which belongs to the journal."""

    def shares_cache(self) -> bool:
        """Whether nothing needs to be synced: what a service acknowledged is durable."""
        return True

    def prove(self) -> str:
        self.require_current()
        return ""

    def accept(self, evidence: str) -> None:
        """Accept anything: a bucket is the same everywhere."""

    def require_current(self) -> None:
        try:
            found = read_all(self.place)
        except OSError as error:
            raise TargetError(f"cannot be read here ({error.strerror})", path=self.place) from error
        if found != self.content:
            message = "is another run's here; are the endpoint and the credentials"
            raise TargetError(f"{message} the same on all machines?", path=self.place)


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A file that was uploaded."""

    version: str
    """The object's etag."""
    results: tuple[SpanResult, ...]
    """The results of its spans."""
    ending_bytes: int
    """Size of its endings."""


class _UploadJobs:
    """The jobs of a bucket: a file each, as an object grows only at its end."""

    def __init__(self, uploads: Uploads, watcher: Watcher) -> None:
        self._uploads = uploads
        self._watcher = watcher
        self._waiting: dict[int, TargetFile] = {}

    def all(self, files: Iterable[TargetFiles]) -> Iterator[Job[SpanWriter, Uploaded] | None]:
        """Yield the jobs that upload files, unless an earlier run did."""
        number = count()
        for file in chain.from_iterable(some.singly() for some in files):
            kept = self._uploads.journal.results_of(file.path)
            if kept is not None and are_of(kept, file):
                self._keep(file, kept)
                continue
            if file.is_last:
                yield None
            self._waiting[next(number)] = file
            path = self._uploads.path / file.path
            yield partial(_upload, file=replace(file, take=ignore), path=path)

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


def _upload(writer: SpanWriter, file: TargetFile, path: Path) -> Uploaded:
    """Upload a whole file, as a worker's job."""
    with target_errors(path):
        return try_again(lambda: _upload_once(writer, file, path), writer.stop)


def _upload_once(writer: SpanWriter, file: TargetFile, path: Path) -> Uploaded:
    """Upload a file, span after span, in the order of their bytes."""
    nbytes = file.span_bytes + sum(len(ending.data) for ending in file.endings)
    sink = open_sink(path, is_new=True, nbytes=nbytes, is_last=file.is_last)
    results: list[SpanResult] = []
    late = _LateEndings(file, sink)
    try:
        for span in file.spans:
            late.write(span.offset)
            results.append(writer.window.write(span, sink, is_new=False))
            late.endings.add(results[-1])
        late.write(None)
        writer.require_current()  # the next request makes the object exist
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
