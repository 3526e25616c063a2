"""Writes past the page cache: the disk reads whole blocks directly from the program's memory.

A write through the cache costs the system a page of memory and a copy for every page, on the cores
that prepare the next data. A virtual machine may also have to request that page from its host.
Other programs lose the cached data that they need.
"""

import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from streamshard.io.file_system import EXT4, XFS, file_system_of

BLOCK_BYTES: Final = max(4096, mmap.PAGESIZE)
"""Offsets in the file and addresses in memory must be multiples of this: of the disk's block and
of a page, so that no page is partly in the cache."""
LEAST_BYTES: Final = 1 << 17
"""For smaller writes, waiting for the disk costs more than the cache."""
_FILE_SYSTEMS: Final = {EXT4, XFS}
"""Local file systems that pass all direct writes on to the disk. Over a network every write would
wait for its answer."""


def open_direct(path: Path, descriptor: int) -> int:
    """Open a file that is already open a second time, to write it past the page cache.

    Returns -1 if the system cannot do that, or is not known to benefit from it.
    """
    if file_system_of(descriptor) in _FILE_SYSTEMS and hasattr(os, "O_DIRECT"):
        with suppress(OSError):  # the mount options or the device may not allow it
            return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
    return -1


def aligned(nbytes: int) -> memoryview:
    """Return memory that begins at a block boundary."""
    return memoryview(mmap.mmap(-1, nbytes))
