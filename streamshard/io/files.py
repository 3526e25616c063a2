"""Opens, writes and identifies files; turns system errors into errors that name the file."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamshard.errors import CorruptFileError, NoSpaceError, SourceError, TargetError
from streamshard.io.direct_io import BLOCK_BYTES, LEAST_BYTES
from streamshard.io.entries import examine
from streamshard.io.readable import Status
from streamshard.model import SourceFile


def require_unchanged(source: SourceFile) -> None:
    """Refuse a source file that has changed since the plan was made.

    Raises
    ------
    SourceError
        The file is gone, or has another size or version.
    """
    try:
        status = examine(source.path)
    except OSError as error:
        raise SourceError(f"{source.path}: gone during the run ({error.strerror})") from error
    require_same(source, status)


def require_same(source: SourceFile, status: Status) -> None:
    """Refuse a file whose size or version is not that of the plan; see `require_unchanged`."""
    if (status.nbytes, status.version) != (source.nbytes, source.version):
        message = (
            f"{source.path}: changed while it was being read ({source.nbytes} bytes when the run "
            f"began, {status.nbytes} now). Is the job still saving? Run again when it has finished"
        )
        raise CorruptFileError(message)


@contextmanager
def source_errors(path: Path) -> Iterator[None]:
    """Turn system errors while reading a source into an error that names the file."""
    try:
        yield
    except OSError as error:
        place = error.filename or path
        raise SourceError(f"{place}: cannot be read ({error.strerror})") from error


@contextmanager
def target_errors(path: Path) -> Iterator[None]:
    """Turn system errors while writing a target into an error that names the file."""
    try:
        yield
    except OSError as error:
        place = error.filename or path
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"{place}: no space left on the target's file system ({error.strerror})"
            raise NoSpaceError(f"{message}; free some and run the same command again") from error
        raise TargetError(f"{place}: cannot be written ({error.strerror})") from error


def open_target(path: Path, *, is_new: bool) -> int:
    """Open a file for writing at any offset; a new file must not exist yet."""
    flags = os.O_RDWR | os.O_CLOEXEC
    if is_new:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags |= os.O_CREAT | os.O_EXCL
    return os.open(path, flags, 0o666)


def write_all(descriptor: int, view: memoryview, offset: int) -> None:
    """Write all of a view at a byte offset."""
    while len(view):
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def write_blocks(descriptor: int, direct: int, view: memoryview, offset: int) -> None:
    """Write all of a view at a byte offset; enough whole blocks are written past the page cache.

    Parameters
    ----------
    direct
        Descriptor from `open_direct`; -1 if there is none.
    view
        Its distance in memory from a block boundary equals that of the offset in the file.
    """
    start = -offset % BLOCK_BYTES
    stop = max(start, len(view) - (offset + len(view)) % BLOCK_BYTES)
    if direct < 0 or stop - start < LEAST_BYTES:
        write_all(descriptor, view, offset)
        return
    write_all(descriptor, view[:start], offset)
    try:
        write_all(direct, view[start:stop], offset + start)
    except OSError as error:
        # The disk may need larger blocks, or a short write may have ended within a block.
        if error.errno != errno.EINVAL:
            raise
        write_all(descriptor, view[start:stop], offset + start)
    write_all(descriptor, view[stop:], offset + stop)
