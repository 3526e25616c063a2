"""Tells the system what of files to read soon, and what to forget: hints, where it takes them."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from streamshard.posix import entries_below, open_to_read

LEAST_BYTES: Final = 1 << 16
"""For less, forgetting costs more than it brings."""

_BLOCK_BYTES: Final = 32 << 20
"""More than the system keeps as one: what only a part of is forgotten stays."""


def read_ahead(descriptor: int, offset: int, nbytes: int) -> None:
    """Begin to read a range, and do not wait for it."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)


def drop_behind(descriptor: int, begin: int, end: int) -> None:
    """Forget what lies before an offset, as far as it may not have been forgotten already.

    What is not yet on the disk stays.

    Parameters
    ----------
    begin
        Where the caller began; what is before that others may be about to read.
    """
    start = max(0, end - 1) // _BLOCK_BYTES * _BLOCK_BYTES
    _drop(descriptor, max(begin, start - _BLOCK_BYTES), end)


def drop_file(path: Path) -> None:
    """Forget a file, so that what is then read of it comes from the disk."""
    descriptor = open_to_read(path)
    try:
        _drop(descriptor, 0, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def drop_cached(root: Path) -> None:
    """Forget all files below a directory."""
    for path in entries_below(root):
        if not path.is_dir():
            drop_file(path)


def _drop(descriptor: int, start: int, end: int) -> None:
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # some file systems have nothing to forget
            os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)
