"""CRC-32 as zip files use it, and CRC-32C (Castagnoli) as Zarr's checksum codec uses it."""

import ctypes
from collections.abc import Callable
from typing import Any, Final

import google_crc32c
import numpy as np
from isal import isal_zlib

from streamshard.model import Digest

_LARGE_BYTES: Final = 1 << 16
"""From here on, other threads should run while a checksum is computed."""
_MOST_BYTES: Final = 1 << 30
"""Length of memory that the function below takes at once; its length is a C int."""
_ONES: Final = 0xFFFFFFFF
_OF_KNOWN: Final = 0xE3069283
"""CRC-32C of the digits from 1 to 9."""


def _fast_crc32c() -> Callable[[Any, int, int], int] | None:
    """Return ISA-L's function, to be called without the GIL; None if it is not there.

    It takes 0.4 of the time of the other library, whose wrapper keeps the GIL, so that only one
    thread computes at a time.
    """
    try:
        function = ctypes.CDLL(isal_zlib.__file__).crc32_iscsi
    except (AttributeError, OSError):
        return None
    function.restype = ctypes.c_uint32
    function.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32]
    extend: Callable[[Any, int, int], int] = function
    known = b"123456789"
    return extend if extend(known, len(known), _ONES) ^ _ONES == _OF_KNOWN else None


_extend: Final = _fast_crc32c()


def crc32(view: memoryview | bytes, before: int = 0) -> int:
    """Return the CRC-32 of bytes that follow others with the CRC-32 `before`."""
    return int(isal_zlib.crc32(view, before))


def crc32c(view: memoryview | bytes, before: int = 0) -> int:
    """Return the CRC-32C of bytes that follow others with the CRC-32C `before`."""
    # The library needs a bytes-like object of its kind; an array over the view avoids a copy.
    content = np.frombuffer(view, dtype=np.uint8)
    if _extend is None or len(content) < _LARGE_BYTES:
        return int(google_crc32c.extend(before, content))
    for start in range(0, len(content), _MOST_BYTES):
        piece = content[start : start + _MOST_BYTES]
        before = _extend(piece.ctypes.data, len(piece), before ^ _ONES) ^ _ONES
    return before


def join_crc32(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of two consecutive runs of bytes from their CRC-32s."""
    return int(isal_zlib.crc32_combine(first, second, second_bytes))


def difference(name: str, nbytes: int, found: int, recorded: int) -> str:
    """Say that a record's bytes are not those that were saved, and what to do."""
    message = f"the {nbytes:,} bytes of record {name:.100} have the CRC-32 {found:08x},"
    message = f"{message} {recorded:08x} was recorded when they were saved. Take another copy of"
    return f"{message} the file, or an older tag"


class RunningChecksums:
    """Checksums of a stream of bytes. The CRC-32 of a byte is computed once.

    `block_bytes`: length of blocks, each of which gets a CRC-32; 0 for none.
    """

    def __init__(self, *, takes_crc32c: bool = False, block_bytes: int = 0) -> None:
        self.nbytes = 0
        self.crc32 = 0
        self.crc32c = 0
        """Stays 0 if it is not asked for."""
        self.blocks: list[int] = []
        """CRC-32 of each block so far; the last may be incomplete."""
        self._takes_crc32c = takes_crc32c
        self._block_bytes = block_bytes

    @property
    def digest(self) -> Digest:
        """Digest of the bytes so far."""
        return Digest(self.nbytes, self.crc32, self.crc32c)

    def update(self, view: memoryview, checksum: int | None = None) -> None:
        """Take in the next bytes; `checksum`: their CRC-32, if it was computed."""
        if self._takes_crc32c:
            self.crc32c = crc32c(view, self.crc32c)
        if not self._block_bytes:
            if checksum is None:
                self.crc32 = crc32(view, self.crc32)
            else:
                self.crc32 = join_crc32(self.crc32, checksum, len(view))
            self.nbytes += len(view)
            return
        while len(view):
            begun = self.nbytes % self._block_bytes
            piece = view[: self._block_bytes - begun]
            found = crc32(piece)
            before = self.blocks.pop() if begun else 0
            self.blocks.append(join_crc32(before, found, len(piece)))
            self.crc32 = join_crc32(self.crc32, found, len(piece))
            self.nbytes += len(piece)
            view = view[len(piece) :]
