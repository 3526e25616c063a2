"""Streams parts through one buffer into a file: large sequential writes even of small fragments."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from streamshard.checksums import RunningChecksums, crc32, join_crc32
from streamshard.engine.journals.journal import Written
from streamshard.engine.numeric.cast import count_infinite
from streamshard.engine.numeric.crc import CRC32C
from streamshard.engine.run.region import ReadAhead, RegionFiller
from streamshard.engine.run.source_reader import ReusableBuffer, SourceReader
from streamshard.engine.run.work import Codec, Fixed, Region, RegionResult, Span, SpanResult
from streamshard.engine.run.write_buffer import WriteBuffer
from streamshard.errors import IntegrityError
from streamshard.io.retry import try_again
from streamshard.io.sink import Sink

_UNWRITTEN_BYTES: Final = (16 << 20, 256 << 20)
"""Smallest and largest amount that a worker may be ahead of the disk."""
_LEAST_HOLE_BYTES: Final = 4096
_LOOK_BYTES: Final = 64
_STEP_BYTES: Final = 1 << 19
"""What is read is still in the CPU's cache when its checksums are computed; a multiple of all
sizes of elements."""
_LONGEST: Final = 16
"""Bytes of the largest element of any dtype."""


def unwritten_bytes(available_bytes: int) -> int:
    """Return how many bytes a worker may be ahead of the disk, by the available memory.

    Unwritten pages count against the limit of a memory cgroup, which kills processes that exceed
    it. If there is enough memory, waiting for the disk only costs time.
    """
    least, most = _UNWRITTEN_BYTES
    return min(max(available_bytes // 32, least), most)


class DifferentError(Exception):
    """Raised when a file differs from the bytes that it was compared with."""


class Window(WriteBuffer):
    """A worker's buffer, from which it writes a file, or compares an existing file."""

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
        compares: bool = False,
    ) -> None:
        super().__init__(
            buffer, unwritten_bytes, drops_behind=drops_behind, stop=stop, progress=progress
        )
        self._compares = compares
        self._scratch = scratch
        self._reader = reader
        self._ahead = ReadAhead((), reader)
        """What reads ahead for the current span."""
        self._crc32 = 0
        """CRC-32 of the span up to the last part, or piece of a part, that is complete."""
        self._makes_holes = True
        self._content, self._encoded = ReusableBuffer(), ReusableBuffer()
        """Memory for a piece of content before it is encoded, and of what was encoded before."""

    def write(self, span: Span, file: Sink, *, is_new: bool = True) -> SpanResult:
        """Write a span of a file.

        `is_new`: whether the file is empty at that place, so that zeros need not be written.
        """
        self.begin(file, span.offset)
        self._crc32, self._makes_holes = 0, is_new
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
        return self._result(span, regions)

    def recall(self, span: Span, file: Sink, written: Written) -> SpanResult | None:
        """Return the result of a span that an earlier run wrote, as if it were written now.

        Reads the span once. Returns None if its size or content differs from that run's journal or
        from the span's fixed parts, or if overflow is to be counted and an element is infinite: it
        may have been infinite before the cast.
        """
        if written.nbytes != span.nbytes and not span.is_encoded:
            return None
        self._file, self._offset, self._crc32 = file, span.offset, 0
        end = span.offset + written.nbytes
        regions = []
        for part in span.parts:
            if isinstance(part, Fixed):
                if self._recall_bytes(part.nbytes, end) != part.data:
                    return None
                continue
            region = self._recall_region(part, end)
            if region is None:
                return None
            regions.append(region)
        found = self._result(span, regions)
        return found if found.written == written else None

    def _result(self, span: Span, regions: Sequence[RegionResult]) -> SpanResult:
        written = Written(self._offset - span.offset, self._crc32)
        return SpanResult(span.offset, written, tuple(regions))

    def _recall_region(self, region: Region, end: int) -> RegionResult | None:
        offset, sums, cast = self._offset, checksums_of(region), region.cast
        if region.codec is None:
            for view in self._read_back(region.content_bytes, end):
                if region.counts_overflow and cast and count_infinite(view, cast.target):
                    return None
                sums.update(view)
            self._crc32 = join_crc32(self._crc32, sums.crc32, sums.nbytes)
            self._recall_bytes(region.trailer_bytes, end)
        else:
            nbytes = end - offset - region.trailer_bytes
            try:
                for content in self._decoded(region, region.codec, nbytes):
                    sums.update(content)
            except (EOFError, RuntimeError, ValueError, IntegrityError):
                return None  # it is damaged
            self._recall_bytes(region.trailer_bytes, end)
        return RegionResult(offset, sums.digest, tuple(sums.blocks))

    def _decoded(self, region: Region, codec: Codec, nbytes: int) -> Iterator[memoryview]:
        """Read back the encoded bytes of a region, and yield its content in pieces."""

        def read(view: memoryview) -> None:
            self._require_going_on()
            if self._file.read_into(view, self._offset) < len(view):
                raise EOFError
            self._crc32 = crc32(view, self._crc32)
            self._offset += len(view)

        for start, stop, encoded in codec.pieces(read, nbytes, region.content_bytes, self._encoded):
            content = self._content(stop - start)
            codec.decode(encoded, content)
            yield content

    def _recall_bytes(self, nbytes: int, end: int) -> bytes:
        """Read the next bytes of a span whole."""
        data = b"".join(map(bytes, self._read_back(nbytes, end)))
        self._crc32 = crc32(data, self._crc32)
        return data

    def _read_back(self, nbytes: int, end: int) -> Iterator[memoryview]:
        """Yield the next bytes of a span through the buffer, up to its end or the file's."""
        end = min(end, self._offset + nbytes)
        while self._offset < end:
            self._require_going_on()
            # Whole elements of any dtype.
            room = max(len(self.buffer) // _LONGEST * _LONGEST, 1)
            view = self.buffer[: min(room, end - self._offset)]
            if self._file.read_into(view, self._offset) < len(view):
                return  # the file was cut off, maybe within an element
            self._offset += len(view)
            yield view

    def _deliver(self, view: memoryview, *, last: bool) -> None:
        """Write or compare; zeros are skipped to make a hole, except at the end."""
        if self._compares:
            self._require_same(view)
            return
        if last or not (self._makes_holes and _is_hole(view)):
            self._write(view)
        self._pace(view)

    def _require_same(self, view: memoryview) -> None:
        """Compare a view with the file's content; the scratch is free between fills."""
        for start in range(0, len(view), len(self._scratch)):
            wanted = view[start : start + len(self._scratch)]
            found = self._scratch[: len(wanted)]
            count = self._file.read_into(found, self._offset + start)
            if count < len(wanted) or not np.array_equal(found, wanted):
                raise DifferentError

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

    def _put_encoded(self, region: Region, codec: Codec) -> RegionResult:
        """Encode a region piece by piece, and write what becomes of each; its head comes last.

        Each piece passes through all steps at once, while it is in the CPU's cache.
        """
        filler, sums, offset = self.filler(region, self._ahead), checksums_of(region), self._offset
        encoder, body = codec.encoder(region.content_bytes), RunningChecksums(takes_crc32c=True)
        waits, held = self._compares or self._file.only_grows, list[memoryview]()
        for nbytes in _piece_sizes(region.content_bytes, codec.piece_bytes):
            self._require_going_on()
            content = self._content(nbytes)
            filler.fill(content)
            sums.update(content)
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
        """Return what delivers a region's content."""
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
