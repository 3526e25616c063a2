"""Takes the pages of new memory from the system before they are filled."""

import ctypes
import mmap
import time
from collections.abc import Iterator
from typing import Final

from streamshard.io.file_system import libc

_advise = libc("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_POPULATE: Final = 23
"""MADV_POPULATE_WRITE, which Python does not name."""
_HUGE: Final = getattr(mmap, "MADV_HUGEPAGE", -1)
_HUGE_BYTES: Final = 1 << 21
"""Size and boundary of a huge page."""


def populate(view: memoryview) -> None:
    """Take the pages of a view from the system at once, which is quicker than one at each touch.

    Before Linux 5.14 they are taken when they are touched.
    """
    start = _address(view)
    first, last = -(-start // mmap.PAGESIZE), (start + len(view)) // mmap.PAGESIZE
    if last > first:
        _advised(first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE, _POPULATE)


def windows(view: memoryview, nbytes: int) -> Iterator[memoryview]:
    """Cut a view into parts of at most so many bytes, of whole huge pages but at its ends."""
    at = 0
    while at < len(view):
        end = at + nbytes - (_address(view) + at) % _HUGE_BYTES
        yield view[at:end]
        at = end


class HugePages:
    """Takes huge pages for new memory from the system, as long as that saves time.

    A huge page costs the system a fraction of what its 512 small ones do. But where free memory is
    in small pieces, it first moves other pages away, and a virtual machine may have to get memory
    back from its host. So the first is taken small, to compare, and one that costs more is last.
    """

    def __init__(self) -> None:
        self._small_seconds = 0.0
        """What the small pages in place of a huge one cost; 0 before that is known."""
        self._spare_seconds = 0.0
        """What a huge page may cost on top: what others saved, at most as much again."""

    def take(self, view: memoryview) -> None:
        """Take what has whole huge pages of a view that was never touched."""
        start = _address(view)
        first, last = -(-start // _HUGE_BYTES), (start + len(view)) // _HUGE_BYTES
        for page in range(first, last):
            if self._spare_seconds < 0 or not self._take(page * _HUGE_BYTES):
                break

    def _take(self, address: int) -> bool:
        """Take a huge page, or what it is compared with; returns whether the system does that."""
        small = self._small_seconds
        if small and not _advised(address, _HUGE_BYTES, _HUGE):
            return False
        began = time.thread_time()
        is_taken = _advised(address, _HUGE_BYTES, _POPULATE)
        seconds = time.thread_time() - began
        self._small_seconds = small or seconds
        self._spare_seconds = min(self._spare_seconds + small - seconds, small) if small else 0.0
        return is_taken


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view)) if len(view) else 0


def _advised(address: int, nbytes: int, advice: int) -> bool:
    return _advise is not None and _advise(address, nbytes, advice) == 0
