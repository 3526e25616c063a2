"""File systems: their types and mount points; system calls that Python does not offer."""

import ctypes
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from streamshard.io.retry import FROM_OUTSIDE, ignored

EXT4, XFS, BTRFS, F2FS, TMPFS = 0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994
OVERLAYFS: Final = 0x794C7630
"""Types of file systems on this machine's own disks or in its memory, by statfs(2)."""
_STATFS_BYTES: Final = 256
_MOUNTS: Final = Path("/proc/self/mountinfo")
_PLACE: Final = 4
"""Index of the mount point among a line's fields; see proc_pid_mountinfo(5)."""
_ESCAPED: Final = re.compile(rb"\\([0-7]{3})")


def libc(
    name: str,
    *types: Any,  # noqa: ANN401
    result: Any = ctypes.c_int,  # noqa: ANN401
) -> Callable[..., int] | None:
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = list(types)
    function.restype = result
    call: Callable[..., int] = function
    return call


def last_error(path: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), path)


_fstatfs = libc("fstatfs", ctypes.c_int, ctypes.c_char_p)


def file_system_of(descriptor: int) -> int:
    """Return the type of a file's file system; 0 if the system does not tell."""
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _fstatfs is None or os.uname().sysname != "Linux" or _fstatfs(descriptor, buffer) != 0:
        return 0
    return int(ctypes.c_long.from_buffer(buffer).value)  # f_type, the first field


def is_mount_point(directory: Path) -> bool:
    """Tell whether a directory is a mount point.

    Only the system's list shows a bind mount within the same file system.
    """
    if directory.is_mount():
        return True
    with ignored(FROM_OUTSIDE):
        wanted = os.fsencode(directory.resolve())
        return any(_place(line) == wanted for line in _MOUNTS.read_bytes().splitlines())
    return False


def _place(line: bytes) -> bytes:
    return _ESCAPED.sub(lambda match: bytes([int(match[1], 8)]), line.split(b" ")[_PLACE])


def boot_id() -> str:
    """Identify the machine's current boot; empty where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
