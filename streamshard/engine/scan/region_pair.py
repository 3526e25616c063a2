"""Reads two regions side by side, with one buffer for each."""

from collections.abc import Callable

from streamshard.engine.run.region import RegionFiller
from streamshard.engine.run.source_reader import SourceReader
from streamshard.engine.run.work import Region

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
        fillers = [RegionFiller(region, reader, self._scratch) for region, reader in both]

        def read(nbytes: int) -> tuple[memoryview, memoryview]:
            one, other = (window[:nbytes] for window in self._windows)
            for filler, view in zip(fillers, (one, other), strict=True):
                filler.fill(view)
            self._progress(2 * nbytes)
            return one, other

        return read
