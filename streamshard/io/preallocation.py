"""Preallocates space on a file system, so that it does not run out during the run."""

import ctypes
import errno
import os
from pathlib import Path
from typing import Final

from streamshard.io.file_system import TMPFS, file_system_of, last_error, libc
from streamshard.io.retry import close_unwritten
from streamshard.io.writable import open_to_write

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
