"""Tells the system which file ranges to read ahead and which to drop; hints, where supported.

A descriptor of -1 stands for a file that is not local, and has no pages in the cache.
"""

import os
from pathlib import Path
from typing import Final

from streamshard.io.entries import is_directory, open_readable, paths_below
from streamshard.io.object_path import is_object
from streamshard.io.retry import UNSUPPORTED, ignored

LEAST_BYTES: Final = 1 << 16
"""For smaller ranges, dropping costs more than it saves."""

_BLOCK_BYTES: Final = 32 << 20
"""Larger than any unit of the page cache; the system keeps a unit that is only partly dropped."""


def drop_behind(descriptor: int, begin: int, end: int) -> None:
    """Drop the data before offset `end` that may still be in the page cache.

    Data that is not yet on disk stays.

    `begin`: offset where the caller began; others may be about to read the data before it.
    """
    start = max(0, end - 1) // _BLOCK_BYTES * _BLOCK_BYTES
    _drop(descriptor, max(begin, start - _BLOCK_BYTES), end)


def drop_file(path: Path) -> None:
    if is_object(path):
        return
    with open_readable(path) as file:
        _drop(file.descriptor, file.origin, file.origin + file.nbytes)


def drop_cached(root: Path) -> None:
    if is_object(root):
        return
    for path in paths_below(root) if is_directory(root) else [root]:
        if not is_directory(path):
            drop_file(path)


def _drop(descriptor: int, start: int, end: int) -> None:
    if descriptor >= 0 and hasattr(os, "posix_fadvise"):
        with ignored(UNSUPPORTED):  # not every file system supports it
            os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)
