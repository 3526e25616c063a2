"""Limits a run to a number of bytes per second, and lets other programs go first."""

import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import Final

from streamshard.io.file_system import libc
from streamshard.io.retry import FROM_OUTSIDE, ignored

_IDLE_CLASS: Final = 3 << 13
_WHO_PROCESS: Final = 1
_SET_IO_PRIORITY: Final = {"x86_64": 251, "aarch64": 30}
"""Number of ioprio_set(2), which has no function in the C library."""


class Throttle:
    """Passes byte counts on to a callback, and sleeps if the rate is too high."""

    def __init__(self, advance: Callable[[int], None], bytes_per_second: float | None) -> None:
        self._advance = advance
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def limit(self, bytes_per_second: float | None) -> None:
        with self._lock:
            self._rate = bytes_per_second

    def advance(self, nbytes: int) -> None:
        """Count bytes; returns after the time that they may take."""
        wait = 0.0
        with self._lock:
            if self._rate is not None:
                start = max(self._free_at, time.monotonic())
                self._free_at = start + nbytes / self._rate
                wait = self._free_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        self._advance(nbytes)


def lower_priority(niceness: int) -> None:
    """Set a lower CPU and the lowest disk priority; where the system refuses, nothing happens."""
    with ignored(FROM_OUTSIDE):
        os.nice(niceness)
    number = _SET_IO_PRIORITY.get(os.uname().machine)
    call = libc("syscall", ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_int)
    if os.uname().sysname == "Linux" and number is not None and call is not None:
        call(number, _WHO_PROCESS, 0, _IDLE_CLASS)
