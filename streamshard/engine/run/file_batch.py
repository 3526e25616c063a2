"""Small files that a worker fills together: one read of sources for many files."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from streamshard.checksums import crc32
from streamshard.engine.run.span_writer import SmallFilesWriter, SpanWriter
from streamshard.engine.run.window import checksums_of
from streamshard.engine.run.work import Fixed, Region, RegionResult, SpanResult, TargetFile, Written
from streamshard.io.retry import StoppedError


@dataclass(frozen=True, eq=False, slots=True)
class FileBatch:
    """Small files of known bytes, or each with a part of one region; see `SmallFiles`."""

    paths: Sequence[str]
    stops: Sequence[int]
    """Where each file's part of a region ends; no part is larger than the smallest window."""
    nbytes: int
    make: Callable[[], Sequence[Fixed] | Region]
    """Makes the content. A region's trailer, codec and blocks are those of each file."""
    takes: Sequence[Callable[[SpanResult], None]]
    """Called with each file's result."""
    files: Callable[[], Iterator[TargetFile]]
    """Makes the same files as work of their own."""

    def singly(self) -> Iterator[TargetFile]:
        return self.files()

    def take(self, results: Sequence[SpanResult]) -> None:
        for take, result in zip(self.takes, results, strict=True):
            take(result)

    def write(self, worker: SpanWriter, new: SmallFilesWriter) -> Sequence[SpanResult]:
        content = self.make()
        if isinstance(content, Region):
            return self._write_region(content, worker, new)
        return self._write_fixed(content, worker, new)

    def _write_fixed(
        self, content: Sequence[Fixed], worker: SpanWriter, new: SmallFilesWriter
    ) -> list[SpanResult]:
        found = []
        for path, fixed in zip(self.paths, content, strict=True):
            _require_going_on(worker)
            new.write(path, [fixed.data])
            found.append(SpanResult(0, Written(fixed.nbytes, crc32(fixed.data)), ()))
        worker.window.advance(self.nbytes)
        return found

    def _write_region(
        self, region: Region, worker: SpanWriter, new: SmallFilesWriter
    ) -> list[SpanResult]:
        """Fill the window with as many files as it holds, then write each."""
        window, found, start = worker.window, list[SpanResult](), 0
        filler = window.filler(region)
        while (first := len(found)) < len(self.paths):
            last = bisect_right(self.stops, start + len(window.buffer), lo=first)
            view = window.buffer[: self.stops[last - 1] - start]
            filler.fill(view)
            for path, stop in zip(self.paths[first:last], self.stops[first:last], strict=True):
                _require_going_on(worker)
                found.append(_write_content(path, view[: stop - start], region, new))
                view, start = view[stop - start :], stop
            window.advance(sum(result.written.nbytes for result in found[first:]))
        return found


def _require_going_on(worker: SpanWriter) -> None:
    if worker.stop.is_set():
        raise StoppedError


def _write_content(
    path: str, content: memoryview, region: Region, new: SmallFilesWriter
) -> SpanResult:
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
    new.write(path, [stored, trailer])
    written = Written(len(stored) + len(trailer), crc32(trailer, crc))
    return SpanResult(0, written, (RegionResult(0, sums.digest, tuple(sums.blocks)),))
