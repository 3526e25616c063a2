"""Reads two regions side by side, with one buffer for each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from streamshard.engine.jobs.executor import Host, Toolkit
from streamshard.engine.jobs.source_proof import require_seen, some_files
from streamshard.engine.run.region import ReadAhead, RegionFiller
from streamshard.engine.run.source_reader import SourceReader
from streamshard.engine.run.work import Region
from streamshard.model import SourceFile

Next = Callable[[int], tuple[memoryview, memoryview]]
"""Reads the next bytes of both regions, at most a window; the views from before become invalid."""


class PairReader:
    """A worker's readers and buffers for two sources."""

    def __init__(
        self,
        left: SourceReader,
        right: SourceReader,
        *,
        window_bytes: int,
        scratch_bytes: int,
        progress: Callable[[int], None],
    ) -> None:
        self._readers = left, right
        self._windows = [memoryview(bytearray(window_bytes)) for _ in self._readers]
        self._scratch = memoryview(bytearray(scratch_bytes))
        self._progress = progress
        self.window_bytes = window_bytes

    def close(self) -> None:
        """Close all files."""
        for reader in self._readers:
            reader.close()

    def begin(self, left: Region, right: Region) -> Next:
        """Begin to read two regions."""
        both = zip((left, right), self._readers, strict=True)
        fillers = [
            RegionFiller(
                region, reader, self._scratch, ReadAhead([region.copies], reader, readers=2)
            )
            for region, reader in both
        ]

        def read(nbytes: int) -> tuple[memoryview, memoryview]:
            one, other = (window[:nbytes] for window in self._windows)
            for filler, view in zip(fillers, (one, other), strict=True):
                filler.fill(view)
            self._progress(2 * nbytes)
            return one, other

        return read


K = TypeVar("K", bound=PairReader, covariant=True)


@dataclass(frozen=True, slots=True)
class PairTools(Toolkit[K]):
    """Describes workers that read two sources."""

    kind: type[K]
    sides: Sequence[tuple[SourceFile, ...]]
    """Files of the left and of the right source."""
    window_bytes: int
    scratch_bytes: int

    def prove(self) -> str:
        for files in self.sides:
            require_seen(some_files(files))
        return ""

    def make(self, host: Host) -> K:
        left, right = (
            SourceReader(files, workers=host.workers, stop=host.stop) for files in self.sides
        )
        return self.kind(
            left,
            right,
            window_bytes=self.window_bytes,
            scratch_bytes=self.scratch_bytes,
            progress=host.progress,
        )
