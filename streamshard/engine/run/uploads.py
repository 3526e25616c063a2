"""Uploads target files, which an object store takes only from the beginning to the end."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Final, Self

from streamshard.engine.jobs.executor import Job
from streamshard.engine.jobs.proofs import TargetProof
from streamshard.engine.journals.upload_journal import UploadJournal
from streamshard.engine.run.runner import FileEndings, StagedFiles
from streamshard.engine.run.source_check import Ranges
from streamshard.engine.run.span_writer import SpanWriter, TargetFiles
from streamshard.engine.run.work import FinishedFile, SpanResult, TargetFile, ignore
from streamshard.errors import TargetError
from streamshard.io.changes import open_sink
from streamshard.io.entries import read_all
from streamshard.io.files import target_errors
from streamshard.io.retry import try_again
from streamshard.io.sink import Sink

_SMALL_BYTES: Final = 1 << 20
"""Largest file for which a request takes much longer than its bytes do."""
_TOGETHER: Final = 16
"""Such files that a worker uploads side by side."""


@dataclass(frozen=True, slots=True)
class _BucketProof(TargetProof):
    """Proof of a target in a bucket: there, the journal's first object tells runs apart.

    It belongs to the journal, and is the same everywhere. What a service acknowledged is durable.
    """

    place: Path
    content: bytes

    @classmethod
    def begin(cls, header: Path) -> Self:
        return cls(header, read_all(header))

    def require_current(self) -> None:
        try:
            found = read_all(self.place)
        except OSError as error:
            raise TargetError(f"cannot be read here ({error.strerror})", path=self.place) from error
        if found != self.content:
            message = "is another run's here; are the endpoint and the credentials"
            raise TargetError(f"{message} the same on all machines?", path=self.place)


class Uploads(StagedFiles):
    """The objects of an unfinished target: a job for each file, as an object grows at its end."""

    def __init__(self, path: Path, journal: UploadJournal) -> None:
        self.path = path
        self._journal = journal
        self._waiting: dict[int, Sequence[TargetFile]] = {}

    def ranges(self) -> Iterator[Ranges]:
        return self._journal.ranges()

    def begin_proof(self) -> TargetProof:
        return _BucketProof.begin(self._journal.header_path)

    def jobs(
        self, files: Iterable[TargetFiles]
    ) -> Iterator[Job[SpanWriter, Sequence[FinishedFile]] | None]:
        number = count()
        for group in _grouped(self._left(files)):
            if group[0].is_last:
                yield None
            self._waiting[next(number)] = group
            sent = [replace(f, take=f.take if f.take is ignore else _hand_back) for f in group]
            yield partial(_upload, files=sent, root=self.path)

    def _left(self, files: Iterable[TargetFiles]) -> Iterator[TargetFile]:
        for file in chain.from_iterable(some.singly() for some in files):
            earlier = self._journal.find(file.path)
            if earlier is not None and file.fits(earlier):
                self.kept_bytes += earlier.written.nbytes
                self._watcher.keep(earlier.written.nbytes)
                self._watcher.advance(file.nbytes)
                file.finish(earlier)
            else:
                yield file

    def take(self, number: int, done: Sequence[FinishedFile], ranges: Ranges) -> None:
        with target_errors(self.path / done[0].path):
            self._journal.note_all(done, ranges)
        for file, uploaded in zip(self._waiting.pop(number), done, strict=True):
            file.finish(uploaded)
            # Progress counts data before compression: add endings, and what compression saved.
            endings_bytes = file.nbytes - file.span_bytes
            self._watcher.advance(file.nbytes + endings_bytes - uploaded.written.nbytes)


def _hand_back(result: SpanResult) -> None:
    """Leave a result to the process that leads the run."""


def _grouped(files: Iterable[TargetFile]) -> Iterator[Sequence[TargetFile]]:
    """Yield files that are uploaded by one job each: small ones together, the last one alone."""
    small: list[TargetFile] = []
    for file in files:
        is_small = file.nbytes <= _SMALL_BYTES and not file.is_last
        if is_small:
            small.append(file)
        if small and (file.is_last or len(small) == _TOGETHER):
            yield small
            small = []
        if not is_small:
            yield [file]
    if small:
        yield small


def _upload(writer: SpanWriter, files: Sequence[TargetFile], root: Path) -> Sequence[FinishedFile]:
    if len(files) == 1:
        whole = partial(_upload_once, writer, files[0], root / files[0].path)
        with target_errors(root / files[0].path):
            return [try_again(whole, writer.stop)]
    with ExitStack() as stack:
        filled = list[_Filled]()
        for file in files:
            with target_errors(root / file.path):
                fill = partial(_fill, writer, file, root / file.path)
                filled.append(try_again(fill, writer.stop))
            stack.callback(filled[-1].sink.close)
        writer.require_current()  # the next requests make the objects exist
        with ThreadPoolExecutor(len(filled)) as pool:
            return list(pool.map(_Filled.finish, filled))


def _upload_once(writer: SpanWriter, file: TargetFile, path: Path) -> FinishedFile:
    filled = _fill(writer, file, path)
    with closing(filled.sink):
        writer.require_current()  # the next request makes the object exist
        return filled.finish()


@dataclass(frozen=True, slots=True)
class _Filled:
    """A file whose bytes are all handed over; it is there once it is finished."""

    path: Path
    sink: Sink
    mode: int | None
    endings: FileEndings

    def finish(self) -> FinishedFile:
        with target_errors(self.path):
            self.sink.finish(self.mode)
        return self.endings.finished(self.sink.version)


def _fill(writer: SpanWriter, file: TargetFile, path: Path) -> _Filled:
    """Hand a file over, span after span, in the order of their bytes."""
    sink = open_sink(path, nbytes=file.nbytes, is_last=file.is_last)
    late = _LateEndings(file, sink)
    try:
        for span in file.spans:
            late.write(span.offset)
            late.endings.add(writer.window.write(span, sink))
        late.write(None)
    except BaseException:
        sink.close()
        raise
    return _Filled(path, sink, file.mode, late.endings)


class _LateEndings:
    """The endings of a file, each written as soon as the spans before it are."""

    def __init__(self, file: TargetFile, sink: Sink) -> None:
        self.endings = FileEndings(file)
        self._sink = sink
        self._waiting = deque(sorted(file.endings, key=lambda ending: ending.offset))

    def write(self, before: int | None) -> None:
        """Write the endings before an offset, or all that are left."""
        while self._waiting and (before is None or self._waiting[0].offset < before):
            ending = self._waiting.popleft()
            data = self.endings.serialize(ending)
            self._sink.write(memoryview(data), ending.offset)
