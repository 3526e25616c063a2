"""Opens sources for reading only; not even their access time changes where the system allows."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, NoReturn

_QUIET: Final = getattr(os, "O_NOATIME", 0)
"""Flag of open(2) that keeps the access time; allowed only for the owner of a file."""


def open_to_read(path: Path) -> int:
    """Open a file for reading; returns its descriptor."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        return os.open(path, flags | _QUIET)
    except PermissionError:
        return os.open(path, flags)


def stream_of(path: Path) -> BinaryIO:
    """Open a file as a stream of bytes."""
    return os.fdopen(open_to_read(path), "rb")


def read_all(path: Path) -> bytes:
    """Read a small file."""
    with stream_of(path) as stream:
        return stream.read()


def read_into(descriptor: int, view: memoryview, offset: int) -> int:
    """Fill a view from a byte offset of a file; returns the bytes read, fewer only at its end."""
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if not count:
            break
        done += count
    return done


def entries_below(root: Path) -> Iterator[Path]:
    """Yield all paths below a directory; a directory comes before its content.

    Raises
    ------
    OSError
        A directory cannot be read. pathlib and os.walk by default skip it without an error.
    """
    for directory, directories, files in os.walk(root, onerror=_refuse):
        yield from (Path(directory, name) for name in (*directories, *files))


def _refuse(error: OSError) -> NoReturn:
    raise error
