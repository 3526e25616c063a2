"""Stored bytes of a chunk: optionally compressed, always followed by a CRC-32C."""

import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from streamshard.checksums import crc32, crc32c
from streamshard.errors import IntegrityError
from streamshard.formats.zarr import blosc_frame
from streamshard.formats.zarr.blosc_frame import HEADER_BYTES, PIECE_BYTES
from streamshard.model import Memory, StoredBytes

Stored = bytes | bytearray | memoryview

LIMIT_BYTES: Final = (1 << 31) - 1
"""More than Blosc compresses in one piece."""
_NOT_ITS_CHECKSUM: Final = "damaged: its bytes do not match the checksum at its end"
CHECKSUM_BYTES: Final = 4
"""Length of the checksum that Zarr's crc32c codec appends."""
EARLY_SETTINGS: Final = {"clevel": 5, "shuffle": "bitshuffle", "blocksize": 0}
"""Blosc's settings in early stores. A frame says itself how it was made."""
SETTINGS: Final = {"clevel": 1, "shuffle": "shuffle", "blocksize": 512 << 10}
"""Blosc's settings, in the words of Zarr's blosc codec.

Zstandard codes at most 128 KiB in one block, with one table of frequencies. In blocks of this
size that is one byte of all elements: the bytes that hold exponents become small, those that hold
the ends of mantissas are stored as they are, and quickly. A higher level finds no more in floats,
and makes chunks larger where it takes chance for repetition.
"""


_LEAST_BLOCK: Final = 1 << 16
"""No block of a large chunk is smaller; each takes 8 bytes more than its content, at most."""


def serialize_checksum(value: int) -> bytes:
    return struct.pack("<I", value)


@dataclass(frozen=True, slots=True)
class BloscChunk:
    """Compresses and decompresses chunks of one dtype with Zstandard, without their checksums."""

    itemsize: int

    def encode(self, content: memoryview) -> bytes:
        # Not at the top: it is slow to import, and only compressed stores need it.
        from numcodecs.blosc import Blosc

        blosc = Blosc(cname="zstd", **SETTINGS | {"shuffle": Blosc.SHUFFLE})
        # Blosc shuffles by the item size of the array that it is given.
        return bytes(blosc.encode(np.frombuffer(content, dtype=f"V{self.itemsize}")))

    def decode(self, encoded: memoryview, content: memoryview) -> None:
        from numcodecs.blosc import decompress  # not at the top, as above

        blosc_frame.require_size(encoded, len(content))
        blosc_frame.require_whole(encoded)
        decompress(encoded, content)  # a frame says itself how it was made


def most_encoded_bytes(nbytes: int) -> int:
    """Return how many bytes content becomes at most: blocks may be stored as they are."""
    return nbytes + HEADER_BYTES + (0 if nbytes < 2 * PIECE_BYTES else nbytes // _LEAST_BLOCK * 8)


class BloscEncoder:
    """Encodes one chunk; see `Encoder`."""

    def __init__(self, encode: Callable[[memoryview], bytes], nbytes: int) -> None:
        self._encode = encode
        self._nbytes = nbytes
        self._header = b""
        """A header like the chunk's."""
        self._room = b""
        """Zeros that are encoded in front of a piece, once one did not become smaller."""
        self._starts: list[NDArray[np.uint32]] = []
        """Where the blocks of each piece begin, after the head."""
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


class EncodedChunk:
    """One compressed chunk file, to be read as a whole."""

    def __init__(
        self,
        path: Path,
        codec: BloscChunk,
        *,
        stored_bytes: int,
        stored_crc32: int,
        content_bytes: int,
    ) -> None:
        self._path = path
        self._codec = codec
        self._stored_bytes = stored_bytes
        self._stored_crc32 = stored_crc32
        self._content_bytes = content_bytes

    def decode(
        self, file: StoredBytes, stored: Memory, content: Memory, part: tuple[int, int] | None
    ) -> tuple[int, memoryview]:
        """Read the chunk, and decompress what is wanted of it into the caller's memory."""
        taken = _InOrder(file, self._stored_bytes)
        try:
            piece = self._decoded(taken, stored, content, part)
        except (IntegrityError, RuntimeError, ValueError) as error:
            self._require_intact(taken, stored)  # damage is why, if there is any
            if isinstance(error, IntegrityError):
                raise IntegrityError(f"{error}", path=self._path) from error
            raise
        self._require_intact(taken, stored)
        return piece

    def _decoded(
        self, taken: "_InOrder", stored: Memory, content: Memory, part: tuple[int, int] | None
    ) -> tuple[int, memoryview]:
        start, stop = part or (0, self._content_bytes)
        view, nbytes = content(stop - start), max(0, self._stored_bytes - CHECKSUM_BYTES)
        for first, last, frame in blosc_frame.pieces(taken, nbytes, self._content_bytes, stored):
            low, high = max(first, start), min(last, stop)
            if low < high:
                is_whole = (low, high) == (first, last)
                target = view[low - start : high - start]
                piece = target if is_whole else memoryview(bytearray(last - first))
                self._codec.decode(frame, piece)
                if not is_whole:
                    target[:] = piece[low - first : high - first]
        return start, view

    def _require_intact(self, taken: "_InOrder", room: Memory) -> None:
        """Read the rest, and compare all with the manifest, and with the checksum at its end."""
        taken.read_rest(room)
        if taken.at != self._stored_bytes:
            message = f"{taken.at} bytes where {self._stored_bytes} were written"
            raise IntegrityError(message, path=self._path)
        # A chunk with a correct checksum of its own may still be another chunk.
        if taken.crc32 != self._stored_crc32:
            message = "damaged: its bytes are not those in the manifest"
            raise IntegrityError(message, path=self._path)
        if taken.end != serialize_checksum(taken.crc32c):
            raise IntegrityError(_NOT_ITS_CHECKSUM, path=self._path)


class _InOrder:
    """Reads a chunk file from its beginning to its end, and takes its checksums."""

    def __init__(self, file: StoredBytes, nbytes: int) -> None:
        self._file = file
        self._encoded_bytes = nbytes - CHECKSUM_BYTES
        self.at = 0
        """Bytes that were read; more than there should be, if the file is longer."""
        self.crc32 = 0
        self.crc32c = 0
        """Of all but the checksum at the end, which is `end`."""
        self.end = b""

    def __call__(self, view: memoryview) -> None:
        if self._file.takes_requests:
            self._file.will_need(self.at, self._encoded_bytes - self.at)
        piece = view[: self._file.read_into(view, self.at)]
        self.at += len(piece)
        self.crc32 = crc32(piece, self.crc32)
        self.crc32c = crc32c(piece, self.crc32c)
        if len(piece) < len(view):
            raise IntegrityError("cut off")

    def read_rest(self, room: Memory) -> None:
        """Read what is left, and the checksum at the end."""
        with suppress(IntegrityError):
            while self.at < self._encoded_bytes:
                self(room(min(PIECE_BYTES, self._encoded_bytes - self.at)))
            end = memoryview(bytearray(CHECKSUM_BYTES + 1))
            self.end = bytes(end[: self._file.read_into(end, self.at)])
            self.at += len(self.end)
            self.crc32 = crc32(self.end, self.crc32)


def require_checksum(stored: Stored, path: Path) -> memoryview:
    """Check the CRC-32C at the end of stored bytes; return the bytes before it, not copied."""
    data, end = memoryview(stored)[:-CHECKSUM_BYTES], stored[-CHECKSUM_BYTES:]
    if len(stored) < CHECKSUM_BYTES or end != serialize_checksum(crc32c(data)):
        raise IntegrityError(_NOT_ITS_CHECKSUM, path=path)
    return data
