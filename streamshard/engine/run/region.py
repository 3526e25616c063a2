"""Delivers a region's bytes from the sources, and makes the system read ahead."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from streamshard.engine.numeric.cast import Cast
from streamshard.engine.run.source_reader import Checked, SourceReader
from streamshard.engine.run.work import Region
from streamshard.io.memory_map import MOST_BYTES
from streamshard.model import Copies, Memory

Ints = NDArray[np.int64]

_FEWEST: Final = 16
"""Fewer copies than this are read one by one."""
_RUNS_AHEAD: Final = 16
"""Runs that are requested before the first of them is read, where requests take long."""
_SHORT_BYTES: Final = 1 << 16
"""Longer copies, on average, are read one by one."""


class ReadAhead:
    """Requests the source ranges of copies some distance ahead of the reader.

    The system itself reads ahead within a file, on many machines by only 128 KiB, but not from one
    fragment to the next.

    `regions`: copies of regions that are filled one after another.
    `readers`: how many readers the worker uses in turn; they share what it may request.
    """

    def __init__(
        self, regions: Sequence[Copies], reader: SourceReader, *, readers: int = 1
    ) -> None:
        self._regions = regions
        self._reader = reader
        self._limits = replace(reader.ahead, ahead=reader.ahead.ahead // readers)
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
            remainder = int(copies.nbytes[self._next]) - self._requested
            count = min(remainder, self._limits.request)
            if count >= self._limits.least and self._ahead + count > 0:
                offset = int(copies.source[self._next]) + self._requested
                self._reader.will_need(int(copies.file[self._next]), offset, count)
            self._ahead += count
            self._requested += count
            if count == remainder:
                self._next, self._requested = self._next + 1, 0


class RegionFiller:
    """Delivers a region's bytes in order, in portions of any size that holds whole elements.

    `ahead`: what reads ahead for this region, and others after it; by default for this one alone.
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
        self._short = _ShortCopies(
            region.copies, reader, widening=region.target_itemsize / region.source_itemsize
        )

    def view(self, nbytes: int, memory: Memory) -> Checked:
        """Return the region's next bytes: where they are mapped, or else read into memory.

        They are valid until the next read.
        """
        mapped = self.mapped(nbytes, least=nbytes)
        if mapped is not None:
            return mapped
        view = memory(nbytes)
        return view, self.fill(view)

    def mapped(self, most: int, *, least: int = 1) -> Checked | None:
        """Return the region's next bytes that are mapped in one piece; None if there are none."""
        copies, number = self._copies, self._next
        if self._region.cast is not None or number == len(copies):
            return None
        nbytes = min(most, int(copies.nbytes[number]) - self._used)
        if nbytes < least or not (self._used or int(copies.target[number]) == self._at):
            return None
        offset = int(copies.source[number]) + self._used
        window = self._reader.window(int(copies.file[number]), offset, nbytes)
        if window is not None:
            self._ahead.advance(nbytes)
            self._at += nbytes
            self._count_used(nbytes)
        return window

    def fill(self, view: memoryview) -> int | None:
        """Fill a view with the region's next bytes; returns its CRC-32 if reading computed it."""
        region, copies, end, done = self._region, self._copies, self._at + len(view), 0
        checksum = None
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
            together = 0 if self._used else self._deliver_together(view[done:])
            if together:
                done += together
                continue
            source_bytes = int(copies.nbytes[self._next])
            wanted = (len(view) - done) // region.target_itemsize * region.source_itemsize
            count = min(source_bytes - self._used, wanted)
            self._ahead.advance(count)
            if region.cast is None:
                offset = int(copies.source[self._next]) + self._used
                file = int(copies.file[self._next])
                found = self._reader.read_into(file, offset, view[done : done + count])
                checksum = found if count == len(view) else None
                done += count
            else:
                done += self._cast(region.cast, count, view[done:])
            self._count_used(count)
        self._at = end
        return checksum

    def _count_used(self, nbytes: int) -> None:
        self._used += nbytes
        if self._used == int(self._copies.nbytes[self._next]):
            self._next, self._used = self._next + 1, 0

    def _deliver_together(self, view: memoryview) -> int:
        """Read several short copies into the front of a view; returns bytes filled, 0 if none."""
        region, half = self._region, len(self._scratch) // 2
        room = len(view) // region.target_itemsize * region.source_itemsize
        limit = room if region.cast is None else min(room, half)
        count = self._short.count(self._next, limit)
        if not count or not half:
            return 0
        copies = slice(self._next, self._next + count)
        source_bytes = int(self._copies.nbytes[copies].sum())
        filled = source_bytes // region.source_itemsize * region.target_itemsize
        self._ahead.advance(source_bytes)
        read, into = self._scratch[:half], view[:filled]
        content = into if region.cast is None else self._scratch[half : half + source_bytes]
        self._short.read(self._next, count, content, read)
        if region.cast is not None and region.counts_overflow:
            self.overflowed += region.cast.count_overflow(content, into)
        elif region.cast is not None:
            region.cast(content, into)
        self._next += count
        return filled

    def _cast(self, cast: Cast, count: int, view: memoryview) -> int:
        file = int(self._copies.file[self._next])
        offset = int(self._copies.source[self._next]) + self._used
        region, written = self._region, 0
        step = min(len(self._scratch), MOST_BYTES)
        step -= step % region.source_itemsize
        for start in range(0, count, step):
            piece = self._look(file, offset + start, self._scratch[: min(step, count - start)])
            produced = len(piece) // region.source_itemsize * region.target_itemsize
            into = view[written : written + produced]
            if region.counts_overflow:
                self.overflowed += cast.count_overflow(piece, into)
            else:
                cast(piece, into)
            written += produced
        return written

    def _look(self, file: int, offset: int, room: memoryview) -> memoryview:
        window = self._reader.window(file, offset, len(room))
        if window is None:
            self._reader.read_into(file, offset, room)
            return room
        return window[0]


class _ShortCopies:
    """Reads many short copies of a region together, as boxes of a tensor need them.

    A box that is cut along a dimension after the first has short runs. They follow one another in
    the file, and lie apart in the target. So many of them are read at once, and then put in their
    places: one read for each takes twenty times as long, for runs of a kilobyte.
    """

    def __init__(self, copies: Copies, reader: SourceReader, *, widening: float) -> None:
        self._copies = copies
        self._reader = reader
        self._widening = widening
        """Target bytes for each source byte."""
        self._ends: Ints = np.cumsum(copies.nbytes)
        """Source bytes up to the end of each copy."""

    def count(self, first: int, nbytes: int) -> int:
        """Count the copies from `first` on to read together, of at most so many source bytes.

        They leave no gap between them in the target. 0 if they are too few, or too long.
        """
        last = first + _FEWEST - 1
        if last >= len(self._ends):
            return 0
        before = int(self._ends[first - 1]) if first else 0
        if int(self._ends[last]) - before > min(nbytes, _FEWEST * _SHORT_BYTES):
            return 0
        stop = int(np.searchsorted(self._ends, before + nbytes, side="right"))
        written = self._copies.nbytes[first:stop] * self._widening
        target = self._copies.target[first:stop]
        gaps = np.flatnonzero(target[1:] != target[:-1] + written[:-1])
        return int(gaps[0]) + 1 if len(gaps) else stop - first

    def read(self, first: int, count: int, into: memoryview, scratch: memoryview) -> None:
        chosen = slice(first, first + count)
        nbytes = self._copies.nbytes[chosen]
        place = self._ends[chosen] - nbytes
        place = place - place[0]
        order = np.lexsort((self._copies.source[chosen], self._copies.file[chosen]))
        file, source = self._copies.file[chosen][order], self._copies.source[chosen][order]
        nbytes, place = nbytes[order], place[order]
        joined = (
            (file[1:] == file[:-1])
            & (source[1:] == source[:-1] + nbytes[:-1])
            & (nbytes[1:] == nbytes[:-1])
        )
        heads = np.flatnonzero(np.concatenate([[True], ~joined]))
        stops = np.append(heads[1:], count)
        target = np.frombuffer(into, np.uint8)
        sizes = np.add.reduceat(nbytes, heads)
        requested = 0
        for number, (head, stop) in enumerate(zip(heads.tolist(), stops.tolist(), strict=True)):
            while requested < min(number + _RUNS_AHEAD, len(heads)):
                if sizes[requested] >= self._reader.ahead.least:
                    at = heads[requested]
                    self._reader.will_need(int(file[at]), int(source[at]), int(sizes[requested]))
                requested += 1
            step = max(1, len(scratch) // int(nbytes[head]))
            for start in range(head, stop, step):
                some = slice(start, min(start + step, stop))
                self._scatter(int(file[head]), int(source[start]), place[some], target, scratch,
                              int(nbytes[head]))  # fmt: skip

    def _scatter(
        self,
        file: int,
        offset: int,
        offsets: Ints,
        target: NDArray[np.uint8],
        scratch: memoryview,
        nbytes: int,
    ) -> None:
        """Read runs of one length that lie side by side, and put each in its place."""
        count = len(offsets)
        if count == 1:
            at = int(offsets[0])
            self._reader.read_into(file, offset, target[at : at + nbytes].data)
            return
        read = scratch[: count * nbytes]
        self._reader.read_into(file, offset, read)
        rows = np.frombuffer(read, np.uint8).reshape(count, nbytes)
        steps = np.diff(offsets)
        if (steps == steps[0]).all() and steps[0] >= nbytes:
            first, step = int(offsets[0]), int(steps[0])
            span = target[first : first + step * (count - 1) + nbytes]
            np.lib.stride_tricks.as_strided(span, (count, nbytes), (step, 1))[:] = rows
            return
        for place, row in zip(offsets.tolist(), rows, strict=True):
            target[place : place + nbytes] = row
