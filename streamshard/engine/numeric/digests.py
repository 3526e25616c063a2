"""Digests that can be joined: the digest of a whole follows from those of its pieces.

A CRC is the remainder of a polynomial over GF(2): appending bytes multiplies the polynomial of the
bytes before by a power of x. So the digests of pieces that were read separately can be joined,
and trailing zeros can be removed from a digest without reading the bytes before them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Final

from streamshard.checksums import join_crc32
from streamshard.model import Digest

_ONES: Final = 0xFFFFFFFF
_ONE: Final = 1 << 31
"""The polynomial 1: bits are reflected, so the highest bit stands for the power 0."""


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
        exponent, bits = 3, abs(nbytes)
        while bits:
            if bits & 1:
                power = _power(self.polynomial, exponent, nbytes < 0)
                value = _product(self.polynomial, value, power)
            bits >>= 1
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


_CRC32: Final = Crc(0xEDB88320)
CRC32C: Final = Crc(0x82F63B78)

EMPTY: Final = Digest(0, 0, 0)
"""Digest of no bytes."""


def joined(pieces: Iterable[Digest]) -> Digest:
    digest = EMPTY
    for piece in pieces:
        if not digest.nbytes:  # mostly there is one piece
            digest = piece
            continue
        crc32 = join_crc32(digest.crc32, piece.crc32, piece.nbytes)
        crc32c = CRC32C.joined(digest.crc32c, piece.crc32c, piece.nbytes)
        digest = Digest(digest.nbytes + piece.nbytes, crc32, crc32c)
    return digest


def without_zeros(digest: Digest, nbytes: int) -> Digest:
    return Digest(
        digest.nbytes - nbytes,
        _CRC32.without_zeros(digest.crc32, nbytes),
        CRC32C.without_zeros(digest.crc32c, nbytes),
    )
