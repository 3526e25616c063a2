"""Digests that can be joined: the digest of a whole follows from those of its pieces.

A CRC is the remainder of a polynomial over GF(2): appending bytes multiplies the polynomial of the
bytes before by a power of x. So the digests of pieces that were read separately can be joined,
and trailing zeros can be removed from a digest without reading the bytes before them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Final

from streamshard.engine.numeric.checksums import ChunkChecksums, Crc32, Crc32c
from streamshard.model import Digest

_ONES: Final = 0xFFFFFFFF
_ONE: Final = 1 << 31
"""The polynomial 1: bits are reflected, so the highest bit stands for the power 0."""

EMPTY: Final = Digest(0, 0, 0)
"""Digest of no bytes."""


@dataclass(frozen=True, slots=True)
class Crc:
    """The arithmetic of a 32-bit CRC: reflected, initialized with ones, inverted at the end."""

    polynomial: int
    """The polynomial without its highest power, reflected."""

    def joined(self, first: int, second: int, second_bytes: int) -> int:
        """Return the CRC of two consecutive runs of bytes from their CRCs."""
        return self._moved(first, second_bytes) ^ second

    def without_zeros(self, crc: int, nbytes: int) -> int:
        """Return the CRC without the last `nbytes` bytes, which are zeros."""
        return self._moved(crc ^ _ONES, -nbytes) ^ _ONES

    def _moved(self, value: int, nbytes: int) -> int:
        """Multiply by x to the power 8 * nbytes; a negative power multiplies by the inverse."""
        exponent, left = 3, abs(nbytes)
        while left:
            if left & 1:
                power = _power(self.polynomial, exponent, nbytes < 0)
                value = _product(self.polynomial, value, power)
            left >>= 1
            exponent += 1
        return value


@cache
def _power(polynomial: int, exponent: int, inverse: bool) -> int:
    """Return x, or its inverse, squared `exponent` times."""
    if exponent == 0:
        # The polynomial has the constant term 1, so the rest of it, divided by x, is the inverse.
        return (polynomial << 1) & _ONES | 1 if inverse else _ONE >> 1
    root = _power(polynomial, exponent - 1, inverse)
    return _product(polynomial, root, root)


def _product(polynomial: int, a: int, b: int) -> int:
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & _ONES
        b = b >> 1 ^ polynomial if b & 1 else b >> 1
    return product


CRC32: Final = Crc(0xEDB88320)
CRC32C: Final = Crc(0x82F63B78)


def joined(pieces: Iterable[Digest]) -> Digest:
    """Return the digest of consecutive pieces."""
    nbytes = crc32 = crc32c = 0
    for piece in pieces:
        crc32 = CRC32.joined(crc32, piece.crc32, piece.nbytes)
        crc32c = CRC32C.joined(crc32c, piece.crc32c, piece.nbytes)
        nbytes += piece.nbytes
    return Digest(nbytes, crc32, crc32c)


def without_zeros(digest: Digest, nbytes: int) -> Digest:
    """Return the digest without the last `nbytes` bytes, which are zeros."""
    return Digest(
        digest.nbytes - nbytes,
        CRC32.without_zeros(digest.crc32, nbytes),
        CRC32C.without_zeros(digest.crc32c, nbytes),
    )


class JoinedCrc32:
    """CRC-32 of pieces that several workers process in any order."""

    def __init__(self) -> None:
        self._pieces: list[tuple[Crc32, int]] = []

    def piece(self, nbytes: int) -> Crc32:
        """Add the next piece; the caller updates the returned checksum with the piece's bytes."""
        piece = Crc32()
        self._pieces.append((piece, nbytes))
        return piece

    @property
    def value(self) -> int:
        """CRC-32 of all pieces in order."""
        joined = 0
        for piece, nbytes in self._pieces:
            joined = CRC32.joined(joined, piece.value, nbytes)
        return joined


class RunningDigest:
    """The digest of a stream of bytes."""

    def __init__(self) -> None:
        self._nbytes = 0
        self._crc32 = Crc32()
        self._crc32c = Crc32c()

    def update(self, view: memoryview) -> None:
        """Take in the next bytes."""
        self._crc32.update(view)
        self._crc32c.update(view)
        self._nbytes += len(view)

    def reset(self) -> None:
        """Begin again."""
        self._nbytes = 0
        self._crc32.reset()
        self._crc32c.reset()

    @property
    def value(self) -> Digest:
        """Digest of the bytes so far."""
        return Digest(self._nbytes, self._crc32.value, self._crc32c.value)


def of_chunk(sums: ChunkChecksums, nbytes: int, block_bytes: int) -> Digest:
    """Return the digest of a chunk from its checksums."""
    crc32 = 0
    for block, value in enumerate(sums.blocks.values().tolist()):
        held = min(block_bytes, nbytes - block * block_bytes)
        crc32 = CRC32.joined(crc32, value, held)
    return Digest(nbytes, crc32, sums.crc32c.value)
