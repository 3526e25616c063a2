"""Puts memory in the place of a private map of a file, which may be removed then."""

import ctypes
import errno
import mmap
import os
from typing import Final

from streamshard.io.file_system import last_error, libc
from streamshard.io.memory_map import FAILED, system_map

_move = libc(
    "mremap",
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
    result=ctypes.c_void_p,
)  # fmt: skip
_TO_ADDRESS: Final = 0x1 | 0x2
"""MREMAP_MAYMOVE and MREMAP_FIXED: memory takes the place of what is at another address."""
_WINDOW_BYTES: Final = 8 << 20
"""Memory that is copied at once; a multiple of any page's size."""


def detach_map(mapped: "ctypes.Array[ctypes.c_ubyte]") -> None:
    """Put memory with the same content in the place of a private map, at the same address.

    Whatever looks at the map then no longer looks at the file.

    `mapped`: the object behind the view that `map_range` returned (`memoryview.obj`).
    """
    if system_map is None or _move is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    address, length = ctypes.addressof(mapped), ctypes.sizeof(mapped)
    access = mmap.PROT_READ | mmap.PROT_WRITE
    memory = system_map(None, length, access, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if memory == FAILED:
        raise last_error("")
    for at in range(0, length, _WINDOW_BYTES):
        count = min(_WINDOW_BYTES, length - at)
        ctypes.memmove(memory + at, address + at, count)
        if _move(memory + at, count, count, _TO_ADDRESS, address + at) == FAILED:
            raise last_error("")
