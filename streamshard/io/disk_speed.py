"""Measures in about a second how fast a disk reads and writes, by short samples of both.

Also measures how fast the source's data is compressed, if the run compresses.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from streamshard.io.entries import open_readable
from streamshard.io.page_cache import drop_file
from streamshard.io.retry import UNSUPPORTED, ignored
from streamshard.io.sink import write_blocks
from streamshard.io.writable import aligned, open_direct
from streamshard.model import SourceFile

PIECE_BYTES: Final = 1 << 20
MOST_BYTES: Final = 64 << 20
"""Maximum bytes to read, and maximum bytes to write."""
SECONDS: Final = 0.4
"""Time after which no read and no write begins; those under way are completed."""
_MOST_PIECES: Final = 256
"""Maximum pieces to read; with small files, each piece opens a file for few bytes."""
_SYNCED_BYTES: Final = 8 << 20
"""Bytes written between two syncs."""

_ENCODED_BYTES: Final = 4 << 20
_LONGEST: Final = 16
"""Bytes of the largest element of any dtype."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Speed:
    """The result of a measurement."""

    nbytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> int:
        """The rate; 0 if nothing was measured."""
        return int(self.nbytes / self.seconds) if self.seconds > 0 else 0


def measure_reading(
    files: Sequence[SourceFile], *, workers: int, clock: Clock = time.monotonic
) -> Speed:
    """Read evenly distributed pieces of files as a run would, from the page cache or the disk.

    A file of which no piece was in the page cache is dropped from the cache again. A file that was
    partly in the cache stays, as its earlier state cannot be restored.
    """

    def read(piece: tuple[Path, int, int]) -> int:
        path, offset, nbytes = piece
        if clock() - began > SECONDS:
            return 0
        with open_readable(path) as file:
            return len(file.read_at(offset, nbytes))

    pieces = list(islice(_pieces(files), _MOST_PIECES))
    cached = {path for path, offset, _ in pieces if _is_cached(path, offset)}
    began = clock()
    with ThreadPoolExecutor(workers, thread_name_prefix="streamshard") as pool:
        speed = Speed(sum(pool.map(read, pieces)), clock() - began)
    for path in {path for path, *_ in pieces} - cached:
        drop_file(path)
    return speed


def _pieces(files: Sequence[SourceFile]) -> Iterator[tuple[Path, int, int]]:
    """Yield (file, offset, bytes) of pieces at even distances across all files."""
    total_bytes = sum(file.nbytes for file in files)
    gap = max(0, -(-total_bytes * PIECE_BYTES // MOST_BYTES) - PIECE_BYTES)
    wanted, before = 0, 0
    for file in files:
        while wanted < before + file.nbytes:
            offset = wanted - before
            nbytes = min(PIECE_BYTES, file.nbytes - offset)
            yield file.path, offset, nbytes
            wanted += nbytes + gap
        before += file.nbytes


def _is_cached(path: Path, offset: int) -> bool:
    """Tell whether a byte is in the page cache; True if the system cannot tell."""
    if not hasattr(os, "RWF_NOWAIT"):
        return True
    with open_readable(path) as file:
        try:
            return os.preadv(file.descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False
        except OSError:  # not every file system knows the flag
            return True


def measure_encoding(
    files: Sequence[SourceFile],
    encode: Callable[[memoryview], bytes],
    *,
    workers: int,
    clock: Clock = time.monotonic,
) -> Speed:
    """Compress pieces from the middle of the largest files, one piece per worker, in parallel."""
    largest = sorted(files, key=lambda file: -file.nbytes)[:workers]
    pieces = []
    for file in largest:
        with open_readable(file.path) as opened:
            data = opened.read_at(file.nbytes // 2 // PIECE_BYTES * PIECE_BYTES, _ENCODED_BYTES)
            pieces.append(memoryview(data)[: len(data) // _LONGEST * _LONGEST])
    began = clock()
    with ThreadPoolExecutor(workers, thread_name_prefix="streamshard") as pool:
        list(pool.map(encode, pieces))
    return Speed(sum(map(len, pieces)), clock() - began)


def measure_writing(directory: Path, *, most_bytes: int, clock: Clock = time.monotonic) -> Speed:
    """Write and sync a nameless file in a directory as a run would; no trace of it remains."""
    # Random bytes, as some file systems compress data.
    piece = aligned(PIECE_BYTES)
    piece[:] = os.urandom(PIECE_BYTES)
    with ExitStack() as stack:
        descriptor = _nameless(directory)
        stack.callback(os.close, descriptor)
        direct = open_direct(Path(f"/proc/self/fd/{descriptor}"), descriptor)
        if direct >= 0:
            stack.callback(os.close, direct)
        began, written, most = clock(), 0, min(most_bytes, MOST_BYTES)
        while written < most and clock() - began <= SECONDS:
            for _ in range(-(-min(_SYNCED_BYTES, most - written) // PIECE_BYTES)):
                write_blocks(descriptor, direct, piece, written)
                written += PIECE_BYTES
            os.fsync(descriptor)
        return Speed(written, clock() - began)


def _nameless(directory: Path) -> int:
    """Open a file without a name, which the system removes when it is closed, even by a crash."""
    if hasattr(os, "O_TMPFILE"):
        with ignored(UNSUPPORTED):  # not every file system has it; mkstemp reports any other error
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    descriptor, name = tempfile.mkstemp(prefix=".streamshard.", dir=directory)
    Path(name).unlink()
    return descriptor
