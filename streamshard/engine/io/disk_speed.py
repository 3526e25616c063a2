"""How fast a disk reads and writes, found out in about a second by doing a little of both.

And how fast what is read is compressed, where it is to be.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from streamshard.engine.io.direct_io import aligned, open_direct
from streamshard.engine.io.files import write_blocks
from streamshard.engine.io.page_cache import drop_file
from streamshard.model import SourceFile
from streamshard.posix import open_to_read, stream_of

PIECE_BYTES: Final = 1 << 20
MOST_BYTES: Final = 64 << 20
"""Read, and written, at most."""
SECONDS: Final = 0.4
"""After which no more is read, and no more written; what is under way is waited for."""
_MOST_PIECES: Final = 256
"""Small files are opened for few bytes."""
_SYNCED_BYTES: Final = 8 << 20
"""Written between one sync and the next."""

_ENCODED_BYTES: Final = 4 << 20
_LONGEST: Final = 16
"""Bytes of an element at most."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Speed:
    """What was measured."""

    nbytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> int:
        """The rate; 0 if nothing was measured."""
        return int(self.nbytes / self.seconds) if self.seconds > 0 else 0


def measure_reading(
    files: Sequence[SourceFile], *, workers: int, clock: Clock = time.monotonic
) -> Speed:
    """Read pieces from all over some files as a run would, from the page cache or the disk.

    A file of which nothing was in the page cache is forgotten again: what is partly there cannot
    be put back as it was.

    Raises
    ------
    OSError
        A file cannot be read.
    """

    def read(piece: tuple[Path, int, int]) -> int:
        path, offset, nbytes = piece
        if clock() - began > SECONDS:
            return 0
        descriptor = open_to_read(path)
        try:
            return len(os.pread(descriptor, nbytes, offset))
        finally:
            os.close(descriptor)

    pieces = list(islice(_pieces(files), _MOST_PIECES))
    cached = {path for path, offset, _ in pieces if _is_cached(path, offset)}
    began = clock()
    with ThreadPoolExecutor(workers, thread_name_prefix="streamshard") as pool:
        speed = Speed(sum(pool.map(read, pieces)), clock() - began)
    for path in {path for path, *_ in pieces} - cached:
        drop_file(path)
    return speed


def _pieces(files: Sequence[SourceFile]) -> Iterator[tuple[Path, int, int]]:
    """Yield (file, offset, bytes) of pieces at even distances through all files."""
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
    """Tell whether a byte is in the page cache; so it is said where the system does not tell."""
    if not hasattr(os, "RWF_NOWAIT"):
        return True
    descriptor = open_to_read(path)
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    except OSError:  # not every file system knows the flag
        return True
    finally:
        os.close(descriptor)


def measure_encoding(
    files: Sequence[SourceFile],
    encode: Callable[[memoryview], bytes],
    *,
    workers: int,
    clock: Clock = time.monotonic,
) -> Speed:
    """Compress pieces from the middles of the largest files, one for each worker, all at once.

    Raises
    ------
    OSError
        A file cannot be read.
    """
    largest = sorted(files, key=lambda file: -file.nbytes)[:workers]
    pieces = []
    for file in largest:
        with stream_of(file.path) as stream:
            stream.seek(file.nbytes // 2 // PIECE_BYTES * PIECE_BYTES)
            data = stream.read(_ENCODED_BYTES)
            pieces.append(memoryview(data)[: len(data) // _LONGEST * _LONGEST])
    began = clock()
    with ThreadPoolExecutor(workers, thread_name_prefix="streamshard") as pool:
        list(pool.map(encode, pieces))
    return Speed(sum(map(len, pieces)), clock() - began)


def measure_writing(directory: Path, *, most_bytes: int, clock: Clock = time.monotonic) -> Speed:
    """Write as a run would, and sync, a file without a name in a directory; nothing is left of it.

    Raises
    ------
    OSError
        The directory cannot be written.
    """
    # What can be compressed would be, by some file systems.
    piece = aligned(PIECE_BYTES)
    piece[:] = os.urandom(PIECE_BYTES)
    with ExitStack() as stack:
        descriptor = _nameless(directory)
        stack.callback(os.close, descriptor)
        direct = open_direct(Path(f"/proc/self/fd/{descriptor}"), descriptor)
        if direct >= 0:
            stack.callback(os.close, direct)
        began, written = clock(), 0
        while written < min(most_bytes, MOST_BYTES) and clock() - began <= SECONDS:
            for _ in range(_SYNCED_BYTES // PIECE_BYTES):
                write_blocks(descriptor, direct, piece, written)
                written += PIECE_BYTES
            os.fsync(descriptor)
        return Speed(written, clock() - began)


def _nameless(directory: Path) -> int:
    """Open a file that nobody sees, and that is gone once it is closed, whatever happens."""
    if hasattr(os, "O_TMPFILE"):
        with suppress(OSError):  # not every file system has it; why else, the next call will say
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    descriptor, name = tempfile.mkstemp(prefix=".streamshard.", dir=directory)
    Path(name).unlink()
    return descriptor
