"""SHA-256 of whole files, which general tools compute too."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Final

from streamshard.io.entries import stream_of
from streamshard.io.page_cache import drop_file

_READ_BYTES: Final = 1 << 20


def sha256_of(paths: Sequence[Path], progress: Callable[[int], None], *, workers: int) -> list[str]:
    """Compute the SHA-256 of each file from the disk, not from the page cache.

    Raises
    ------
    OSError
        A file cannot be read.
    """

    def take(path: Path) -> str:
        drop_file(path)
        digest, view = sha256(), memoryview(bytearray(_READ_BYTES))
        with stream_of(path) as stream:
            while count := stream.readinto(view):  # type: ignore[attr-defined]
                digest.update(view[:count])
                progress(count)
        return digest.hexdigest()

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(take, paths))
