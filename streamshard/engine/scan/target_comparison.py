"""Compares existing files byte by byte with those that a run would write; writes nothing."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from streamshard.engine.run.source_reader import Decoder, SourceReader
from streamshard.engine.run.window import DifferentError, Window
from streamshard.engine.run.work import Span, TargetFile
from streamshard.engine.scan.pool import run_ordered
from streamshard.io.entries import open_readable
from streamshard.io.files import target_errors
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
        self._window = Window(buffer, scratch, reader, told=progress, compares=True)

    def close(self) -> None:
        """Close all files."""
        self._reader.close()

    def end_of(self, path: str, span: Span) -> int | None:
        """Return the end offset of a span in its file; None if the file's content differs."""
        place = self._root / path
        with target_errors(place), open_readable(place) as file:
            try:
                return span.offset + self._window.write(span, file.descriptor).nbytes
            except DifferentError:
                return None


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
    waiting: deque[tuple[TargetFile, bool]] = deque()

    def jobs() -> Iterator[Callable[[Matcher], int | None]]:
        for file in files:
            spans = file.spans or [Span(0, [])]
            for number, span in enumerate(spans, 1):
                waiting.append((file, number == len(spans)))
                yield partial(Matcher.end_of, path=file.path, span=span)

    def matcher() -> Matcher:
        reader = SourceReader(sources, decoders, workers=workers)
        return Matcher(
            root, reader, window_bytes=window_bytes, scratch_bytes=scratch_bytes, progress=progress
        )

    end = 0
    for found in run_ordered(jobs(), matcher, workers):
        file, is_last = waiting.popleft()
        if found is None:
            return file.path
        end = max(end, found)
        if is_last:
            if not _ends_so(root / file.path, file.endings(), end, progress):
                return file.path
            end = 0
    return None


def _ends_so(
    path: Path,
    endings: Sequence[tuple[int, bytes]],
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
