"""Makes what was written durable, and has the disk begin early so that the end does not take long.

A store has thousands of small files, and on most file systems to sync one costs a commit of the
journal, or a flush of the disk. Where one call for the whole file system is known to do the same
for all of them, that is what is done.
"""

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Final

from streamshard.engine.io.file_system import (
    BTRFS,
    EXT4,
    F2FS,
    TMPFS,
    XFS,
    file_system_of,
    last_error,
    libc,
)
from streamshard.posix import entries_below

_SYNC_FILE_RANGE_WRITE: Final = 2
_SYNC_FILE_RANGE_WAIT: Final = 1 | 2 | 4
"""Wait for what is being written, write the rest, wait for that too."""
_SYNCED_AS_A_WHOLE: Final = {EXT4, XFS, BTRFS, F2FS, TMPFS}
"""File systems on which syncfs(2) does what fsync(2) does. Of those that lie elsewhere, some do not
pass it on."""
_REPORTS_ERRORS: Final = (5, 8)
"""Since this version of Linux syncfs tells of what could not be written."""
_THREADS: Final = 8
"""Syncs under way at once, which a journal commits together."""


_sync_file_range = libc(
    "sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint
)
_syncfs = libc("syncfs", ctypes.c_int)


def start_writeback(descriptor: int, offset: int, nbytes: int) -> None:
    """Let the disk begin with what was just written, so that the sync at the end has less to do.

    A hint: where the system has no such call, nothing happens.
    """
    if _sync_file_range is not None:
        _sync_file_range(descriptor, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


def finish_writeback(descriptor: int, offset: int, nbytes: int) -> None:
    """Wait until what was written here before is on its way out of memory.

    A cgroup counts pages that are yet to be written, and kills whom they carry over its limit.
    """
    if _sync_file_range is not None:
        _sync_file_range(descriptor, offset, nbytes, _SYNC_FILE_RANGE_WAIT)


def sync_tree(root: Path) -> None:
    """Make all files in a directory tree durable, and their names.

    Raises
    ------
    OSError
        Something could not be written.
    """
    descriptor = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _syncs_as_a_whole(descriptor):
            _sync_file_system(descriptor, root)
            return
    finally:
        os.close(descriptor)
    with ThreadPoolExecutor(_THREADS) as pool:
        # A name must not be durable before what it names.
        for wanted in (False, True):
            paths = (path for path in chain(entries_below(root), [root]) if path.is_dir() == wanted)
            while some := list(islice(paths, 64 * _THREADS)):
                list(pool.map(sync_path, some))


def sync_path(path: Path) -> None:
    """Make a file's content, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes, temporary: Path) -> None:
    """Write a small file so that at any moment it is what it was, or whole.

    Parameters
    ----------
    temporary
        Where in the same directory it is until it is on the disk.
    """
    temporary.write_bytes(data)
    sync_path(temporary)
    temporary.replace(path)
    sync_path(path.parent)


def _syncs_as_a_whole(descriptor: int) -> bool:
    if _syncfs is None or _linux_version() < _REPORTS_ERRORS:
        return False
    return file_system_of(descriptor) in _SYNCED_AS_A_WHOLE


def _linux_version() -> tuple[int, int]:
    """Read the version of the running Linux; (0, 0) of another system, or one that is unclear."""
    system = os.uname()
    parts = system.release.split(".")
    try:
        return (int(parts[0]), int(parts[1])) if system.sysname == "Linux" else (0, 0)
    except (IndexError, ValueError):
        return 0, 0


def _sync_file_system(descriptor: int, root: Path) -> None:
    if _syncfs is not None and _syncfs(descriptor) != 0:
        raise last_error(str(root))
