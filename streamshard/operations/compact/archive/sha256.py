"""SHA-256 of whole files, which general tools compute too."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Final

from streamshard.io.entries import ahead_of, open_readable
from streamshard.io.objects.object_path import is_object
from streamshard.io.page_cache import drop_file
from streamshard.model import SourceFile

_READ_BYTES: Final = 1 << 20


def sha256_of(
    files: Sequence[SourceFile], progress: Callable[[int], None], *, workers: int
) -> list[str]:
    """Compute the SHA-256 of each file from the disk, not from the page cache.

    Of an object it is that of the version which is given.
    """

    def take(known: SourceFile) -> str:
        drop_file(known.path)
        digest, view, offset = sha256(), memoryview(bytearray(_READ_BYTES)), 0
        ahead = ahead_of([known.path]).ahead if is_object(known.path) else 0
        with open_readable(known.path, known) as file:
            while count := file.read_into(view, offset):
                offset += count
                if ahead:
                    file.will_need(offset, ahead)
                digest.update(view[:count])
                progress(count)
        return digest.hexdigest()

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(take, files))
