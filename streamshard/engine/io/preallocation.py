"""Holds space of a file system until it is needed, so that it does not run out in mid-run."""

import ctypes
import errno
import os
import threading
from pathlib import Path
from typing import Final

from streamshard.engine.io.file_system import TMPFS, file_system_of, last_error, libc

_STEP_BYTES: Final = 64 << 20
_fallocate = libc("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Reservation:
    """Space held by a file of nothing, and given back as others are about to be written.

    Where the file system cannot do that, nothing is held.

    Raises
    ------
    OSError
        There is not so much space, or no quota for it.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path = path
        self._needed_bytes = nbytes
        """What is still to be written."""
        self._lock = threading.Lock()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._held_bytes = 0
        try:
            self._held_bytes = self._hold(nbytes // _STEP_BYTES * _STEP_BYTES)
        except BaseException:
            self.close()
            raise

    def _hold(self, nbytes: int) -> int:
        # Of a file system in memory it would take the memory at once.
        if not nbytes or _fallocate is None or file_system_of(self._descriptor) == TMPFS:
            return 0
        if _fallocate(self._descriptor, 0, 0, nbytes) == 0:
            return nbytes
        error = last_error(str(self._path))
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise error
        return 0

    def give_back(self, nbytes: int) -> None:
        """Make room for bytes that are about to be written; may be called from several threads."""
        with self._lock:
            self._needed_bytes = max(0, self._needed_bytes - nbytes)
            wanted = self._needed_bytes // _STEP_BYTES * _STEP_BYTES
            if wanted < self._held_bytes:
                os.ftruncate(self._descriptor, wanted)
                self._held_bytes = wanted

    def close(self) -> None:
        """Give everything back, unless that is done."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._path.unlink(missing_ok=True)
