"""Streams parts through one buffer into a file: large sequential writes whatever the fragments."""

import threading
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from streamshard.engine.io.buffers import ReusableBuffer
from streamshard.engine.io.direct_io import BLOCK_BYTES
from streamshard.engine.io.durability import finish_writeback, start_writeback
from streamshard.engine.io.files import SourceReader, write_blocks
from streamshard.engine.io.page_cache import drop_behind
from streamshard.engine.io.retry import StoppedError, try_again
from streamshard.engine.numeric.checksums import crc32
from streamshard.engine.run.journal import Written
from streamshard.engine.run.region import RegionFiller
from streamshard.engine.run.work import Encoding, Fixed, Region, Span
from streamshard.posix import read_into

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


class DifferentError(Exception):
    """A file does not hold what it was compared with."""


class Window:
    """A worker's buffer in front of the file that it writes, or compares with what it would."""

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
        compares: bool = False,
    ) -> None:
        self._told = told
        self._compares = compares
        self._drops_behind = drops_behind
        self._stop = stop or threading.Event()
        self._unwritten_bytes = unwritten_bytes
        self._buffer = buffer
        self._scratch = scratch
        self._reader = reader
        self._descriptor = self._direct = -1
        self._offset = 0
        self._begun = self._filled = 0
        """Part of the buffer that is yet to be written."""
        self._start = 0
        """Byte offset at which the span that is being written begins."""
        self._crc32 = 0
        """Of what of it was written."""
        self._makes_holes = True
        self._content = ReusableBuffer()
        """For content that is to be encoded."""

    def write(
        self, span: Span, descriptor: int, direct: int = -1, *, is_new: bool = True
    ) -> Written:
        """Write a span of a file; returns what it holds then.

        Parameters
        ----------
        direct
            The file as `open_direct` has it; -1 if it has not.
        is_new
            Whether there is nothing in the file at that place, so that zeros need not be written.
        """
        self._descriptor, self._direct, self._offset = descriptor, direct, span.offset
        self._begin()
        self._start, self._crc32, self._makes_holes = span.offset, 0, is_new
        for part in span.parts:
            if isinstance(part, Fixed):
                self._put(part.data)
            elif part.encoding is not None:
                self._put_encoded(part, part.encoding)
            else:
                self._stream(part)
        self._flush(last=True)
        return Written(self._offset - span.offset, self._crc32)

    def recall(self, span: Span, descriptor: int, written: Written) -> bool:
        """Take in a span that an earlier run wrote, as if it had been written now.

        It is read once. Returns False, and has done nothing, if the file does not hold what that
        run noted, or what is known beforehand of the span.
        """
        stored = bytearray()
        holds = self._take_in(span, descriptor, written, stored)
        for part in span.parts:
            if isinstance(part, Fixed):
                continue
            if not holds:
                part.checksum.reset()
            elif part.encoding is not None:
                part.encoding.recall(bytes(stored))
            else:
                part.trailer()
        return holds

    def _take_in(self, span: Span, descriptor: int, written: Written, stored: bytearray) -> bool:
        """Read a span back, and have checksums see the content; that of encoded is in `stored`."""
        offset, left, found = span.offset, written.nbytes, 0

        def pieces(nbytes: int) -> Iterator[memoryview]:
            nonlocal offset, left, found
            for view in self._read_back(descriptor, offset, min(nbytes, left)):
                offset, left, found = offset + len(view), left - len(view), crc32(view, found)
                yield view

        for part in span.parts:
            if isinstance(part, Fixed):
                if b"".join(map(bytes, pieces(part.nbytes))) != part.data:
                    return False
            elif part.encoding is not None:
                stored.extend(b"".join(map(bytes, pieces(left))))
            else:
                for view in pieces(part.content_bytes):
                    if part.keeps is not None and not part.keeps(view):
                        return False
                    part.checksum.update(view)
                for _ in pieces(part.trailer_bytes):
                    pass
        return left == 0 and found == written.crc32

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
        view = self._buffer[self._begun : self._filled]
        self._crc32 = crc32(view, self._crc32)
        if self._compares:
            self._require_same(view)
        elif last or not (self._makes_holes and _is_hole(view)):
            place = self._descriptor, self._direct
            try_again(lambda: write_blocks(*place, view, self._offset), self._stop)
        if len(view) > len(self._buffer) // 2 and not self._compares:
            start_writeback(self._descriptor, self._offset, len(view))
            behind = self._offset - self._unwritten_bytes
            if behind >= self._start:
                finish_writeback(self._descriptor, behind, len(view))
                if self._drops_behind:
                    drop_behind(self._descriptor, self._start, behind + len(view))
        self._offset += len(view)
        if self._told is not None:
            self._told(len(view))
        self._begin()

    def _require_same(self, view: memoryview) -> None:
        """Compare a view with what the file holds; between fills the scratch is free for that."""
        for start in range(0, len(view), len(self._scratch)):
            wanted = view[start : start + len(self._scratch)]
            found = self._scratch[: len(wanted)]
            count = read_into(self._descriptor, found, self._offset + start)
            if count < len(wanted) or not np.array_equal(found, wanted):
                raise DifferentError

    def _begin(self) -> None:
        """Begin to fill the buffer as far behind a block's beginning as the file is."""
        self._begun = self._filled = self._offset % BLOCK_BYTES if self._direct >= 0 else 0

    def _put(self, data: bytes | memoryview) -> None:
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

    def _put_encoded(self, region: Region, encoding: Encoding) -> None:
        """Write what a region's content is turned into, neither of which the buffer holds.

        All that is to be done with bytes is done a piece at a time, while they are in the cache.
        """
        content = self._content(region.content_bytes)
        filler = RegionFiller(region, self._reader, self._scratch)
        for piece in self._pieces(content, region.target_itemsize):
            self._require_going_on()
            filler.fill(piece)
            region.checksum.update(piece)
        for piece in self._pieces(memoryview(encoding.encode(content))):
            encoding.checksum.update(piece)
            self._put(piece)
        self._put(region.trailer())

    def _pieces(self, view: memoryview, itemsize: int = 1) -> Iterator[memoryview]:
        """Yield a view in pieces of whole elements that are no longer than the buffer."""
        step = len(self._buffer) // itemsize * itemsize
        for at in range(0, len(view), step):
            yield view[at : at + step]


def _is_hole(view: memoryview) -> bool:
    """Tell whether leaving a view out makes a hole; a look at its beginning mostly is enough."""
    if len(view) < _LEAST_HOLE_BYTES or any(view[:_LOOK_BYTES]):
        return False
    return not np.frombuffer(view, dtype=np.uint8).any()
