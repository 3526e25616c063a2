"""Makes space for files, and written files durable; writes early, so that the final sync is short.

A store has thousands of small files. On most file systems the sync of one file costs a commit of
the journal, or a flush of the disk. Where one call for the whole file system is known to have the
same effect for all files, that call is used.
"""

import ctypes
import errno
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Final

from streamshard.io.file_system import (
    BTRFS,
    EXT4,
    F2FS,
    TMPFS,
    XFS,
    file_system_of,
    last_error,
    libc,
)
from streamshard.io.readable import walk
from streamshard.io.retry import close_unwritten
from streamshard.io.writable import open_to_write

_SYNC_FILE_RANGE_WRITE: Final = 2
_SYNC_FILE_RANGE_WAIT: Final = 1 | 2 | 4
"""Wait for writes under way, write the remaining pages, wait for those too."""
_SYNCED_AS_A_WHOLE: Final = {EXT4, XFS, BTRFS, F2FS, TMPFS}
"""File systems on which syncfs(2) does what fsync(2) does. Some remote file systems do not pass
syncfs on."""
_REPORTS_ERRORS: Final = (5, 8)
"""First version of Linux in which syncfs reports write errors."""
_THREADS: Final = 8
"""Syncs in parallel, which a journal commits together."""


_sync_file_range = libc(
    "sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint
)
_syncfs = libc("syncfs", ctypes.c_int)


def start_writeback(descriptor: int, offset: int, nbytes: int) -> None:
    """Start writing a range to disk now, so that the sync at the end has less to do.

    This is a hint: if the system has no such call, nothing happens.
    """
    if _sync_file_range is not None and descriptor >= 0:
        _sync_file_range(descriptor, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


def finish_writeback(descriptor: int, offset: int, nbytes: int) -> None:
    """Wait until a range that was written earlier has been passed to the disk.

    A cgroup counts unwritten pages, and kills a process whose pages exceed the limit.
    """
    if _sync_file_range is not None and descriptor >= 0:
        _sync_file_range(descriptor, offset, nbytes, _SYNC_FILE_RANGE_WAIT)


def sync_tree(root: Path) -> None:
    descriptor = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        reports_errors = _linux_version() >= _REPORTS_ERRORS
        if _syncfs and reports_errors and file_system_of(descriptor) in _SYNCED_AS_A_WHOLE:
            if _syncfs(descriptor) != 0:
                raise last_error(str(root))
            return
    finally:
        close_unwritten(descriptor)
    with ThreadPoolExecutor(_THREADS) as pool:
        # A name must not be durable before what it names.
        for wanted in (False, True):
            found = chain(walk(root) if root.is_dir() else (), [root])
            paths = (path for path in found if path.is_dir() == wanted)
            while some := list(islice(paths, 64 * _THREADS)):
                list(pool.map(sync_path, some))


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe is refused
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        close_unwritten(descriptor)


def _linux_version() -> tuple[int, int]:
    system = os.uname()
    parts = system.release.split(".")
    try:
        return (int(parts[0]), int(parts[1])) if system.sysname == "Linux" else (0, 0)
    except (IndexError, ValueError):
        return 0, 0


_STEP_BYTES: Final = 64 << 20
_fallocate = libc("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Reservation:
    """Space that a placeholder file occupies, and returns just before other files need it.

    If the file system cannot preallocate, no space is held.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path = path
        self._needed_bytes = nbytes
        self._descriptor = open_to_write(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._held_bytes = 0
        try:
            self._held_bytes = self._hold(nbytes // _STEP_BYTES * _STEP_BYTES)
        except BaseException:
            self.close()
            raise

    def _hold(self, nbytes: int) -> int:
        # On a file system in memory, preallocation would occupy the memory at once.
        if not nbytes or _fallocate is None or file_system_of(self._descriptor) == TMPFS:
            return 0
        if _fallocate(self._descriptor, 0, 0, nbytes) == 0:
            return nbytes
        error = last_error(str(self._path))
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise error
        return 0

    def give_back(self, nbytes: int) -> None:
        self._needed_bytes = max(0, self._needed_bytes - nbytes)
        wanted = self._needed_bytes // _STEP_BYTES * _STEP_BYTES
        if wanted < self._held_bytes:
            os.ftruncate(self._descriptor, wanted)
            self._held_bytes = wanted

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            close_unwritten(descriptor)
            self._path.unlink(missing_ok=True)
