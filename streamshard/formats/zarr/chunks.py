"""Stored bytes of a chunk: optionally compressed, always followed by a CRC-32C."""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import google_crc32c
import numpy as np
from isal import isal_zlib

from streamshard.errors import IntegrityError
from streamshard.model import Memory, StoredBytes

if TYPE_CHECKING:
    from numcodecs.blosc import Blosc

Stored = bytes | bytearray | memoryview

LIMIT_BYTES: Final = (1 << 31) - 1
"""More than Blosc compresses in one piece."""
CHECKSUM_BYTES: Final = 4
"""Length of the checksum that Zarr's crc32c codec appends."""
_BLOSC_HEADER_BYTES: Final = 16
_BLOSC_SIZE: Final = slice(4, 8)
"""Place of the uncompressed size in Blosc's header. Blosc allocates that many bytes."""
_BLOSC_FLAGS, _BLOSC_RAW, _BLOSC_BLOCK = 2, 0x2, slice(8, 12)
"""Place of the flags, the flag of bytes that are not compressed, place of a block's size. Behind
the header stands where each block begins: blocks are decoded one by one, in any order."""
EARLY_SETTINGS: Final = {"clevel": 5, "shuffle": "bitshuffle", "blocksize": 0}
"""Blosc's settings in early stores, for all codecs. A frame says itself how it was made."""
_ZSTD_SETTINGS: Final = {"clevel": 1, "shuffle": "shuffle", "blocksize": 512 << 10}
"""Zstandard codes at most 128 KiB in one block, with one table of frequencies. In blocks of this
size that is one byte of all elements: the bytes that hold exponents become small, those that hold
the ends of mantissas are stored as they are, and quickly. A higher level finds no more in floats,
and makes chunks larger where it takes chance for repetition."""


def serialize_checksum(crc32c: int) -> bytes:
    """Serialize the checksum at the end of a chunk as Zarr's crc32c codec does."""
    return struct.pack("<I", crc32c)


def blosc_settings(codec: str) -> dict[str, Any]:
    """Return Blosc's settings for `lz4` or `zstd`, in the words of Zarr's blosc codec."""
    # lz4 codes no frequencies: it finds equal bits only where they lie together.
    return dict(_ZSTD_SETTINGS if codec == "zstd" else EARLY_SETTINGS)


@dataclass(frozen=True, slots=True)
class BloscChunk:
    """Compresses and decompresses chunks of one dtype, without their checksums."""

    name: str
    """Name of the compression: `lz4`, `zstd`."""
    itemsize: int

    @property
    def _blosc(self) -> "Blosc":
        # Not at the top: it is slow to import, and only compressed stores need it.
        from numcodecs.blosc import Blosc

        settings = blosc_settings(self.name)
        shuffle = getattr(Blosc, settings["shuffle"].upper())
        return Blosc(cname=self.name, **settings | {"shuffle": shuffle})

    def encode(self, content: memoryview) -> bytes:
        """Compress a chunk's content."""
        # Blosc shuffles by the item size of the array that it is given.
        return bytes(self._blosc.encode(np.frombuffer(content, dtype=f"V{self.itemsize}")))

    def decode(self, encoded: memoryview, content: memoryview) -> None:
        """Decompress a chunk's content into a view of its size."""
        _require_size(encoded, len(content))
        self._blosc.decode(encoded, content)

    @staticmethod
    def keep(encoded: memoryview, nbytes: int, part: tuple[int, int] | None) -> tuple[int, int]:
        """Leave in encoded bytes the blocks that hold a part; returns what these decode to."""
        _require_size(encoded, nbytes)
        block = int.from_bytes(encoded[_BLOSC_BLOCK], "little")
        starts = encoded[_BLOSC_HEADER_BYTES:]
        if part is None or encoded[_BLOSC_FLAGS] & _BLOSC_RAW or not 0 < block < nbytes:
            return 0, nbytes
        # Blosc decodes a last block that is shorter than others only behind another.
        first, last = min(part[0] // block, nbytes // block - 1), -(-part[1] // block)
        start, stop = first * block, min(last * block, nbytes)
        if 4 * last > len(starts):
            raise IntegrityError(f"lists fewer than {last} blocks")
        starts[: 4 * (last - first)] = bytes(starts[4 * first : 4 * last])
        encoded[_BLOSC_SIZE] = (stop - start).to_bytes(4, "little")
        return start, stop


def _require_size(encoded: memoryview, nbytes: int) -> None:
    said = int.from_bytes(encoded[_BLOSC_SIZE], "little")
    if len(encoded) < _BLOSC_HEADER_BYTES or said != nbytes:
        raise IntegrityError(f"says it decodes to {said} bytes where {nbytes} belong")


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

    @property
    def codec_name(self) -> str:
        """Name of the compression: `lz4`, `zstd`."""
        return self._codec.name

    def decode(
        self, file: StoredBytes, stored: Memory, content: Memory, part: tuple[int, int] | None
    ) -> tuple[int, memoryview]:
        """Read the chunk, and decompress what is wanted of it into the caller's memory."""
        data = stored(self._stored_bytes + 1)
        found = file.read_into(data, 0)
        if found != self._stored_bytes:
            message = f"{found} bytes where {self._stored_bytes} were written"
            raise IntegrityError(message, path=self._path)
        data = data[:-1]
        # A chunk with a correct checksum of its own may still be another chunk.
        if isal_zlib.crc32(data) != self._stored_crc32:
            message = "damaged: its bytes are not those in the manifest"
            raise IntegrityError(message, path=self._path)
        encoded = require_checksum(data, self._path)
        try:
            start, stop = self._codec.keep(encoded, self._content_bytes, part)
            view = content(stop - start)
            self._codec.decode(encoded, view)
        except IntegrityError as error:
            raise IntegrityError(f"{error}", path=self._path) from error
        return start, view


def require_checksum(stored: Stored, path: Path) -> memoryview:
    """Check the CRC-32C at the end of stored bytes; return the bytes before it, not copied."""
    data, end = memoryview(stored)[:-CHECKSUM_BYTES], stored[-CHECKSUM_BYTES:]
    found = google_crc32c.value(np.frombuffer(data, dtype=np.uint8)) if len(data) else 0
    if len(stored) < CHECKSUM_BYTES or end != serialize_checksum(found):
        raise IntegrityError("damaged: its bytes do not match the checksum at its end", path=path)
    return data
