"""Writing past the page cache: the disk takes whole blocks from where they are in memory.

To go through the cache costs the system a page of memory for every page that is written, and a
copy, on the cores that prepare what comes next; a virtual machine may have to ask its host for that
page too. Whoever else has the cache filled with what it needs loses that.
"""

import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from streamshard.engine.io.file_system import EXT4, XFS, file_system_of

BLOCK_BYTES: Final = max(4096, mmap.PAGESIZE)
"""Places in the file and in memory have to be multiples of this: of what a disk takes, and of a
page, so that none is partly in the cache."""
LEAST_BYTES: Final = 1 << 17
"""For less, waiting for the disk costs more than the cache."""
_FILE_SYSTEMS: Final = {EXT4, XFS}
"""Those on disks of this machine that pass on all of it. Over a network every write would wait for
its answer."""


def open_direct(path: Path, descriptor: int) -> int:
    """Open a file, which is open already, once more to write it past the page cache.

    Returns -1 where the system cannot, or is not known to gain by it.
    """
    if file_system_of(descriptor) in _FILE_SYSTEMS and hasattr(os, "O_DIRECT"):
        with suppress(OSError):  # how it is mounted, or on what, may not allow it
            return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
    return -1


def aligned(nbytes: int) -> memoryview:
    """Return memory that begins with a block."""
    return memoryview(mmap.mmap(-1, nbytes))
