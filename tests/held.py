"""What this process holds: files that are open, threads that run.

Only what a run may leave is looked at. A cluster or a server that an earlier test started opens
sockets, reads `/proc` and starts threads of its own at any time.
"""

import os
import threading
from contextlib import suppress


def open_files() -> list[str]:
    """List the files and directories that are open, one that is open twice twice."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(FileNotFoundError):  # it was open to list the directory
            path = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
            if path.startswith("/") and not path.startswith(("/dev/", "/proc/", "/sys/")):
                found.append(path)
    return sorted(found)


def running_workers() -> list[str]:
    """List the threads of runs."""
    names = (thread.name for thread in threading.enumerate())
    return sorted(name for name in names if name.startswith("streamshard_"))


def descriptor_limit(free: int) -> int:
    """Return the RLIMIT_NOFILE that leaves room for at least so many more files."""
    return max(map(int, os.listdir("/proc/self/fd"))) + 1 + free  # noqa: PTH208
