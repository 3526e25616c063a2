"""Compares existing files byte by byte with those that a run would write; writes nothing."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from streamshard.engine.run.endings import FileEndings
from streamshard.engine.run.source_reader import Decoder, SourceReader
from streamshard.engine.run.window import DifferentError, Window
from streamshard.engine.run.work import Span, SpanResult, TargetFile
from streamshard.engine.scan.pool import run_ordered
from streamshard.io.entries import open_readable
from streamshard.io.files import target_errors
from streamshard.io.sink import open_written
from streamshard.model import SourceFile


class Matcher:
    """A worker that produces spans in memory, and compares them with files below a directory."""

    def __init__(
        self,
        root: Path,
        reader: SourceReader,
        *,
        window_bytes: int,
        scratch_bytes: int,
        progress: Callable[[int], None],
    ) -> None:
        self._root = root
        self._reader = reader
        buffer, scratch = (memoryview(bytearray(size)) for size in (window_bytes, scratch_bytes))
        self._window = Window(buffer, scratch, reader, progress=progress, compares=True)

    def close(self) -> None:
        """Close all files."""
        self._reader.close()

    def result_of(self, path: str, span: Span) -> SpanResult | None:
        """Return the result of a span as if it were written; None if the file differs."""
        place = self._root / path
        with target_errors(place):
            file = open_written(place)
            try:
                return self._window.write(span, file)
            except DifferentError:
                return None
            finally:
                file.close()


def first_difference(
    root: Path,
    files: Iterable[TargetFile],
    sources: Sequence[SourceFile],
    decoders: Mapping[int, Decoder],
    *,
    workers: int,
    window_bytes: int,
    scratch_bytes: int,
    progress: Callable[[int], None],
) -> str | None:
    """Return the path of the first file that differs from what a run would write, if any.

    Raises
    ------
    TargetError
        A file cannot be read.
    SourceError, IntegrityError
        A source cannot be read, or has changed.
    """
    waiting: deque[tuple[TargetFile, FileEndings, bool]] = deque()

    def jobs() -> Iterator[Callable[[Matcher], SpanResult | None]]:
        for file in files:
            spans, endings = file.spans or [Span(0, [])], FileEndings(file)
            for number, span in enumerate(spans, 1):
                waiting.append((file, endings, number == len(spans)))
                yield partial(Matcher.result_of, path=file.path, span=span)

    def matcher() -> Matcher:
        reader = SourceReader(sources, decoders, workers=workers)
        return Matcher(
            root, reader, window_bytes=window_bytes, scratch_bytes=scratch_bytes, progress=progress
        )

    end = 0
    for found in run_ordered(jobs(), matcher, workers):
        file, endings, is_last = waiting.popleft()
        if found is None:
            return file.path
        file.take(found)
        endings.add(found)
        end = max(end, found.offset + found.written.nbytes)
        if is_last:
            if not _ends_so(root / file.path, endings.all(), end, progress):
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
