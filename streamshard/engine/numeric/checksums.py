"""Running checksums over a stream of bytes."""

from typing import Protocol

import google_crc32c
import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray


class Checksum(Protocol):
    """A checksum of the bytes of a region so far."""

    def update(self, view: memoryview) -> None:
        """Add the next bytes."""

    def reset(self) -> None:
        """Begin again without any bytes."""


class Crc32:
    """CRC-32 as zip files use it."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, view: memoryview) -> None:
        """Take in the next bytes."""
        self.value = isal_zlib.crc32(view, self.value)

    def reset(self) -> None:
        """Begin again."""
        self.value = 0


class Crc32c:
    """CRC-32C (Castagnoli) as Zarr's checksum codec uses it."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, view: memoryview) -> None:
        """Take in the next bytes."""
        # The library needs a bytes-like object of its kind; an array over the view avoids a copy.
        self.value = google_crc32c.extend(self.value, np.frombuffer(view, dtype=np.uint8))

    def reset(self) -> None:
        """Begin again."""
        self.value = 0


class BlockCrc32:
    """CRC-32 of each block of fixed length, so that any block can be checked separately."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._values: list[int] = []
        self._open = 0
        """Bytes of the last, incomplete block so far."""

    def update(self, view: memoryview) -> None:
        """Take in the next bytes."""
        while len(view):
            if self._open == 0:
                self._values.append(0)
            piece = view[: self._block_bytes - self._open]
            self._values[-1] = isal_zlib.crc32(piece, self._values[-1])
            self._open = (self._open + len(piece)) % self._block_bytes
            view = view[len(piece) :]

    def reset(self) -> None:
        """Begin again."""
        self._values.clear()
        self._open = 0

    def values(self) -> NDArray[np.uint32]:
        """Return one CRC per block, in order."""
        return np.array(self._values, dtype=np.uint32)


class ChunkChecksums:
    """Both kinds of checksums of an uncompressed chunk, computed in one pass."""

    def __init__(self, block_bytes: int) -> None:
        self.crc32c = Crc32c()
        self.blocks = BlockCrc32(block_bytes)

    def update(self, view: memoryview) -> None:
        """Take in the next bytes."""
        self.crc32c.update(view)
        self.blocks.update(view)

    def reset(self) -> None:
        """Begin again."""
        self.crc32c.reset()
        self.blocks.reset()


def crc32(view: memoryview | bytes, before: int = 0) -> int:
    """Return the CRC-32 of bytes that follow others with the CRC-32 `before`."""
    return int(isal_zlib.crc32(view, before))
