"""Turns system errors into errors that name the file; refuses sources that have changed."""

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from streamshard.errors import CorruptFileError, NoSpaceError, SourceError, TargetError
from streamshard.io.entries import examine, list_ahead, listings_kept
from streamshard.io.object_path import as_path
from streamshard.io.readable import Status
from streamshard.model import SourceFile


def require_unchanged(source: SourceFile) -> None:
    """Refuse a source file that has changed since the plan was made."""
    try:
        status = examine(source.path)
    except OSError as error:
        raise SourceError(f"gone during the run ({error.strerror})", path=source.path) from error
    require_same(source, status)


def require_all_unchanged(files: Sequence[SourceFile]) -> None:
    """Refuse source files of which one has changed; see `require_unchanged`."""
    with listings_kept(anew=True):
        if files:
            root = files[0].path.parent
            for file in files:
                while not str(file.path).startswith(str(root).rstrip("/") + "/"):
                    root = root.parent
            with source_errors(root):
                list_ahead(root)
        for file in files:
            require_unchanged(file)


def require_same(source: SourceFile, status: Status) -> None:
    """Refuse a file whose size or version is not that of the plan; see `require_unchanged`."""
    if (status.nbytes, status.version) != (source.nbytes, source.version):
        message = (
            f"changed while it was being read ({source.nbytes} bytes when the run "
            f"began, {status.nbytes} now). Is the job still saving? Run again when it has finished"
        )
        raise CorruptFileError(message, path=source.path)


@contextmanager
def source_errors(path: Path) -> Iterator[None]:
    """Turn system errors while reading a source into an error that names the file."""
    try:
        yield
    except OSError as error:
        named = as_path(error.filename or path)
        raise SourceError(f"cannot be read ({error.strerror})", path=named) from error


@contextmanager
def target_errors(path: Path) -> Iterator[None]:
    """Turn system errors while writing a target into an error that names the file."""
    try:
        yield
    except OSError as error:
        named = as_path(error.filename or path)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"no space left on the target's file system ({error.strerror}); free some and"
            raise NoSpaceError(f"{message} run the same command again", path=named) from error
        raise TargetError(f"cannot be written ({error.strerror})", path=named) from error
