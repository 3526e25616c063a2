"""A worker that writes spans: into files that its process has open, or that another one made."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from streamshard.engine.jobs.executor import Host, Toolkit
from streamshard.engine.run import resident_memory
from streamshard.engine.run.source_check import Ranges, ReadLog
from streamshard.engine.run.source_reader import SourceReader
from streamshard.engine.run.window import Window, unwritten_bytes
from streamshard.engine.run.work import Span, SpanResult, TargetFile, Written
from streamshard.io.entries import open_readable
from streamshard.io.files import target_errors
from streamshard.io.sink import InnerPages, Sink, open_to_fill
from streamshard.io.writable import BLOCK_BYTES, aligned
from streamshard.model import SourceFile

if TYPE_CHECKING:
    from streamshard.engine.jobs.proofs import TargetProof

_PAGE_BYTES: Final = BLOCK_BYTES
"""Page of the machine that leads a run."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources that a run may use."""

    workers: int
    window_bytes: int
    scratch_bytes: int
    drops_behind: bool = False
    """Whether to drop read and written data from the page cache, to spare other programs' data."""
    needed_bytes: int = 0
    """Memory of each process with such workers, without the program's own."""


@dataclass(frozen=True, slots=True)
class FilledSpan:
    """What became of a span."""

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
        """Write a span into an open file."""
        with target_errors(path):
            return FilledSpan(self.window.write(span, sink))

    def is_so(self, path: Path, written: Written) -> bool:
        """Tell whether a file holds what an earlier run wrote."""
        with target_errors(path), open_readable(path) as file:
            return self.window.is_so(file, written)

    def read(self, ranges: Ranges) -> None:
        """Read ranges of source files, for nothing but their checksums."""
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
        """Require that the run goes on, in the target that is seen here."""
        if self._target is not None:
            self._target.require_current()


class SmallFilesWriter(Protocol):
    """Writes small files, each of which it gets whole."""

    def write(self, path: str, parts: Sequence[bytes | memoryview]) -> None:
        """Write a file of parts that follow each other."""


class SmallFiles(Protocol):
    """New files that one job makes and fills, where workers are threads of the leading process."""

    @property
    def paths(self) -> Sequence[str]:
        """Paths relative to the target directory."""

    @property
    def nbytes(self) -> int:
        """Size of all; an upper bound if they are encoded."""

    def singly(self) -> Iterator[TargetFile]:
        """Yield the same files as work of their own."""

    def write(self, worker: SpanWriter, new: SmallFilesWriter) -> Sequence[SpanResult]:
        """Write all, each with one span; returns their results."""

    def take(self, results: Sequence[SpanResult]) -> None:
        """Take the results that `write` returned."""


TargetFiles: TypeAlias = TargetFile | SmallFiles
