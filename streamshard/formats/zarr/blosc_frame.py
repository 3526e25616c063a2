"""Blosc's frames: a header, where each block begins, and blocks, none of which needs another."""

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from streamshard.errors import IntegrityError
from streamshard.model import Memory

HEADER_BYTES: Final = 16
_SIZE: Final = slice(4, 8)
"""Place of the uncompressed size in the header. Blosc allocates that many bytes."""
_BLOCK: Final = slice(8, 12)
_ENCODED: Final = slice(12, 16)
"""Place of the frame's own size."""
_FLAGS, _RAW = 2, 0x2
"""Place of the flags; the flag of content that follows the header as it is."""
PIECE_BYTES: Final = 1 << 20
"""Content that is encoded or decoded at once, so that it and what becomes of it stay in the CPU's
cache; whole blocks of both codecs."""


def require_size(frame: memoryview, nbytes: int) -> None:
    """Refuse a frame that says it decodes to another size."""
    said = int.from_bytes(frame[_SIZE], "little")
    if len(frame) < HEADER_BYTES or said != nbytes:
        raise IntegrityError(f"says it decodes to {said} bytes where {nbytes} belong")


def require_whole(frame: memoryview) -> None:
    """Refuse a frame that is shorter than it says, as Blosc would read past its end."""
    said = int.from_bytes(frame[_ENCODED], "little")
    if len(frame) < HEADER_BYTES or said > len(frame):
        raise IntegrityError(f"a frame of {max(said, HEADER_BYTES)} bytes ends after {len(frame)}")


def block_bytes(frame: memoryview) -> int:
    return int.from_bytes(frame[_BLOCK], "little")


def is_raw(frame: memoryview) -> bool:
    """Tell whether a frame holds its content as it is, because that does not compress."""
    return bool(frame[_FLAGS] & _RAW)


def make_header(like: memoryview, content_bytes: int, frame_bytes: int) -> bytes:
    """Return the header of a frame that holds blocks of another."""
    header = bytearray(like[:HEADER_BYTES])
    header[_FLAGS] &= ~_RAW
    header[_SIZE] = content_bytes.to_bytes(4, "little")
    header[_ENCODED] = frame_bytes.to_bytes(4, "little")
    return bytes(header)


def pieces(
    read: Callable[[memoryview], None], nbytes: int, content_bytes: int, room: Memory
) -> Iterator[tuple[int, int, memoryview]]:
    """Read a frame of some blocks after the other, as frames of their own.

    Yields where the content of each begins and ends, and the frame, until the next is read.

    `read`: fills a view with the next bytes.
    `nbytes`: size of the whole frame.
    """
    header = memoryview(bytearray(min(HEADER_BYTES, nbytes)))
    read(header)
    require_size(header, content_bytes)
    block, starts = block_bytes(header), np.array([HEADER_BYTES], "<u4")
    if not is_raw(header) and 0 < block < content_bytes:
        count = -(-content_bytes // block)
        if HEADER_BYTES + 4 * count > nbytes:
            raise IntegrityError(f"lists fewer than {count} blocks")
        starts = np.zeros(count + 1, "<u4")
        read(starts[:-1].data.cast("B"))
        starts[-1] = nbytes
    count, begin = len(starts) - 1, HEADER_BYTES + 4 * (len(starts) - 1)
    if not count or starts[0] != begin or (starts[1:] <= starts[:-1]).any():
        frame = room(nbytes)  # threads of Blosc's own may have put the blocks in another order
        frame[:HEADER_BYTES], frame[HEADER_BYTES:begin] = header, starts[:-1].data.cast("B")
        read(frame[begin:])
        yield 0, content_bytes, frame
        return
    few, first = max(1, PIECE_BYTES // block), 0
    while first < count:
        # Blosc decodes a last block that is shorter than others only after another.
        last = first + few if count - first > few + 1 else count
        start, stop, toc_bytes = first * block, min(last * block, content_bytes), 4 * (last - first)
        size = int(starts[last] - starts[first])
        frame = room(HEADER_BYTES + toc_bytes + size)
        frame[:HEADER_BYTES] = make_header(header, stop - start, len(frame))
        places = starts[first:last] - starts[first] + (HEADER_BYTES + toc_bytes)
        frame[HEADER_BYTES : HEADER_BYTES + toc_bytes] = places.data.cast("B")
        read(frame[HEADER_BYTES + toc_bytes :])
        yield start, stop, frame
        first = last
