"""Streams parts through one buffer into a file: large sequential writes whatever the fragments."""

import threading
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from streamshard.engine.cache import drop_behind
from streamshard.engine.checksums import crc32
from streamshard.engine.durability import finish_writeback, start_writeback
from streamshard.engine.files import SourceReader, write_all
from streamshard.engine.journal import Written
from streamshard.engine.kept import KeptMemory
from streamshard.engine.patience import StoppedError, try_again
from streamshard.engine.region import RegionFiller
from streamshard.engine.work import Fixed, Region, Span
from streamshard.reading import read_into

_UNWRITTEN_BYTES: Final = (16 << 20, 256 << 20)
"""Least and most of how far the disk may be behind a worker."""
_LEAST_HOLE_BYTES: Final = 4096
_LOOK_BYTES: Final = 64
_LONGEST: Final = 16
"""Bytes of an element at most."""


def unwritten_bytes(available_bytes: int) -> int:
    """Say how far the disk may be behind a worker, by the memory that the system lets us have.

    Pages that are yet to be written count against a memory cgroup, which kills whom they carry
    over its limit; where there is room, waiting for the disk only costs time.
    """
    least, most = _UNWRITTEN_BYTES
    return min(max(available_bytes // 32, least), most)


class Window:
    """A worker's buffer in front of the file that it writes."""

    def __init__(
        self,
        buffer: memoryview,
        scratch: memoryview,
        reader: SourceReader,
        unwritten_bytes: int = _UNWRITTEN_BYTES[0],
        *,
        drops_behind: bool = False,
        stop: threading.Event | None = None,
        told: Callable[[int], None] | None = None,
    ) -> None:
        self._told = told
        self._drops_behind = drops_behind
        self._stop = stop or threading.Event()
        self._unwritten_bytes = unwritten_bytes
        self._buffer = buffer
        self._scratch = scratch
        self._reader = reader
        self._descriptor = -1
        self._offset = 0
        self._filled = 0
        self._start = 0
        """Byte offset at which the span that is being written begins."""
        self._crc32 = 0
        """Of what of it was written."""
        self._makes_holes = True
        self._content = KeptMemory()
        """For content that is to be encoded."""

    def write(self, span: Span, descriptor: int, *, is_new: bool = True) -> Written:
        """Write a span of a file; returns what it holds then.

        Parameters
        ----------
        is_new
            Whether there is nothing in the file at that place, so that zeros need not be written.
        """
        self._descriptor, self._offset, self._filled = descriptor, span.offset, 0
        self._start, self._crc32, self._makes_holes = span.offset, 0, is_new
        for part in span.parts:
            if isinstance(part, Fixed):
                self._put(part.data)
            elif part.encode is not None:
                self._put_encoded(part)
            else:
                self._stream(part)
        self._flush(last=True)
        return Written(self._offset - span.offset, self._crc32)

    def recall(self, span: Span, descriptor: int, written: Written) -> bool:
        """Take in a span that an earlier run wrote, as if it had been written now.

        Returns False, and has done nothing, if the file does not hold what that run noted.
        """
        if not self._holds(span, descriptor, written):
            return False
        offset = span.offset
        for part in span.parts:
            if isinstance(part, Region):
                self._recall(part, descriptor, offset, written)
            offset += part.nbytes
        return True

    def _holds(self, span: Span, descriptor: int, written: Written) -> bool:
        """Tell whether a file holds what was noted, and what is known beforehand of the span."""
        found, left = 0, written.nbytes
        for view in self._read_back(descriptor, span.offset, written.nbytes):
            found, left = crc32(view, found), left - len(view)
        if left or found != written.crc32:
            return False
        offset = span.offset
        for part in span.parts:
            if isinstance(part, Fixed):
                pieces = self._read_back(descriptor, offset, part.nbytes)
                if b"".join(map(bytes, pieces)) != part.data:
                    return False
            elif part.keeps is not None:
                pieces = self._read_back(descriptor, offset, part.content_bytes)
                if not all(map(part.keeps, pieces)):
                    return False
            offset += part.nbytes
        return True

    def _recall(self, region: Region, descriptor: int, offset: int, written: Written) -> None:
        if region.recall is not None:
            stored = self._read_back(descriptor, offset, written.nbytes)
            region.recall(b"".join(map(bytes, stored)))
        else:
            for view in self._read_back(descriptor, offset, region.content_bytes):
                region.checksum.update(view)
            region.trailer()

    def _read_back(self, descriptor: int, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Yield what a file holds, as far as it goes, through the buffer."""
        end = offset + nbytes
        while offset < end:
            self._require_going_on()
            # Whole elements, whatever the dtype, which none is longer than.
            room = max(len(self._buffer) // _LONGEST * _LONGEST, 1)
            view = self._buffer[: min(room, end - offset)]
            count = read_into(descriptor, view, offset)
            if not count:
                return
            yield view[:count]
            offset += count

    def _require_going_on(self) -> None:
        if self._stop.is_set():
            raise StoppedError

    def _flush(self, *, last: bool = False) -> None:
        """Write what there is; zeros are left out, which makes a hole, but not at the end."""
        self._require_going_on()
        view = self._buffer[: self._filled]
        self._crc32 = crc32(view, self._crc32)
        if last or not (self._makes_holes and _is_hole(view)):
            try_again(lambda: write_all(self._descriptor, view, self._offset), self._stop)
        if self._filled > len(self._buffer) // 2:
            start_writeback(self._descriptor, self._offset, self._filled)
            behind = self._offset - self._unwritten_bytes
            if behind >= self._start:
                finish_writeback(self._descriptor, behind, self._filled)
                if self._drops_behind:
                    drop_behind(self._descriptor, behind + self._filled)
        self._offset += self._filled
        if self._told is not None:
            self._told(self._filled)
        self._filled = 0

    def _put(self, data: bytes) -> None:
        view = memoryview(data)
        while len(view):
            if self._filled == len(self._buffer):
                self._flush()
            piece = view[: len(self._buffer) - self._filled]
            self._buffer[self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
            view = view[len(piece) :]

    def _stream(self, region: Region) -> None:
        filler = RegionFiller(region, self._reader, self._scratch)
        left = region.content_bytes
        while left:
            room = len(self._buffer) - self._filled
            if room < region.target_itemsize:
                self._flush()
                continue
            count = min(left, room - room % region.target_itemsize)
            view = self._buffer[self._filled : self._filled + count]
            filler.fill(view)
            region.checksum.update(view)
            self._filled += count
            left -= count
        self._put(region.trailer())

    def _put_encoded(self, region: Region) -> None:
        content = self._content(region.content_bytes)
        RegionFiller(region, self._reader, self._scratch).fill(content)
        region.checksum.update(content)
        self._put(region.encode(content) if region.encode else b"")
        self._put(region.trailer())


def _is_hole(view: memoryview) -> bool:
    """Tell whether leaving a view out makes a hole; a look at its beginning mostly is enough."""
    if len(view) < _LEAST_HOLE_BYTES or any(view[:_LOOK_BYTES]):
        return False
    return not np.frombuffer(view, dtype=np.uint8).any()
