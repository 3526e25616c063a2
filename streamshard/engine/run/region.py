"""Delivers a region's bytes from the sources, and makes the system read ahead."""

from collections.abc import Sequence

from streamshard.engine.run.source_reader import SourceReader
from streamshard.engine.run.work import Region
from streamshard.model import Copies


class ReadAhead:
    """Requests the source ranges of copies some distance ahead of the reader.

    The system itself reads ahead within a file, on many machines by only 128 KiB, but not from one
    fragment to the next.

    Parameters
    ----------
    regions
        Copies of regions that are filled one after another.
    """

    def __init__(self, regions: Sequence[Copies], reader: SourceReader) -> None:
        self._regions = regions
        self._reader = reader
        self._limits = reader.ahead
        self._region = self._next = 0
        """Index of the region, and of its copy, to request next."""
        self._requested = 0
        """Source bytes of that copy that are already requested."""
        self._ahead = 0
        """Source bytes that are requested and not read yet."""

    def advance(self, nbytes: int) -> None:
        """Count bytes that are read now, and request the bytes after them."""
        self._ahead -= nbytes
        if self._ahead > self._limits.ahead - self._limits.request:
            return
        while self._ahead < self._limits.ahead and self._region < len(self._regions):
            copies = self._regions[self._region]
            if self._next == len(copies):
                self._region, self._next = self._region + 1, 0
                continue
            left = int(copies.nbytes[self._next]) - self._requested
            count = min(left, self._limits.request)
            if count >= self._limits.least and self._ahead + count > 0:
                offset = int(copies.source[self._next]) + self._requested
                self._reader.will_need(int(copies.file[self._next]), offset, count)
            self._ahead += count
            self._requested += count
            if count == left:
                self._next, self._requested = self._next + 1, 0


class RegionFiller:
    """Delivers a region's bytes in order, in portions of any size that holds whole elements.

    Parameters
    ----------
    ahead
        What reads ahead for this region, and others after it; by default for this one alone.
    """

    def __init__(
        self,
        region: Region,
        reader: SourceReader,
        scratch: memoryview,
        ahead: ReadAhead | None = None,
    ) -> None:
        self._copies = region.copies
        self._region = region
        self._reader = reader
        self._scratch = scratch
        self._next = 0
        """Index of the copy that delivers next."""
        self._used = 0
        """Source bytes that this copy has delivered."""
        self._at = 0
        self.overflowed = 0
        """Finite elements that the cast made infinite so far, if the region counts them."""
        self._ahead = ahead or ReadAhead([region.copies], reader)

    def fill(self, view: memoryview) -> None:
        """Fill a view with the region's next bytes."""
        region, copies, end, done = self._region, self._copies, self._at + len(view), 0
        while done < len(view):
            at = self._at + done
            target = int(copies.target[self._next]) if self._next < len(copies) else end
            if target >= end:
                view[done:] = bytes(len(view) - done)
                break
            if target > at and not self._used:
                view[done : done + target - at] = bytes(target - at)
                done += target - at
                continue
            source_bytes = int(copies.nbytes[self._next])
            wanted = (len(view) - done) // region.target_itemsize * region.source_itemsize
            count = min(source_bytes - self._used, wanted)
            self._ahead.advance(count)
            done += self._deliver(count, view[done:])
            self._used += count
            if self._used == source_bytes:
                self._next, self._used = self._next + 1, 0
        self._at = end

    def _deliver(self, count: int, view: memoryview) -> int:
        """Read source bytes of the current copy into the front of a view; returns bytes filled."""
        file = int(self._copies.file[self._next])
        offset = int(self._copies.source[self._next]) + self._used
        region = self._region
        if region.cast is None:
            self._reader.read_into(file, offset, view[:count])
            return count
        written = 0
        step = len(self._scratch) - len(self._scratch) % region.source_itemsize
        for start in range(0, count, step):
            piece = self._scratch[: min(step, count - start)]
            self._reader.read_into(file, offset + start, piece)
            produced = len(piece) // region.source_itemsize * region.target_itemsize
            into = view[written : written + produced]
            if region.counts_overflow:
                self.overflowed += region.cast.count_overflow(piece, into)
            else:
                region.cast(piece, into)
            written += produced
        return written
