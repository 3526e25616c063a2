"""Opens local files to write them: only regular files of one name, and none through a link.

Someone else who may write into the directory, or made the archive that was unpacked there, may have
put a link to another file where a run writes.

Large files are written past the page cache: the disk reads whole blocks directly from the program's
memory. A write through the cache costs the system a page of memory and a copy for every page, on
the cores that prepare the next data. A virtual machine may also have to request that page from its
host. Other programs lose the cached data that they need.
"""

import ctypes
import errno
import mmap
import os
from pathlib import Path
from stat import S_ISREG
from typing import Final

from streamshard.io.file_system import EXT4, XFS, file_system_of
from streamshard.io.readable import kind_of
from streamshard.io.retry import UNSUPPORTED, ignored

BLOCK_BYTES: Final = max(4096, mmap.PAGESIZE)
"""Offsets in the file and addresses in memory must be multiples of this: of the disk's block and
of a page, so that no page is partly in the cache."""
LEAST_BYTES: Final = 1 << 17
"""For smaller writes, waiting for the disk costs more than the cache."""
_HUGE_BYTES: Final = 1 << 21
"""Size and boundary of a huge page."""
_FILE_SYSTEMS: Final = {EXT4, XFS}
"""Local file systems that pass all direct writes on to the disk. Over a network every write would
wait for its answer."""
_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Without the last, a pipe would wait for a reader."""
_OTHER_KIND: Final = {errno.ELOOP, errno.EISDIR, errno.ENXIO}
"""Errors of open(2) if there is no regular file."""


def open_to_write(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a regular file that has no other name; returns its descriptor.

    `flags`: those of open(2), but not O_TRUNC, which would come before any check.
    """
    descriptor = open_regular(path, flags, mode)
    try:
        require_one_name(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def create(path: str | Path, access: int) -> int:
    """Make a file, which must not exist yet; it is regular and has no other name."""
    return os.open(path, access | os.O_CREAT | os.O_EXCL | _FLAGS, 0o666)


def open_regular(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a regular file, whatever other names it has; see `open_to_write`."""
    try:
        descriptor = os.open(path, flags | _FLAGS, mode)
    except OSError as error:
        if error.errno in _OTHER_KIND:
            _require_regular(path, path.lstat().st_mode)
        raise
    try:
        _require_regular(path, os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require_regular(path: Path, mode: int) -> None:
    if not S_ISREG(mode):
        raise not_ours(path, kind_of(mode))


def require_one_name(descriptor: int, path: Path) -> None:
    """Refuse a file of which a change would show under another name."""
    if os.fstat(descriptor).st_nlink > 1:
        raise not_ours(path, "a hard link, and the same file has another name")


def not_ours(path: Path, what: str) -> OSError:
    return OSError(errno.EINVAL, f"it is {what}, which no run has made; move it away", str(path))


def write_file(path: Path, data: bytes) -> None:
    descriptor = open_to_write(path, os.O_WRONLY | os.O_CREAT)
    try:
        os.ftruncate(descriptor, 0)
        write_all(descriptor, memoryview(data), 0)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, view: memoryview, offset: int) -> None:
    while len(view):
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def open_direct(path: Path, descriptor: int) -> int:
    """Open a file that is already open a second time, to write it past the page cache.

    Returns -1 if the system cannot do that, or is not known to benefit from it.
    """
    if file_system_of(descriptor) not in _FILE_SYSTEMS or not hasattr(os, "O_DIRECT"):
        return -1
    with ignored(UNSUPPORTED):  # the mount options or the device may not allow it
        found = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT | os.O_NONBLOCK)
        if os.path.samestat(os.fstat(found), os.fstat(descriptor)):
            return found
        os.close(found)  # another file has been put there meanwhile
    return -1


def aligned(nbytes: int) -> memoryview:
    """Return memory that begins at a block boundary; whole huge pages of it stay in one piece.

    A request to a disk holds few pieces of memory. A window of scattered pages takes two requests,
    and can fill the queue of a virtual disk, so that no other write is under way.
    """
    mapped = mmap.mmap(-1, nbytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(mapped)) % _HUGE_BYTES
    huge_bytes = nbytes // _HUGE_BYTES * _HUGE_BYTES
    if huge_bytes and hasattr(mmap, "MADV_HUGEPAGE"):
        with ignored(UNSUPPORTED):  # not every kernel has huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE, start, huge_bytes)
    return memoryview(mapped)[start : start + nbytes]
