"""A worker that writes: spans, into files that its process or another one made, and small files."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from streamshard.checksums import crc32
from streamshard.engine.jobs.executor import Host, Toolkit
from streamshard.engine.run import resident_memory
from streamshard.engine.run.source_check import Ranges, ReadLog
from streamshard.engine.run.source_reader import SourceReader
from streamshard.engine.run.window import Window, checksums_of, unwritten_bytes
from streamshard.engine.run.work import (
    Fixed,
    Region,
    RegionResult,
    Span,
    SpanResult,
    TargetFile,
    Written,
)
from streamshard.io.entries import open_readable
from streamshard.io.files import target_errors
from streamshard.io.retry import StoppedError
from streamshard.io.sink import InnerPages, Sink, open_to_fill
from streamshard.io.writable import BLOCK_BYTES, aligned
from streamshard.model import SourceFile

if TYPE_CHECKING:
    from streamshard.engine.jobs.proofs import TargetProof

_PAGE_BYTES: Final = BLOCK_BYTES
"""Page of the machine that leads a run."""


@dataclass(frozen=True, slots=True)
class Resources:
    workers: int
    window_bytes: int
    scratch_bytes: int
    drops_behind: bool = False
    """Whether to drop read and written data from the page cache, to spare other programs' data."""
    needed_bytes: int = 0
    """Memory of each process with such workers, without the program's own."""


@dataclass(frozen=True, slots=True)
class FilledSpan:
    result: SpanResult
    ends: tuple[tuple[int, bytes], ...] = ()
    """(byte offset, bytes): what the process that leads the run has to write."""


@dataclass(frozen=True, slots=True)
class WritingTools(Toolkit["SpanWriter"]):
    """Describes the workers of a run that writes."""

    sources: tuple[SourceFile, ...]
    resources: Resources
    target: "TargetProof | None" = None
    """None if all workers are threads of the process that leads the run."""

    def prove(self) -> str:
        Toolkit.prove(self)
        return "" if self.target is None else self.target.prove()

    def accept(self, evidence: str) -> None:
        if self.target is not None:
            self.target.accept(evidence)

    def make(self, host: Host) -> "SpanWriter":
        return SpanWriter(self, host)


class SpanWriter:
    """A worker with its window."""

    def __init__(self, tools: WritingTools, host: Host) -> None:
        resources = tools.resources
        self._target = tools.target
        self.log = ReadLog(tools.sources)
        """Notes the checksums of what is read."""
        self.stop = host.stop
        """Set when the current job is not wanted any more."""
        self._reader = SourceReader(
            tools.sources,
            drops_behind=resources.drops_behind,
            workers=host.workers,
            stop=host.stop,
            log=self.log,
            maps=True,
        )
        # A window and its scratch, each from a block boundary: of their usual size, one huge page.
        scratch_start = -(-resources.window_bytes // BLOCK_BYTES) * BLOCK_BYTES
        buffers = aligned(scratch_start + resources.scratch_bytes)
        self.window = Window(
            buffers[: resources.window_bytes],
            buffers[scratch_start:],
            self._reader,
            unwritten_bytes(resident_memory.available_bytes()),
            drops_behind=resources.drops_behind,
            stop=host.stop,
            progress=host.progress,
        )

    def settle(self) -> None:
        self._reader.settle()

    def close(self) -> None:
        self._reader.close()

    def write(self, path: Path, span: Span, sink: Sink) -> FilledSpan:
        with target_errors(path):
            return FilledSpan(self.window.write(span, sink))

    def is_so(self, path: Path, written: Written) -> bool:
        """Tell whether a file holds what an earlier run wrote."""
        with target_errors(path), open_readable(path) as file:
            return self.window.is_so(file, written)

    def read(self, ranges: Ranges) -> None:
        self._reader.read_all(ranges, self.window.buffer)

    def fill(self, path: Path, span: Span, *, is_shared: bool, is_direct: bool) -> FilledSpan:
        """Do the same with a file that another process has made.

        What this returns is on the disk as soon as the process that leads the run syncs the file.
        It cannot sync what is in the memory of another machine, and may never hear of an error
        there. So each span is synced, and its file closed, before its result is reported: after
        that, whoever opens the file sees it (close-to-open consistency of NFS).

        `is_shared`: whether others write other parts of the file.
        `is_direct`: whether to write past the page cache; see `open_to_fill`.
        """
        target = self._target
        if target is None:
            raise TypeError("no proof of the target")
        with target_errors(path):
            file = open_to_fill(path, is_direct=is_direct)
            with closing(file):
                target.require_current()
                inner = InnerPages(file, span.offset, span.offset + span.nbytes, _PAGE_BYTES)
                result = self.window.write(span, inner if is_shared else file)
                if not target.shares_cache():
                    file.sync()
        return FilledSpan(result, tuple(inner.ends))

    def require_current(self) -> None:
        if self._target is not None:
            self._target.require_current()


NewFile: TypeAlias = Callable[[str, Sequence[bytes | memoryview]], None]
"""Writes a small file, whose path and parts it gets."""


@dataclass(frozen=True, eq=False, slots=True)
class FileBatch:
    """New files that one job makes and fills, where workers are threads of the leading process.

    They are of known bytes, or each has a part of one region: one read of sources for many files.
    """

    paths: Sequence[str]
    """Relative to the target directory."""
    stops: Sequence[int]
    """Where each file's part of a region ends; no part is larger than the smallest window."""
    nbytes: int
    """Size of all; an upper bound if they are encoded."""
    make: Callable[[], Sequence[Fixed] | Region]
    """Makes the content. A region's trailer, codec and blocks are those of each file."""
    takes: Sequence[Callable[[SpanResult], None]]
    """Called with each file's result."""
    singly: Callable[[], Iterator[TargetFile]]
    """Makes the same files as work of their own."""

    def take(self, results: Sequence[SpanResult]) -> None:
        for take, result in zip(self.takes, results, strict=True):
            take(result)

    def write(self, worker: SpanWriter, new: NewFile) -> Sequence[SpanResult]:
        content = self.make()
        if isinstance(content, Region):
            return self._write_region(content, worker, new)
        return self._write_fixed(content, worker, new)

    def _write_fixed(
        self, content: Sequence[Fixed], worker: SpanWriter, new: NewFile
    ) -> list[SpanResult]:
        results = []
        for path, fixed in zip(self.paths, content, strict=True):
            _require_going_on(worker)
            new(path, [fixed.data])
            results.append(SpanResult(0, Written(fixed.nbytes, crc32(fixed.data)), ()))
        worker.window.advance(self.nbytes)
        return results

    def _write_region(self, region: Region, worker: SpanWriter, new: NewFile) -> list[SpanResult]:
        """Fill the window with as many files as it holds, then write each."""
        window, results, start = worker.window, list[SpanResult](), 0
        filler = window.filler(region)
        while (first := len(results)) < len(self.paths):
            last = bisect_right(self.stops, start + len(window.buffer), lo=first)
            view = window.buffer[: self.stops[last - 1] - start]
            filler.fill(view)
            for path, stop in zip(self.paths[first:last], self.stops[first:last], strict=True):
                _require_going_on(worker)
                results.append(_write_content(path, view[: stop - start], region, new))
                view, start = view[stop - start :], stop
            window.advance(sum(result.written.nbytes for result in results[first:]))
        return results


def _require_going_on(worker: SpanWriter) -> None:
    if worker.stop.is_set():
        raise StoppedError


def _write_content(path: str, content: memoryview, region: Region, new: NewFile) -> SpanResult:
    """Write a file whose content is in memory, as `Window.write` does with a span of one region."""
    sums, trailer = checksums_of(region), b""
    sums.update(content)
    stored, crc = content, sums.crc32
    if region.codec is not None:
        stored = memoryview(region.codec.encode(content))
        crc = crc32(stored)
    if region.trailer is not None:
        is_known = region.codec is None and region.trailer.is_crc32c
        checksum = sums.crc32c if is_known else region.trailer.checksum(stored, 0)
        trailer = region.trailer.serialize(checksum)
    new(path, [stored, trailer])
    written = Written(len(stored) + len(trailer), crc32(trailer, crc))
    return SpanResult(0, written, (RegionResult(0, sums.digest, tuple(sums.blocks)),))


TargetFiles: TypeAlias = TargetFile | FileBatch
