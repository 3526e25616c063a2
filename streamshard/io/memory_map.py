"""Maps files into memory: ranges to keep, read when touched, and windows to look at, not to read.

Python's own `mmap` keeps a descriptor for every map (until 3.13, and there by default). A model has
thousands of tensors, and a process may mostly have 1024 files open; of maps it may have 65,530.
"""

import ctypes
import errno
import mmap
import os
import sys
import time
import weakref
from typing import Final

from streamshard.io.file_system import (
    BTRFS,
    EXT4,
    OVERLAYFS,
    TMPFS,
    XFS,
    file_system_of,
    last_error,
    libc,
)
from streamshard.io.retry import FROM_OUTSIDE, UNSUPPORTED, ignored

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


_resident = libc("mincore", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_advise = libc("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
"""Python's own keeps other threads of Python waiting while it waits for the disk."""
MOST_BYTES: Final = 1 << 20
"""Largest window of a file that is mapped to be read."""
LEAST_BYTES: Final = 1 << 16
"""Shorter ranges are read, as mapping them takes longer than copying them."""
_SETTLED_SECONDS: Final = 60
"""A file that changed later may be one that a job is still saving, or about to cut off."""
_FILE_SYSTEMS: Final = frozenset({EXT4, XFS, BTRFS, TMPFS, OVERLAYFS})
"""Elsewhere a server may cut a file off, or a program that stands for a disk may hang."""
_POPULATE_READ: Final = 22
"""By madvise(2), since Linux 5.14: fails with EFAULT behind the end of a file, where touching the
page would end the process. Python has no name for it."""
_AHEAD_BYTES: Final = 4 << 20
"""How far behind a window the system reads, if windows follow each other and it has not yet."""
_BLOCK_BYTES: Final = 2 << 20
"""The system may put what lies around a page in place with it, between multiples of this."""
ways_taken: Final = set[str]()
"""How this process has read files, for whoever asks."""


class FileMap:
    """A map of a whole file, of which one window at a time is in memory."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._whole = map_range(descriptor, 0, nbytes, is_private=False)
        self._address = ctypes.addressof(self._whole.obj)  # type: ignore[arg-type]
        self._end = self._address + nbytes
        _call_madvise(self._address, self._end, mmap.MADV_SEQUENTIAL)
        self._blocks = (0, 0)
        """Addresses between which pages may be in memory."""
        self._stop = 0
        """Address of the last window's end."""

    def window(self, offset: int, nbytes: int) -> memoryview:
        """Put the pages of a range in place, and return it; it is valid until the next window.

        Whoever touches it after the file was cut off gets SIGBUS, or zeros in the file's last page.
        """
        view = self._whole[offset : offset + nbytes]
        start, stop = self._address + offset, self._address + offset + len(view)
        begin = max(self._address, start // _BLOCK_BYTES * _BLOCK_BYTES)
        if begin != self._blocks[0]:
            self.release()
        self._read_ahead(start, stop + (_AHEAD_BYTES if start == self._stop else 0))
        self._stop = stop
        try:
            _call_madvise(start - start % mmap.PAGESIZE, stop, _POPULATE_READ)
        except OSError:
            ways_taken.add("read: the system could not show all of a map")
            raise
        end = min(self._end, -(-stop // _BLOCK_BYTES) * _BLOCK_BYTES)
        self._blocks = begin, max(end, self._blocks[1])
        return view

    def _read_ahead(self, start: int, stop: int) -> None:
        """Have the system read a range in large pieces, unless it has the last page of it."""
        stop, is_there = min(self._end, stop), ctypes.create_string_buffer(1)
        last = (stop - 1) // mmap.PAGESIZE * mmap.PAGESIZE
        if _resident is not None and _resident(last, 1, is_there) == 0 and is_there.raw == b"\0":
            _call_madvise(start - start % mmap.PAGESIZE, stop, mmap.MADV_WILLNEED)

    def release(self) -> None:
        """Let go of the window: only then can the page cache drop it."""
        if self._blocks[1]:
            _call_madvise(*self._blocks, mmap.MADV_DONTNEED)
            self._blocks = (0, 0)


def _call_madvise(begin: int, end: int, advice: int) -> None:
    if _advise is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if _advise(begin, end - begin, advice) != 0:
        raise last_error("")


def map_to_read(descriptor: int) -> FileMap | None:
    """Map a file where that is safe and well tried; None if it is to be read, or no local file."""
    if descriptor < 0:
        return None
    status = os.fstat(descriptor)
    if not status.st_mtime + _SETTLED_SECONDS <= time.time():
        ways_taken.add("read: changed within the last minute")
        return None
    if sys.maxsize < 1 << 32:
        ways_taken.add("read: memory has 32-bit addresses, which are too few for maps")
        return None
    if (file_system := file_system_of(descriptor)) not in _FILE_SYSTEMS:
        ways_taken.add(f"read: on a file system of type {file_system:#x}")
        return None
    with ignored(UNSUPPORTED | FROM_OUTSIDE):
        windows = FileMap(descriptor, status.st_size)
        ways_taken.add("mapped")
        return windows
    ways_taken.add("read: the system maps no files")
    return None
