"""Encodes chunks piece by piece, to the same frames as at once."""

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from streamshard.formats.zarr import blosc_frame
from streamshard.formats.zarr.blosc_frame import HEADER_BYTES, PIECE_BYTES
from streamshard.formats.zarr.chunks import BloscChunk

_LEAST_BLOCK: Final = 1 << 16
"""No block of a large chunk is smaller; each takes 8 bytes more than its content, at most."""


def most_encoded_bytes(nbytes: int) -> int:
    """Return how many bytes content becomes at most: blocks may be stored as they are."""
    return nbytes + HEADER_BYTES + (0 if nbytes < 2 * PIECE_BYTES else nbytes // _LEAST_BLOCK * 8)


class BloscEncoder:
    """Encodes one chunk; see `Encoder`.

    `encode`: makes a frame of content.
    `nbytes`: size of the chunk's content.
    """

    def __init__(self, encode: Callable[[memoryview], bytes], nbytes: int) -> None:
        self._encode = encode
        self._nbytes = nbytes
        self._header = b""
        """A header like the chunk's."""
        self._room = b""
        """Zeros that are encoded in front of a piece, once one did not become smaller."""
        self._starts: list[NDArray[np.uint32]] = []
        """Where the blocks of each piece begin, behind the head."""
        self._encoded_bytes = 0

    def add(self, piece: memoryview) -> memoryview:
        frame = memoryview(b"" if self._room else self._encode(piece))
        if not self._room and blosc_frame.is_raw(frame):
            if len(piece) == self._nbytes:
                self._header = bytes(frame[:HEADER_BYTES])
                return frame[HEADER_BYTES:]
            # A block of zeros makes room for blocks that do not become smaller.
            self._room = bytes(blosc_frame.block_bytes(frame))
        if self._room:
            frame = memoryview(self._encode(memoryview(self._room + piece)))
        count = -(-len(piece) // blosc_frame.block_bytes(frame))
        starts = np.frombuffer(frame, "<u4", count, HEADER_BYTES + 4 * bool(self._room))
        first = int(starts.min())
        self._header = self._header or bytes(frame[:HEADER_BYTES])
        self._starts.append(starts - first + self._encoded_bytes)
        self._encoded_bytes += len(frame) - first
        return frame[first:]

    @property
    def head(self) -> bytes:
        if not self._starts:
            return self._header
        header = memoryview(self._header)
        head_bytes = HEADER_BYTES + 4 * -(-self._nbytes // blosc_frame.block_bytes(header))
        frame_bytes = head_bytes + self._encoded_bytes
        starts = (np.concatenate(self._starts) + head_bytes).astype("<u4").tobytes()
        made = blosc_frame.make_header(header, self._nbytes, frame_bytes) + starts
        return made.ljust(head_bytes, b"\0")


class BloscCodec(BloscChunk):
    """Compresses chunks of one dtype, also in pieces; see `Codec`."""

    @property
    def piece_bytes(self) -> int:
        return PIECE_BYTES

    def encoder(self, nbytes: int) -> BloscEncoder:
        return BloscEncoder(self.encode, nbytes)
