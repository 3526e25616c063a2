"""Reads a file of a store, and compares it with its record in the manifest."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from streamshard.checks.scan import Result, ScanPiece
from streamshard.checksums import join_crc32
from streamshard.engine.numeric import digests
from streamshard.engine.scan.probe import Probe
from streamshard.errors import IntegrityError
from streamshard.formats.zarr.chunks import CHECKSUM_BYTES, serialize_checksum
from streamshard.formats.zarr.store_manifest import BLOCK_BYTES, FileRecord
from streamshard.model import Digest

_PIECE_BYTES: Final = 16 << 20
"""Bytes that a worker reads at once, whatever the size of the file, so that a run can be
interrupted."""


@dataclass(frozen=True, slots=True)
class ChunkCheck:
    """A chunk that exists and has the recorded length."""

    path: Path
    file: int
    """Number among the files that are read."""
    record: FileRecord
    nbytes: int
    """Size of the content, including the part past the tensor's end."""
    own_bytes: int
    """Size of the content that belongs to the tensor."""
    is_encoded: bool

    def piece(self) -> ScanPiece:
        return ScanPiece(self.record.nbytes, self._read)

    def _read(self, probe: Probe) -> Result:
        if self.is_encoded:
            try:
                return probe.digests(self.file, [0, self.own_bytes]), b""
            except (RuntimeError, ValueError) as error:
                raise IntegrityError(f"cannot be decompressed ({error})", path=self.path) from error
        return probe.digests_and_end(self.file, self._cuts(), self.nbytes + CHECKSUM_BYTES)

    def _cuts(self) -> list[int]:
        """Cut an uncompressed chunk's content where blocks end, and where the tensor ends."""
        blocks = range(0, self.nbytes, BLOCK_BYTES)
        return sorted({*blocks, self.own_bytes, self.nbytes})

    def problems(self, result: Result) -> list[str]:
        pieces, trailer = result
        if self.is_encoded:
            return []  # the decoder has compared it
        found = self._block_crcs(pieces)
        if len(found) != len(self.record.crc32s):
            message = f"{self.path}: the manifest lists {len(self.record.crc32s)} checksums for"
            return [f"{message} {len(found)} blocks"]
        damaged = np.flatnonzero(np.array(found, dtype=np.uint32) != self.record.crc32s)
        wrong = [self._damage(run) for run in _runs(damaged.tolist())]
        if not wrong and trailer != serialize_checksum(digests.joined(pieces).crc32c):
            wrong.append(f"{self.path}: its content does not match the checksum at its end")
        return wrong

    def _block_crcs(self, pieces: Sequence[Digest]) -> list[int]:
        found: list[int] = []
        at = 0
        for piece in pieces:
            if at % BLOCK_BYTES == 0:
                found.append(0)
            found[-1] = join_crc32(found[-1], piece.crc32, piece.nbytes)
            at += piece.nbytes
        return found

    def _damage(self, blocks: range) -> str:
        start, stop = blocks.start * BLOCK_BYTES, blocks.stop * BLOCK_BYTES
        stop = min(stop, self.nbytes)
        return f"{self.path}: bytes {start} to {stop} are damaged: not those that were written"

    def content(self, result: Result) -> Digest:
        """Return the digest of the tensor's part of a chunk that has no problems."""
        pieces: list[Digest] = result[0]
        if self.is_encoded:
            return pieces[0]
        own: list[Digest] = []
        left = self.own_bytes
        for piece in pieces:
            if left > 0:
                own.append(piece)
            left -= piece.nbytes
        return digests.joined(own)


def _runs(numbers: Sequence[int]) -> list[range]:
    """Join consecutive numbers into ranges."""
    found: list[range] = []
    for number in numbers:
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def digest_pieces(file: int, nbytes: int) -> list[ScanPiece]:
    """Return small pieces that compute the digest of a file's first bytes, without decoding."""
    cuts = [*range(0, nbytes, _PIECE_BYTES), nbytes] if nbytes else [0, 0]
    return [digest_piece(file, start, stop) for start, stop in pairwise(cuts)]


def digest_piece(file: int, start: int, stop: int) -> ScanPiece:
    return ScanPiece(stop - start, partial(Probe.digest, file=file, start=start, stop=stop))


def bytes_piece(file: int, start: int, stop: int) -> ScanPiece:
    return ScanPiece(stop - start, partial(Probe.read, file=file, start=start, stop=stop))


def whole_file(path: Path, record: FileRecord, found: int) -> list[str]:
    if len(record.crc32s) == 1 and found == record.crc32s[0]:
        return []
    return [f"{path}: damaged: its bytes are not those in the manifest"]


def own_checksum_pieces(file: int, nbytes: int) -> list[ScanPiece]:
    """Return the pieces to read a chunk of which only the checksum at its end is known."""
    content_bytes = max(0, nbytes - CHECKSUM_BYTES)
    return [*digest_pieces(file, content_bytes), bytes_piece(file, content_bytes, nbytes)]


def own_checksum(path: Path, trailer: bytes, found: Digest) -> list[str]:
    """Compare a chunk's content with the checksum at its end."""
    if trailer == serialize_checksum(found.crc32c):
        return []
    return [f"{path}: damaged: its bytes do not match the checksum at its end"]
