"""Maps ranges of files into memory, where nothing of them is read before it is touched.

Python's own `mmap` keeps a descriptor for every map (until 3.13, and there by default). A model has
thousands of tensors, and a process may mostly have 1024 files open; of maps it may have 65,530.
"""

import ctypes
import errno
import mmap
import os
import weakref
from typing import Final

from streamshard.io.file_system import last_error, libc

_FAILED: Final = ctypes.c_void_p(-1).value
_map = libc(
    "mmap",
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    result=ctypes.c_void_p,
)  # fmt: skip
_unmap = libc("munmap", ctypes.c_void_p, ctypes.c_size_t)
_move = libc(
    "mremap",
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
    result=ctypes.c_void_p,
)  # fmt: skip
_TO_ADDRESS: Final = 0x1 | 0x2
"""MREMAP_MAYMOVE and MREMAP_FIXED: memory takes the place of what is at another address."""
_WINDOW_BYTES: Final = 8 << 20
"""Memory that is copied at once; a multiple of any page's size."""


def map_range(descriptor: int, offset: int, nbytes: int, *, is_private: bool) -> memoryview:
    """Map a range of a file that has at least one byte.

    The map stays for as long as the view, and whatever shares its memory; the descriptor may be
    closed. Who touches what is behind the end of a file that was cut off gets SIGBUS.

    `is_private`: whether the view can be written to: what is written stays in this process's memory
    and never gets into the file. Else the view is read-only, for NumPy too.
    """
    if descriptor < 0:
        raise OSError(errno.ENOTSUP, "it is an object, not a local file")
    if _map is None or _unmap is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    before = offset % mmap.ALLOCATIONGRANULARITY
    length = before + nbytes
    access = mmap.PROT_READ | (mmap.PROT_WRITE if is_private else 0)
    sharing = mmap.MAP_PRIVATE if is_private else mmap.MAP_SHARED
    address = _map(None, length, access, sharing, descriptor, offset - before)
    if address == _FAILED:
        raise last_error("")
    mapped = (ctypes.c_ubyte * length).from_address(address)
    # At the end of the program arrays may still be there, which others look at even then.
    weakref.finalize(mapped, _unmap, address, length).atexit = False
    view = memoryview(mapped).cast("B")[before:]
    return view if is_private else view.toreadonly()


def detach_map(mapped: "ctypes.Array[ctypes.c_ubyte]") -> None:
    """Put memory with the same content in the place of a private map, at the same address.

    Whatever looks at the map then no longer looks at the file.

    `mapped`: the object behind the view that `map_range` returned (`memoryview.obj`).
    """
    if _map is None or _move is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    address, length = ctypes.addressof(mapped), ctypes.sizeof(mapped)
    access = mmap.PROT_READ | mmap.PROT_WRITE
    made = _map(None, length, access, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if made == _FAILED:
        raise last_error("")
    for at in range(0, length, _WINDOW_BYTES):
        count = min(_WINDOW_BYTES, length - at)
        ctypes.memmove(made + at, address + at, count)
        if _move(made + at, count, count, _TO_ADDRESS, address + at) == _FAILED:
            raise last_error("")
