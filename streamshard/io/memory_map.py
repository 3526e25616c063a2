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

FAILED: Final = ctypes.c_void_p(-1).value
system_map = libc(
    "mmap",
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    result=ctypes.c_void_p,
)  # fmt: skip
_unmap = libc("munmap", ctypes.c_void_p, ctypes.c_size_t)


def map_range(descriptor: int, offset: int, nbytes: int, *, is_private: bool) -> memoryview:
    """Map a range of a file that has at least one byte.

    The map stays for as long as the view, and whatever shares its memory; the descriptor may be
    closed. Who touches what is past the end of a file that was cut off gets SIGBUS.

    `is_private`: whether the view can be written to: what is written stays in this process's memory
    and never gets into the file. Else the view is read-only, for NumPy too.
    """
    if descriptor < 0:
        raise OSError(errno.ENOTSUP, "it is an object, not a local file")
    if system_map is None or _unmap is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    before = offset % mmap.ALLOCATIONGRANULARITY
    length = before + nbytes
    access = mmap.PROT_READ | (mmap.PROT_WRITE if is_private else 0)
    sharing = mmap.MAP_PRIVATE if is_private else mmap.MAP_SHARED
    address = system_map(None, length, access, sharing, descriptor, offset - before)
    if address == FAILED:
        raise last_error("")
    mapped = (ctypes.c_ubyte * length).from_address(address)
    # At the end of the program arrays may still be there, which others look at even then.
    weakref.finalize(mapped, _unmap, address, length).atexit = False
    view = memoryview(mapped).cast("B")[before:]
    return view if is_private else view.toreadonly()


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
"""By madvise(2), since Linux 5.14: fails with EFAULT past the end of a file, where touching the
page would end the process. Python has no name for it."""
_AHEAD_BYTES: Final = 4 << 20
"""How far behind a window the system reads, if windows follow each other and it has not yet."""
_BLOCK_BYTES: Final = 2 << 20
"""The system may put what lies around a page in place with it, between multiples of this."""
ways_taken: Final = set[str]()
"""How this process has read files, for whoever asks."""


class FileMap:
    """A map of a whole file, of which a window and what follows it in its block are in memory."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._whole = map_range(descriptor, 0, nbytes, is_private=False)
        self._address = ctypes.addressof(self._whole.obj)  # type: ignore[arg-type]
        self._shown = (0, 0)
        """Offsets between which all pages are in place."""
        self._stop = 0
        """Offset of the last window's end."""
        self._call_madvise(0, nbytes, mmap.MADV_SEQUENTIAL)

    def shows(self, offset: int, nbytes: int) -> bool:
        """Tell whether the pages of a range are in place."""
        return self._shown[0] <= offset and offset + nbytes <= self._shown[1]

    def window(self, offset: int, nbytes: int) -> memoryview:
        """Put the pages of a range in place, and return it; it is valid until the next window.

        Whoever touches it after the file was cut off gets SIGBUS, or zeros in the file's last page.
        """
        view = self._whole[offset : offset + nbytes]
        if not self.shows(offset, len(view)):
            self.release()
            self._show(offset, offset + len(view))
        self._stop = offset + len(view)
        return view

    def _show(self, start: int, stop: int) -> None:
        """Put pages in place; to the end of a block if windows follow each other.

        These calls of the system take as long as all else that is done for a window in Python.
        """
        ahead = stop
        if start == self._stop:
            ahead, stop = stop + _AHEAD_BYTES, self._block(start, stop)[1]
        self._read_ahead(start, ahead)
        try:
            self._call_madvise(start, stop, _POPULATE_READ)
        except OSError:
            ways_taken.add("read: the system could not show all of a map")
            raise
        self._shown = start, stop

    def _block(self, start: int, stop: int) -> tuple[int, int]:
        """Return a range of the map that holds another one, and all that may be put in place."""
        begin = (self._address + start) // _BLOCK_BYTES * _BLOCK_BYTES - self._address
        end = -(-(self._address + stop) // _BLOCK_BYTES) * _BLOCK_BYTES - self._address
        return max(0, begin), min(len(self._whole), end)

    def _read_ahead(self, start: int, stop: int) -> None:
        """Have the system read a range in large pieces, unless it has the last page of it."""
        stop, is_there = min(len(self._whole), stop), ctypes.create_string_buffer(1)
        last = self._address + (stop - 1) // mmap.PAGESIZE * mmap.PAGESIZE
        if _resident is not None and _resident(last, 1, is_there) == 0 and is_there.raw == b"\0":
            self._call_madvise(start, stop, mmap.MADV_WILLNEED)

    def release(self) -> tuple[int, int]:
        """Let go of all pages, as only then the page cache can drop them; return their range."""
        shown, self._shown = self._shown, (0, 0)
        if shown[1]:
            self._call_madvise(*self._block(*shown), mmap.MADV_DONTNEED)
        return shown

    def _call_madvise(self, start: int, stop: int, advice: int) -> None:
        if _advise is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        start -= start % mmap.PAGESIZE
        if _advise(self._address + start, stop - start, advice) != 0:
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
