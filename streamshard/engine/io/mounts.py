"""Tells where file systems are mounted."""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

_MOUNTS: Final = Path("/proc/self/mountinfo")
_PLACE: Final = 4
"""Index of the mount point among a line's fields; see proc_pid_mountinfo(5)."""
_ESCAPED: Final = re.compile(rb"\\([0-7]{3})")


def is_mount_point(directory: Path) -> bool:
    """Tell whether a directory is a mount point.

    Only the system's list shows a bind mount within the same file system.
    """
    if directory.is_mount():
        return True
    with suppress(OSError):
        place = os.fsencode(directory.resolve())
        return any(_place(line) == place for line in _MOUNTS.read_bytes().splitlines())
    return False


def _place(line: bytes) -> bytes:
    return _ESCAPED.sub(lambda match: bytes([int(match[1], 8)]), line.split(b" ")[_PLACE])
