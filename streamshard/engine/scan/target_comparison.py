"""Compares existing files byte by byte with those that a run would write; writes nothing."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from streamshard.engine.jobs.executor import Host, ReadingTools, run_ordered
from streamshard.engine.jobs.proofs import require_seen
from streamshard.engine.run.runner import FileEndings
from streamshard.engine.run.source_reader import SourceReader
from streamshard.engine.run.span_writer import TargetFiles
from streamshard.engine.run.window import Window
from streamshard.engine.run.work import Span, SpanResult, TargetFile
from streamshard.io.entries import identify, open_readable
from streamshard.io.files import target_errors
from streamshard.io.object_path import is_object
from streamshard.io.readable import OpenedFile
from streamshard.io.sink import Sink
from streamshard.layout.memory_plan import BUFFER_BYTES, MemoryPlan
from streamshard.model import SourceFile


class _DifferentError(Exception):
    """Raised when a file differs from the bytes that it was compared with."""


class _Unwritten(Sink):
    """Stands for a file that exists, and is not changed."""

    only_grows = True

    def write(self, view: memoryview, offset: int) -> None:
        raise NotImplementedError


class _ComparingWindow(Window):
    """Compares an existing file with what it would write."""

    def compare(self, span: Span, file: OpenedFile) -> SpanResult:
        self._existing = file
        return self.write(span, _Unwritten())

    def _deliver(self, view: memoryview, *, last: bool) -> None:
        """Compare a view with the file's content; the scratch is free between fills."""
        for start in range(0, len(view), len(self._scratch)):
            wanted = view[start : start + len(self._scratch)]
            content = self._scratch[: len(wanted)]
            count = self._existing.read_into(content, self._offset + start)
            if count < len(wanted) or not np.array_equal(content, wanted):
                raise _DifferentError


class Matcher:
    """A worker that produces spans in memory, and compares them with files."""

    def __init__(self, sources: Sequence[SourceFile], window_bytes: int, host: Host) -> None:
        self._reader = SourceReader(sources, workers=host.workers, stop=host.stop, maps=True)
        buffer, scratch = (memoryview(bytearray(size)) for size in (window_bytes, BUFFER_BYTES))
        self._window = _ComparingWindow(
            buffer, scratch, self._reader, progress=host.progress, stop=host.stop
        )

    def settle(self) -> None:
        self._reader.settle()

    def close(self) -> None:
        self._reader.close()

    def result_of(self, target: SourceFile, span: Span) -> SpanResult | None:
        """Return the result of a span as if it were written; None if the file differs."""
        with target_errors(target.path):
            if not is_object(target.path):  # a bucket is the same everywhere
                require_seen((target,))
            with open_readable(target.path) as file, suppress(_DifferentError):
                return self._window.compare(span, file)
        return None


def first_difference(
    root: Path,
    files: Iterable[TargetFiles],
    sources: Sequence[SourceFile],
    memory: MemoryPlan,
    progress: Callable[[int], None],
    *,
    to_end: bool = True,
) -> str | None:
    """Return the path of the first file that differs from what a run would write, if any.

    `to_end`: whether the files are whole, so that nothing may come after their last bytes.
    """
    waiting: deque[tuple[TargetFile, FileEndings, bool]] = deque()

    def jobs() -> Iterator[Callable[[Matcher], SpanResult | None]]:
        for file in chain.from_iterable(some.singly() for some in files):
            spans, endings = file.spans or [Span(0, [])], FileEndings(file)
            target = SourceFile(root / file.path, 0, "", "")
            if not is_object(target.path):
                with target_errors(target.path):
                    target = identify(target.path)
            for number, span in enumerate(spans, 1):
                waiting.append((file, endings, number == len(spans)))
                yield partial(Matcher.result_of, target=target, span=span)

    end = 0
    # They examine the targets one by one.
    tools = ReadingTools(sources, partial(Matcher, sources, memory.window_bytes))
    for result in run_ordered(jobs(), tools, workers=memory.workers, progress=progress):
        file, endings, is_last = waiting.popleft()
        if result is None:
            return file.path
        file.take(result)
        endings.add(result)
        end = max(end, result.offset + result.written.nbytes)
        if is_last:
            if to_end and not _ends_so(root / file.path, endings.all(), end, progress):
                return file.path
            end = 0
    return None


def _ends_so(
    path: Path,
    endings: Iterable[tuple[int, bytes]],
    end: int,
    progress: Callable[[int], None],
) -> bool:
    """Tell whether a file has these endings, and no bytes after them and the compared spans."""
    with target_errors(path), open_readable(path) as file:
        for offset, data in endings:
            if file.read_at(offset, len(data)) != data:
                return False
            end = max(end, offset + len(data))
            progress(len(data))
        return file.nbytes == end
