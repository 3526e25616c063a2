"""Streams parts through one buffer into a file: large sequential writes even of small fragments."""

import threading
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from streamshard.checksums import RunningChecksums, crc32, join_crc32
from streamshard.engine.numeric.crc import CRC32C
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
from streamshard.engine.run.write_buffer import WriteBuffer
from streamshard.io.file_map import MOST_BYTES
from streamshard.io.readable import OpenedFile
from streamshard.io.retry import try_again
from streamshard.io.sink import Sink

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
        found, at = 0, 0
        while at < written.nbytes:
            self._require_going_on()
            view = self.buffer[: written.nbytes - at]
            if file.read_into(view, at) < len(view):
                return False
            found, at = crc32(view, found), at + len(view)
        return Written(file.nbytes, found) == written

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
        left = region.content_bytes
        while left:
            room = len(self.buffer) - self._filled
            if room < region.target_itemsize:
                self.flush()
                continue
            if self._file.takes_any_view and self._write_mapped(
                filler, sums, min(left, MOST_BYTES)
            ):
                left = region.content_bytes - sums.nbytes
                continue
            count = min(left, room - room % region.target_itemsize, _STEP_BYTES)
            view = self.buffer[self._filled : self._filled + count]
            sums.update(view, filler.fill(view))
            self._filled += count
            left -= count
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
        waits, held = self._file.only_grows, list[memoryview]()
        for nbytes in _piece_sizes(region.content_bytes, codec.piece_bytes):
            self._require_going_on()
            content, checksum = filler.view(nbytes, self._content)
            sums.update(content, checksum)
            encoded = encoder.add(content)
            if waits:
                held.append(encoded)
            else:
                if not body.nbytes:
                    self.put(memoryview(bytes(len(encoder.head))))
                self.put(encoded)
            body.update(encoded)
        head, front = memoryview(encoder.head), RunningChecksums(takes_crc32c=True)
        front.update(head)
        if waits:
            for view in (head, *held):
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
    """Return what takes the checksums of a region's content."""
    in_trailer = region.trailer is not None and region.trailer.is_crc32c
    takes_crc32c = region.takes_crc32c or (in_trailer and region.codec is None)
    return RunningChecksums(takes_crc32c=takes_crc32c, block_bytes=region.block_bytes)


def _is_hole(view: memoryview) -> bool:
    """Tell whether a view has only zeros and is long enough for a hole; mostly its start tells."""
    if len(view) < _LEAST_HOLE_BYTES or any(view[:_LOOK_BYTES]):
        return False
    return not np.frombuffer(view, dtype=np.uint8).any()
