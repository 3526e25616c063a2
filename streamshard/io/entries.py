"""What lies at a path and in a directory: its kind, size and identity, and what is listed there.

The only places today are local directories. Another place is another `ByteSource`, and a kind of
path with the same pure operations (`/`, `name`, `parent`, `relative_to`, …); `source_of` tells the
places apart by the kind of path.
"""

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from streamshard.io.readable import OpenedFile, ReadableFile, Status, open_to_read
from streamshard.model import SourceFile

_ABSENT: Final = {errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP}
"""Errors which say that a path leads to nothing."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a directory as it was listed; links are not followed."""

    path: Path
    is_directory: bool
    is_link: bool
    known: Status | None = None
    """Status, if the listing told it."""

    @property
    def name(self) -> str:
        """Name in the directory."""
        return self.path.name

    def status(self) -> Status:
        """Return the status of the entry itself.

        Raises
        ------
        OSError
            The entry is gone.
        """
        return self.known or examine(self.path, follows=False)


class ByteSource(Protocol):
    """A place that files are read from. All errors are OSError."""

    def examine(self, path: Path, *, follows: bool) -> Status:
        """Return the status of what is at a path, or of the link itself that is there."""

    def entries(self, directory: Path) -> Iterator[Entry]:
        """List a directory, perhaps page by page, in any order."""

    def resolve(self, path: Path) -> Path:
        """Return an absolute path without symbolic links, as far as it exists."""

    def open(self, path: Path) -> OpenedFile:
        """Open a file to read ranges of it."""

    def stream(self, path: Path) -> BinaryIO:
        """Open a file, or a pipe, to read it from its beginning."""


class LocalFiles:
    """The directories of this machine."""

    def examine(self, path: Path, *, follows: bool) -> Status:
        """Return the status of what is at a path, or of the link itself that is there."""
        return Status.of(os.stat(path, follow_symlinks=follows))  # noqa: PTH116

    def entries(self, directory: Path) -> Iterator[Entry]:
        """List a directory."""
        with os.scandir(directory) as found:
            for one in found:
                is_directory = one.is_dir(follow_symlinks=False)
                yield Entry(directory / one.name, is_directory, one.is_symlink())

    def resolve(self, path: Path) -> Path:
        """Return an absolute path without symbolic links, as far as it exists."""
        return Path(os.path.realpath(path))

    def open(self, path: Path) -> ReadableFile:
        """Open a file to read ranges of it."""
        return ReadableFile(open_to_read(path))

    def stream(self, path: Path) -> BinaryIO:
        """Open a file, or a pipe, to read it from its beginning."""
        descriptor = open_to_read(path)
        try:
            return os.fdopen(descriptor, "rb")
        except OSError as error:  # it is a directory
            os.close(descriptor)
            raise OSError(error.errno, error.strerror, str(path)) from error


_LOCAL: Final = LocalFiles()


def source_of(path: Path) -> ByteSource:
    """Return the place that a path belongs to."""
    return _LOCAL


def examine(path: Path, *, follows: bool = True) -> Status:
    """Return the status of what is at a path.

    Parameters
    ----------
    follows
        Whether a symbolic link stands for what it leads to.

    Raises
    ------
    OSError
        There is nothing, or it cannot be examined.
    """
    return source_of(path).examine(path, follows=follows)


def identify(path: Path) -> SourceFile:
    """Describe a source file by its present size and identity."""
    return examine(path).source_file(path)


def _examine_if_there(path: Path, *, follows: bool = True) -> Status | None:
    try:
        return examine(path, follows=follows)
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
    except ValueError:  # no path that the system could have
        pass
    return None


def exists(path: Path) -> bool:
    """Tell whether a path leads to anything."""
    return _examine_if_there(path) is not None


def lexists(path: Path) -> bool:
    """Tell whether there is anything at a path, even a link that leads to nothing."""
    return _examine_if_there(path, follows=False) is not None


def is_file(path: Path) -> bool:
    """Tell whether a path leads to a regular file."""
    found = _examine_if_there(path)
    return found is not None and found.is_file


def is_directory(path: Path) -> bool:
    """Tell whether a path leads to a directory."""
    found = _examine_if_there(path)
    return found is not None and found.is_directory


def is_link(path: Path) -> bool:
    """Tell whether there is a symbolic link at a path."""
    found = _examine_if_there(path, follows=False)
    return found is not None and found.is_link


def is_real_directory(path: Path) -> bool:
    """Tell whether there is a directory at a path, and no link to one."""
    found = _examine_if_there(path, follows=False)
    return found is not None and found.is_directory


def is_same_file(path: Path, other: Path) -> bool:
    """Tell whether two paths lead to the same file.

    Raises
    ------
    OSError
        One of them leads to nothing.
    """
    one, two = examine(path), examine(other)
    return (one.device, one.file_id) == (two.device, two.file_id)


def resolve(path: Path) -> Path:
    """Return an absolute path without symbolic links, as far as it exists."""
    return source_of(path).resolve(path)


def link_target(path: Path) -> str:
    """Return what a symbolic link holds, for messages."""
    return os.readlink(path)  # noqa: PTH115


def entries(directory: Path) -> Iterator[Entry]:
    """List a directory, in any order.

    Raises
    ------
    OSError
        The directory cannot be read.
    """
    return source_of(directory).entries(directory)


def paths_in(directory: Path) -> Iterator[Path]:
    """List the paths of a directory's entries; see `entries`."""
    return (entry.path for entry in entries(directory))


def entries_below(
    root: Path,
    *,
    enters: Callable[[Entry], bool] = lambda entry: True,
    skips: Callable[[OSError], bool] = lambda error: False,
) -> Iterator[Entry]:
    """List all entries below a directory; a directory comes before its content.

    Parameters
    ----------
    enters
        Tells whether a directory's content is listed too.
    skips
        Tells whether a directory that cannot be read is passed over.

    Raises
    ------
    OSError
        A directory cannot be read. pathlib and os.walk by default skip it without an error.
    """
    pending = [root]
    while pending:
        try:
            found = list(entries(pending.pop()))
        except OSError as error:
            if not skips(error):
                raise
            continue
        yield from found
        pending += [one.path for one in reversed(found) if one.is_directory and enters(one)]


def is_denied(error: OSError) -> bool:
    """Tell whether a directory may not be read, for `entries_below`."""
    return isinstance(error, PermissionError)


def paths_below(root: Path) -> Iterator[Path]:
    """List all paths below a directory; see `entries_below`."""
    return (entry.path for entry in entries_below(root))


def files_below(root: Path) -> list[Path]:
    """List all paths below a directory that are no directories; links are not followed."""
    return [entry.path for entry in entries_below(root) if not entry.is_directory]


def paths_like(directory: Path, pattern: str) -> list[Path]:
    """List the paths in a directory whose names match a pattern; none if it cannot be listed."""
    try:
        found = list(paths_in(directory)) if is_directory(directory) else []
    except PermissionError:
        return []
    return [path for path in found if fnmatchcase(path.name, pattern)]


def open_readable(path: Path) -> OpenedFile:
    """Open a file to read ranges of it, as a context manager too.

    Raises
    ------
    OSError
        The file cannot be opened.
    """
    return source_of(path).open(path)


def stream_of(path: Path) -> BinaryIO:
    """Open a file, or a pipe, to read it from its beginning."""
    return source_of(path).stream(path)


def read_all(path: Path, limit: int = -1) -> bytes:
    """Read a small file, or only its first bytes."""
    with stream_of(path) as stream:
        return stream.read(limit)
