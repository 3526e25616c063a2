"""Writes target files: hands spans to workers, and does the rest in the order of their results."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from streamshard.checksums import crc32, join_crc32
from streamshard.engine.jobs.executor import Job, current_executor
from streamshard.engine.run.phases import SYNCING, WRITING, Progress
from streamshard.engine.run.source_check import Ranges, SourceCheck
from streamshard.engine.run.span_writer import Resources, SpanWriter, TargetFiles, WritingTools
from streamshard.engine.run.work import (
    Ending,
    FinishedFile,
    SpanResult,
    TargetFile,
    Written,
    ignore,
)
from streamshard.io.changes import sync_tree
from streamshard.io.files import target_errors
from streamshard.model import Digest, SourceFile

if TYPE_CHECKING:
    from streamshard.engine.jobs.proofs import TargetProof

_JOB_BYTES: Final = 16 << 20
"""Bytes that a worker reads again in one job."""


class FileEndings:
    """The endings of one file; collects what is written of it, in any order."""

    def __init__(self, file: TargetFile) -> None:
        self._file = file
        self._digests: dict[int, Digest] = {}
        """Byte offset of a region's content → its digest."""
        self._results: list[SpanResult] = []
        self._parts: list[tuple[int, Written]] = []
        """Byte offset of each span and ending → what it is."""

    def add(self, result: SpanResult) -> None:
        self._parts.append((result.offset, result.written))
        if self._file.take is not ignore:
            self._results.append(result)
        if self._file.endings:
            regions = (region for region in result.regions if region.content.nbytes)
            self._digests.update((region.offset, region.content) for region in regions)

    def all(self) -> Iterator[tuple[int, bytes]]:
        for ending in self._file.endings:
            yield ending.offset, self.serialize(ending)

    def finished(self, version: str = "") -> FinishedFile:
        nbytes = joined = 0
        for _, part in sorted(self._parts, key=itemgetter(0)):
            nbytes, joined = nbytes + part.nbytes, join_crc32(joined, part.crc32, part.nbytes)
        return FinishedFile(self._file.path, version, Written(nbytes, joined), self._results)

    def serialize(self, ending: Ending) -> bytes:
        data = bytearray(ending.data)
        for place, start, stop in ending.crc32s:
            data[place : place + 4] = self._crc32(start, stop).to_bytes(4, "little")
        serialized = bytes(data)
        self._parts.append((ending.offset, Written(len(data), crc32(serialized))))
        return serialized

    def _crc32(self, start: int, stop: int) -> int:
        joined = 0
        while start < stop:
            piece = self._digests[start]
            joined, start = join_crc32(joined, piece.crc32, piece.nbytes), start + piece.nbytes
        return joined


class StagedFiles(ABC):
    """The files of an unfinished target, and the jobs that write them, for all passes of a run.

    All but the bytes of spans is done here.
    """

    path: Path
    kept_bytes = 0
    """Bytes that an earlier run wrote, and that this run found correct."""
    is_ordered = False
    """Whether `take` gets the results in the order of the jobs."""

    def begin(self, resources: Resources, watcher: Progress) -> None:
        """Take what the run has; called once, before all else."""
        self._resources, self._watcher = resources, watcher

    def ranges(self) -> Iterable[Ranges]:
        """Return what an earlier run read of the source for what it finished."""
        return ()

    @abstractmethod
    def begin_proof(self) -> "TargetProof":
        """Begin to show other processes that they write the same target."""

    @abstractmethod
    def jobs(self, files: Iterable[TargetFiles]) -> Iterator[Job[SpanWriter, Any] | None]:
        """Yield the jobs that write files; None where all before it have to be done first."""

    @abstractmethod
    def take(self, number: int, done: Any, ranges: Ranges) -> None:  # noqa: ANN401
        """Record the result of a job, and what it read of the source."""

    def synced(self) -> None:  # noqa: B027
        """Take note that all files are durable."""

    def stop(self) -> None:  # noqa: B027
        """Close the files that are not complete, as after an error."""


def _logged(job: Job[SpanWriter, Any], writer: SpanWriter) -> tuple[Any, Ranges]:
    return job(writer), writer.log.take()


def _some(ranges: Ranges) -> Iterator[Ranges]:
    """Divide ranges into jobs: a large one each, or many small ones."""
    nbytes = np.cumsum(ranges[:, 2] - ranges[:, 1])
    yield from np.split(ranges, np.flatnonzero(np.diff(nbytes // _JOB_BYTES)) + 1)


class Engine:
    """Writes target files from source files with fixed buffers.

    Only this process makes, completes and records files. Workers, which may be on other machines,
    write at offsets that are theirs alone: a span that is written twice does no harm.
    """

    def __init__(
        self,
        sources: tuple[SourceFile, ...],
        resources: Resources,
        watcher: Progress,
        staged: StagedFiles,
    ) -> None:
        self._tools = WritingTools(sources, resources)
        self._resources = resources
        self._watcher = watcher
        self._staged = staged
        staged.begin(resources, watcher)
        self._check = SourceCheck(sources)

    def run(self, files: Iterable[TargetFiles]) -> None:
        """Write all files of a staged target, a bounded number at a time, and sync them.

        After the first error or an interrupt, each worker stops within one window.
        """
        staged = self._staged
        self._watcher.enter(WRITING)
        try:
            with self._proof() as proof:
                self._run(files, replace(self._tools, target=proof))
            self._watcher.enter(SYNCING)
            with target_errors(staged.path):
                sync_tree(staged.path)
                staged.synced()
        finally:
            staged.stop()

    def check_sources(self) -> Sequence[SourceFile]:
        """Compare what was read with the checksums that sources record, if they do.

        Returns the files of which the run read only a part of what a checksum is of. Raises an
        `IntegrityError` if anything differs, as `run` does where it sees that earlier.
        """
        for ranges in self._staged.ranges():
            self._check.add(ranges)
        return self._check.settle(self._read)

    def _read(self, ranges: Ranges) -> None:
        jobs = (partial(SpanWriter.read, ranges=some) for some in _some(ranges))
        deque(self._results(jobs, self._tools, lambda _: None), maxlen=0)

    def _run(self, files: Iterable[TargetFiles], tools: WritingTools) -> None:
        jobs, is_ordered = self._staged.jobs(files), self._staged.is_ordered
        found = self._results(jobs, tools, self._watcher.advance, is_ordered=is_ordered)
        with closing(found):
            for number, done, ranges in found:
                self._staged.take(number, done, ranges)

    def _results(
        self,
        jobs: Iterable[Job[SpanWriter, Any] | None],
        tools: WritingTools,
        progress: Callable[[int], None],
        *,
        is_ordered: bool = False,
    ) -> Generator[tuple[int, Any, Ranges], None, None]:
        results = current_executor().run(
            (job and partial(_logged, job) for job in jobs),
            tools,
            workers=self._resources.workers,
            progress=progress,
            is_ordered=is_ordered,
            needed_bytes=self._resources.needed_bytes,
        )
        with closing(results):
            for number, (done, ranges) in results:
                self._check.add(ranges)
                yield number, done, ranges

    @contextmanager
    def _proof(self) -> Iterator["TargetProof | None"]:
        """Let other processes tell this run's target from others, as long as it goes on."""
        if current_executor().shares_memory:
            yield None
            return
        with target_errors(self._staged.path):
            proof = self._staged.begin_proof()
        try:
            yield proof
        finally:
            with target_errors(self._staged.path):
                proof.end()
