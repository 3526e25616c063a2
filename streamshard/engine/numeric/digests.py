"""Digests that can be joined: the digest of a whole follows from those of its pieces.

A CRC is the remainder of a polynomial over GF(2): appending bytes multiplies the polynomial of the
bytes before by a power of x. So the digests of pieces that were read separately can be joined,
and trailing zeros can be removed from a digest without reading the bytes before them.
"""

from collections.abc import Iterable
from typing import Final

from streamshard.checksums import join_crc32
from streamshard.engine.numeric.crc import CRC32, CRC32C
from streamshard.model import Digest

EMPTY: Final = Digest(0, 0, 0)
"""Digest of no bytes."""


def joined(pieces: Iterable[Digest]) -> Digest:
    found = EMPTY
    for piece in pieces:
        if not found.nbytes:  # mostly there is one piece
            found = piece
            continue
        crc32 = join_crc32(found.crc32, piece.crc32, piece.nbytes)
        crc32c = CRC32C.joined(found.crc32c, piece.crc32c, piece.nbytes)
        found = Digest(found.nbytes + piece.nbytes, crc32, crc32c)
    return found


def without_zeros(digest: Digest, nbytes: int) -> Digest:
    """Return the digest without the last `nbytes` bytes, which are zeros."""
    return Digest(
        digest.nbytes - nbytes,
        CRC32.without_zeros(digest.crc32, nbytes),
        CRC32C.without_zeros(digest.crc32c, nbytes),
    )
