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
        said = int.from_bytes(encoded[_BLOSC_SIZE], "little")
        if len(encoded) < _BLOSC_HEADER_BYTES or said != len(content):
            raise IntegrityError(f"says it decodes to {said} bytes where {len(content)} belong")
        self._blosc.decode(encoded, content)


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

    def decode(self, file: StoredBytes, stored: Memory, content: Memory) -> memoryview:
        """Read and decompress the chunk into the caller's memory."""
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
        view = content(self._content_bytes)
        encoded = require_checksum(data, self._path)
        try:
            self._codec.decode(encoded, view)
        except IntegrityError as error:
            raise IntegrityError(f"{error}", path=self._path) from error
        return view


def require_checksum(stored: Stored, path: Path) -> memoryview:
    """Check the CRC-32C at the end of stored bytes; return the bytes before it, not copied."""
    data, end = memoryview(stored)[:-CHECKSUM_BYTES], stored[-CHECKSUM_BYTES:]
    found = google_crc32c.value(np.frombuffer(data, dtype=np.uint8)) if len(data) else 0
    if len(stored) < CHECKSUM_BYTES or end != serialize_checksum(found):
        raise IntegrityError("damaged: its bytes do not match the checksum at its end", path=path)
    return data
