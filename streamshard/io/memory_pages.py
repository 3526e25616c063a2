"""Pages of this process's memory: out of a file's reach, and at hand before they are touched."""

import ctypes
import errno
import mmap
import os
from typing import Final

from streamshard.io.file_system import last_error, libc
from streamshard.io.memory_map import FAILED, map_pages

_move = libc(
    "mremap",
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
    result=ctypes.c_void_p,
)  # fmt: skip
_TO_ADDRESS: Final = 0x1 | 0x2
"""MREMAP_MAYMOVE and MREMAP_FIXED: memory takes the place of what is at another address."""
_advise = libc("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_POPULATE: Final = 23
"""MADV_POPULATE_WRITE, which Python does not name."""
_WINDOW_BYTES: Final = 8 << 20
"""Memory that is copied at once; a multiple of any page's size."""


def detach_map(mapped: "ctypes.Array[ctypes.c_ubyte]") -> None:
    """Put memory with the same content in the place of a private map, at the same address.

    Whatever looks at the map then no longer looks at the file.

    `mapped`: the object behind the view that `map_range` returned (`memoryview.obj`).
    """
    if map_pages is None or _move is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    address, length = ctypes.addressof(mapped), ctypes.sizeof(mapped)
    access = mmap.PROT_READ | mmap.PROT_WRITE
    made = map_pages(None, length, access, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if made == FAILED:
        raise last_error("")
    for at in range(0, length, _WINDOW_BYTES):
        count = min(_WINDOW_BYTES, length - at)
        ctypes.memmove(made + at, address + at, count)
        if _move(made + at, count, count, _TO_ADDRESS, address + at) == FAILED:
            raise last_error("")


def populate(view: memoryview) -> None:
    """Take the pages of a view from the system at once, which is quicker than one at each touch.

    Before Linux 5.14 they are taken when they are touched.
    """
    start = ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
    first, last = -(-start // mmap.PAGESIZE), (start + len(view)) // mmap.PAGESIZE
    if _advise is not None and last > first:
        _advise(first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE, _POPULATE)
