"""Streams parts through one buffer into a file: large sequential writes even of small fragments."""

import threading
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from streamshard.checksums import RunningChecksums, crc32, join_crc32
from streamshard.engine.numeric.digests import CRC32C
from streamshard.engine.run.region import ReadAhead, RegionFiller
from streamshard.engine.run.source_reader import ReusableBuffer, SourceReader
from streamshard.engine.run.work import (
    Codec,
    Fixed,
    Region,
    RegionResult,
    Span,
    SpanResult,
    Written,
)
from streamshard.io.durability import finish_writeback, start_writeback
from streamshard.io.memory_map import MOST_BYTES
from streamshard.io.page_cache import drop_behind
from streamshard.io.readable import OpenedFile
from streamshard.io.retry import StoppedError, try_again
from streamshard.io.sink import LocalSink, Sink

_UNWRITTEN_BYTES: Final = (16 << 20, 256 << 20)
"""Smallest and largest amount that a worker may be ahead of the disk."""
_LEAST_HOLE_BYTES: Final = 4096
_LOOK_BYTES: Final = 64
_STEP_BYTES: Final = 1 << 19
"""What is read is still in the CPU's cache when its checksums are computed; a multiple of all
sizes of elements."""


def unwritten_bytes(available_bytes: int) -> int:
    """Return how many bytes a worker may be ahead of the disk, by the available memory.

    Unwritten pages count against the limit of a memory cgroup, which kills processes that exceed
    it. If there is enough memory, waiting for the disk only costs time.
    """
    least, most = _UNWRITTEN_BYTES
    return min(max(available_bytes // 32, least), most)


class WriteBuffer:
    """Collects bytes that follow each other, and writes them whenever the buffer is full."""

    def __init__(
        self,
        buffer: memoryview,
        unwritten_bytes: int,
        *,
        drops_behind: bool = False,
        stop: threading.Event | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.buffer = buffer
        self._unwritten_bytes = unwritten_bytes
        self._drops_behind = drops_behind
        self._stop = stop or threading.Event()
        self._progress = progress
        self._file: Sink = LocalSink(-1)
        self._offset = 0
        self._begun = self._filled = 0
        """Start and stop of the part of the buffer that is not written yet."""
        self._start = 0
        """Byte offset where writing began."""

    def begin(self, file: Sink, offset: int) -> None:
        self._file, self._offset, self._start = file, offset, offset
        self._restart()

    def put(self, view: memoryview) -> None:
        while len(view):
            if self._filled == len(self.buffer):
                self.flush()
            piece = view[: len(self.buffer) - self._filled]
            # Other threads run while an array is copied, but not while a view is.
            room = self.buffer[self._filled : self._filled + len(piece)]
            np.frombuffer(room, np.uint8)[:] = np.frombuffer(piece, np.uint8)
            self._filled += len(piece)
            view = view[len(piece) :]

    def put_through(self, view: memoryview) -> None:
        """Write bytes from where they are, after those in the buffer."""
        if self._filled > self._begun:
            self.flush()
        self._require_going_on()
        self._write_out(view, last=False)

    def flush(self, *, last: bool = False) -> None:
        """Write what is in the buffer; `last`: whether nothing follows."""
        self._require_going_on()
        view = self.buffer[self._begun : self._filled]
        self._write_out(view, last=last)

    def _write_out(self, view: memoryview, *, last: bool) -> None:
        self._deliver(view, last=last)
        self._offset += len(view)
        self.advance(len(view))
        self._restart()

    def _deliver(self, view: memoryview, *, last: bool) -> None:
        self._write(view)
        self._pace(view)

    def _write(self, view: memoryview) -> None:
        try_again(lambda: self._file.write(view, self._offset), self._stop)

    def _pace(self, view: memoryview) -> None:
        """Let the disk keep up with what was written of a view."""
        if len(view) <= len(self.buffer) // 2:
            return
        start_writeback(self._file.descriptor, self._offset, len(view))
        behind = self._offset - self._unwritten_bytes
        if behind >= self._start:
            finish_writeback(self._file.descriptor, behind, len(view))
            if self._drops_behind:
                drop_behind(self._file.descriptor, self._start, behind + len(view))

    def advance(self, nbytes: int) -> None:
        if self._progress is not None:
            self._progress(nbytes)

    def _require_going_on(self) -> None:
        if self._stop.is_set():
            raise StoppedError

    def _restart(self) -> None:
        """Restart the buffer at the file offset's distance from a block boundary."""
        self._begun = self._filled = self._offset % self._file.block_bytes


class Window(WriteBuffer):
    """A worker's buffer, from which it writes files."""

    def __init__(
        self,
        buffer: memoryview,
        scratch: memoryview,
        reader: SourceReader,
        unwritten_bytes: int = _UNWRITTEN_BYTES[0],
        *,
        drops_behind: bool = False,
        stop: threading.Event | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(
            buffer, unwritten_bytes, drops_behind=drops_behind, stop=stop, progress=progress
        )
        self._scratch = scratch
        self._reader = reader
        self._ahead = ReadAhead((), reader)
        """What reads ahead for the current span."""
        self._crc32 = 0
        """CRC-32 of the span up to the last part, or piece of a part, that is complete."""
        self._content = ReusableBuffer()
        """Memory for a piece of content before it is encoded."""

    def write(self, span: Span, file: Sink) -> SpanResult:
        self.begin(file, span.offset)
        self._crc32 = 0
        copies = [part.copies for part in span.parts if isinstance(part, Region)]
        self._ahead = ReadAhead(copies, self._reader)
        regions = []
        for part in span.parts:
            if isinstance(part, Fixed):
                self._put(part.data)
            elif part.codec is None:
                regions.append(self._stream(part))
            else:
                regions.append(self._put_encoded(part, part.codec))
        self.flush(last=True)
        written = Written(self._offset - span.offset, self._crc32)
        return SpanResult(span.offset, written, tuple(regions))

    def is_so(self, file: OpenedFile, written: Written) -> bool:
        checksum, at = 0, 0
        while at < written.nbytes:
            self._require_going_on()
            view = self.buffer[: written.nbytes - at]
            if file.read_into(view, at) < len(view):
                return False
            checksum, at = crc32(view, checksum), at + len(view)
        return Written(file.nbytes, checksum) == written

    def _deliver(self, view: memoryview, *, last: bool) -> None:
        """Write; zeros are skipped to make a hole, except at the end."""
        if last or not (self._file.has_zeros and _is_hole(view)):
            self._write(view)
        self._pace(view)

    def _put(self, data: bytes) -> None:
        self._crc32 = crc32(data, self._crc32)
        self.put(memoryview(data))

    def _stream(self, region: Region) -> RegionResult:
        filler, sums = self.filler(region, self._ahead), checksums_of(region)
        offset = self._offset + self._filled - self._begun
        remainder = region.content_bytes
        while remainder:
            room = len(self.buffer) - self._filled
            if room < region.target_itemsize:
                self.flush()
                continue
            if self._file.takes_any_view and self._write_mapped(
                filler, sums, min(remainder, MOST_BYTES)
            ):
                remainder = region.content_bytes - sums.nbytes
                continue
            count = min(remainder, room - room % region.target_itemsize, _STEP_BYTES)
            view = self.buffer[self._filled : self._filled + count]
            sums.update(view, filler.fill(view))
            self._filled += count
            remainder -= count
        self._crc32 = join_crc32(self._crc32, sums.crc32, sums.nbytes)
        if region.trailer is not None:
            checksum = sums.crc32c if region.trailer.is_crc32c else sums.crc32
            self._put(region.trailer.serialize(checksum))
        return RegionResult(offset, sums.digest, tuple(sums.blocks), filler.overflowed)

    def _write_mapped(self, filler: RegionFiller, sums: RunningChecksums, nbytes: int) -> bool:
        """Write a region's next bytes from where they are mapped; tells whether they are."""
        mapped = filler.mapped(nbytes)
        if mapped is not None:
            sums.update(*mapped)
            self.put_through(mapped[0])
        return mapped is not None

    def _put_encoded(self, region: Region, codec: Codec) -> RegionResult:
        """Encode a region piece by piece, and write what becomes of each; its head comes last.

        Each piece passes through all steps at once, while it is in the CPU's cache.
        """
        filler, sums, offset = self.filler(region, self._ahead), checksums_of(region), self._offset
        encoder, body = codec.encoder(region.content_bytes), RunningChecksums(takes_crc32c=True)
        waits, pieces = self._file.only_grows, list[memoryview]()
        for nbytes in _piece_sizes(region.content_bytes, codec.piece_bytes):
            self._require_going_on()
            content, checksum = filler.view(nbytes, self._content)
            sums.update(content, checksum)
            encoded = encoder.add(content)
            if waits:
                pieces.append(encoded)
            else:
                if not body.nbytes:
                    self.put(memoryview(bytes(len(encoder.head))))
                self.put(encoded)
            body.update(encoded)
        head, front = memoryview(encoder.head), RunningChecksums(takes_crc32c=True)
        front.update(head)
        if waits:
            for view in (head, *pieces):
                self.put(view)
        else:
            self._put_back(head, offset)
        self._crc32 = join_crc32(front.crc32, body.crc32, body.nbytes)
        if region.trailer is not None:
            crc32c = CRC32C.joined(front.crc32c, body.crc32c, body.nbytes)
            self._put(region.trailer.serialize(crc32c if region.trailer.is_crc32c else self._crc32))
        return RegionResult(offset, sums.digest, tuple(sums.blocks), filler.overflowed)

    def _put_back(self, head: memoryview, offset: int) -> None:
        """Put bytes where others were put before, which may be written already."""
        written = min(len(head), self._offset - offset)
        if written:
            try_again(lambda: self._file.write(head[:written], offset), self._stop)
        self.buffer[self._begun : self._begun + len(head) - written] = head[written:]

    def filler(self, region: Region, ahead: ReadAhead | None = None) -> RegionFiller:
        return RegionFiller(region, self._reader, self._scratch, ahead)


def _piece_sizes(nbytes: int, step: int) -> Iterator[int]:
    """Divide a size into pieces, of which the last may be up to twice as long."""
    while nbytes >= 2 * step:
        yield step
        nbytes -= step
    yield nbytes


def checksums_of(region: Region) -> RunningChecksums:
    in_trailer = region.trailer is not None and region.trailer.is_crc32c
    takes_crc32c = region.takes_crc32c or (in_trailer and region.codec is None)
    return RunningChecksums(takes_crc32c=takes_crc32c, block_bytes=region.block_bytes)


def _is_hole(view: memoryview) -> bool:
    """Tell whether a view has only zeros and is long enough for a hole; mostly its start tells."""
    if len(view) < _LEAST_HOLE_BYTES or any(view[:_LOOK_BYTES]):
        return False
    return not np.frombuffer(view, dtype=np.uint8).any()
