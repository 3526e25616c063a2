"""Creates, renames and removes files and directories; errors are OSError and name the path."""

import os
import shutil
import threading
from pathlib import Path
from typing import Final

from streamshard.io.entries import entries_below, is_real_directory, lexists

_BLOCK_BYTES: Final = 512
"""The unit of st_blocks in stat(2), whatever the block size of the file system."""


class AppendedFile:
    """A file that exists and grows at its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1
        self._lock = threading.Lock()

    def open(self) -> None:
        """Open the file; before that, nothing can be appended."""
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def append(self, data: bytes) -> None:
        """Add bytes; may be called from several threads."""
        with self._lock:
            while data:
                data = data[os.write(self._descriptor, data) :]

    def sync(self) -> None:
        """Make all bytes durable."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file, unless that is done."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def make_directory(path: Path, *, parents: bool = False, exist_ok: bool = False) -> None:
    """Make a directory; as `Path.mkdir`."""
    path.mkdir(parents=parents, exist_ok=exist_ok)


def write_new(path: Path, data: bytes) -> None:
    """Write a small file, with the directories that it lies in."""
    make_directory(path.parent, parents=True, exist_ok=True)
    path.write_bytes(data)


def rename(path: Path, target: Path) -> None:
    """Rename a file or a directory within one file system; an empty directory may be replaced."""
    path.rename(target)


def replace_file(path: Path, target: Path) -> None:
    """Rename a file; at any moment there is the old or the new one at the target."""
    path.replace(target)


def make_link(known: Path, path: Path) -> None:
    """Make a hard link to a known file; a symbolic link itself is linked to."""
    os.link(known, path, follow_symlinks=False)


def link_or_copy(known: Path, path: Path) -> None:
    """Make a hard link to a known file; if that is impossible, a copy."""
    make_directory(path.parent, parents=True, exist_ok=True)
    try:
        make_link(known, path)
    except OSError:
        shutil.copyfile(known, path)


def remove_file(path: Path, *, missing_ok: bool = False) -> None:
    """Remove a file or a link."""
    path.unlink(missing_ok=missing_ok)


def remove(path: Path) -> None:
    """Remove a directory with all that is in it, or a file; nothing may be there.

    Raises
    ------
    OSError
        Something cannot be removed; it names the path that was given.
    """
    try:
        if is_real_directory(path):
            shutil.rmtree(path)
        else:
            remove_file(path, missing_ok=True)
    except OSError as error:
        # rmtree may name a path relative to a directory that it does not name.
        raise OSError(error.errno, error.strerror, str(path)) from error


def discard(directory: Path) -> None:
    """Remove what can be removed of a directory; errors are ignored."""
    shutil.rmtree(directory, ignore_errors=True)


def take_over_status(known: Path, path: Path) -> None:
    """Give a directory owner, mode, times and access list of another one."""
    wanted, own = known.stat(), path.stat()
    if (wanted.st_uid, wanted.st_gid) != (own.st_uid, own.st_gid):
        os.chown(path, wanted.st_uid, wanted.st_gid)
    shutil.copystat(known, path)


def may_change(directory: Path) -> bool:
    """Tell whether this process may make and remove entries of a directory."""
    return os.access(directory, os.W_OK | os.X_OK)


def foreign_owner(path: Path) -> int | None:
    """Return the user that a path belongs to; None if this process may act as that user."""
    owner = path.stat().st_uid
    return None if os.geteuid() in (0, owner) else owner


def free_bytes(directory: Path) -> int:
    """Return the free space on the file system of a directory."""
    return shutil.disk_usage(directory).free


def allocated_bytes(root: Path) -> int:
    """Return the space that what is below a directory takes on its file system."""
    if not lexists(root):
        return 0
    return sum(entry.path.lstat().st_blocks * _BLOCK_BYTES for entry in entries_below(root))
