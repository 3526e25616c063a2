"""Delivers a region's bytes from the sources, and has the system read ahead of it."""

from typing import Final

from streamshard.engine.io.files import SourceReader
from streamshard.engine.run.work import Region
from streamshard.model import Copies

_AHEAD_BYTES: Final = 4 << 20
"""How far the system is to be ahead: some windows, so that the disk never waits for a worker."""
_ASKED_BYTES: Final = 1 << 20
"""Asked for at once: the system cuts off what is longer than a disk takes in one go."""
_LEAST_BYTES: Final = 1 << 14
"""The pages around what is less are on their way with its neighbours."""


class ReadAhead:
    """Asks for what copies will read, some way in front of where the reader is.

    The system does so by itself within a file, but not from one fragment to the next, and on many
    machines by 128 KiB only.
    """

    def __init__(self, copies: Copies, reader: SourceReader) -> None:
        self._copies = copies
        self._reader = reader
        self._next = 0
        """Copy that is to be asked for next."""
        self._asked = 0
        """Source bytes of it that were."""
        self._ahead = 0
        """Source bytes that were asked for and are not read yet."""

    def advance(self, nbytes: int) -> None:
        """Take note of what is read now, and ask for what comes after it."""
        self._ahead -= nbytes
        if self._ahead > _AHEAD_BYTES - _ASKED_BYTES:
            return
        while self._ahead < _AHEAD_BYTES and self._next < len(self._copies):
            left = int(self._copies.nbytes[self._next]) - self._asked
            count = min(left, _ASKED_BYTES)
            if count >= _LEAST_BYTES and self._ahead >= 0:
                file = int(self._copies.file[self._next])
                offset = int(self._copies.source[self._next]) + self._asked
                self._reader.will_need(file, offset, count)
            self._ahead += count
            self._asked += count
            if count == left:
                self._next, self._asked = self._next + 1, 0


class RegionFiller:
    """Delivers a region's bytes in order, in portions of any size that holds whole elements."""

    def __init__(self, region: Region, reader: SourceReader, scratch: memoryview) -> None:
        self._copies = region.copies
        self._region = region
        self._reader = reader
        self._scratch = scratch
        self._next = 0
        """Copy that delivers next."""
        self._used = 0
        """Source bytes that it has delivered."""
        self._at = 0
        self._ahead = ReadAhead(region.copies, reader)

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
            region.cast(piece, view[written : written + produced])
            written += produced
        return written
