"""System errors that name the file; sources that changed, or that lead out of what was given."""

import errno
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from streamshard.errors import (
    CorruptFileError,
    NoSpaceError,
    NotPermittedError,
    SourceError,
    TargetError,
)
from streamshard.io.entries import examine, list_ahead, listings_kept, resolve
from streamshard.io.object_path import as_path, is_object
from streamshard.io.readable import Status
from streamshard.model import Computed, SourceFile


def require_unchanged(source: SourceFile) -> None:
    """Refuse a source file that has changed since the plan was made."""
    try:
        status = examine(source.path)
    except OSError as error:
        raise SourceError(f"gone during the run ({error.strerror})", path=source.path) from error
    require_same(source, status)


def require_all_unchanged(files: Sequence[SourceFile]) -> None:
    with listings_kept(fresh=True):
        for checkpoint_files in _by_checkpoint(files):
            root = _common_directory(checkpoint_files)
            if root is not None:
                with source_errors(root):
                    list_ahead(root)
            for file in checkpoint_files:
                require_unchanged(file)


def _by_checkpoint(files: Sequence[SourceFile]) -> Iterator[Sequence[SourceFile]]:
    """Yield the files of each checkpoint, which have a directory in common, and then the rest."""
    decoders = enumerate(file.decoder for file in files)
    first, firsts = next(((n, d.firsts) for n, d in decoders if isinstance(d, Computed)), (0, (0,)))
    for start, stop in pairwise([*firsts, first or len(files), len(files)]):
        yield files[start:stop]


def _common_directory(files: Sequence[SourceFile]) -> Path | None:
    root = files[0].path.parent if files else None
    for file in files:
        while root is not None and not str(file.path).startswith(str(root).rstrip("/") + "/"):
            root = root.parent if root != root.parent else None
    return root


def require_same(source: SourceFile, status: Status) -> None:
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
        raise unreadable(error, path) from error


def unreadable(error: OSError, path: Path) -> SourceError:
    """Return the error of a source that the system does not let this process read.

    If a directory may not be entered, it names that, as nobody can tell what is in it.
    """
    named, message = as_path(error.filename or path), f"cannot be read ({error.strerror})"
    if error.errno != errno.EACCES or is_object(named):
        return SourceError(message, path=named)
    while path in named.parents and not os.path.lexists(named):
        named = named.parent
    advice = f"its owner can let others read it: chmod -R +rX {shlex.quote(str(named))}"
    return NotPermittedError(f"{message}; {advice}", path=named)


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


def require_inside(path: Path, *roots: Path) -> None:
    if not stays_inside(path, *roots):
        message = (
            f"a symbolic link that leads out of {roots[0]}, to {resolve(path)}: what is "
            "read has to lie in the checkpoint itself. Give the directory that the link leads to, "
            "or copy the checkpoint with 'cp -rL'"
        )
        raise SourceError(message, path=path)


def require_regular(path: Path, *roots: Path) -> None:
    require_inside(path, *roots)
    if not examine(path).is_file:
        raise CorruptFileError("not a regular file; move it away, or put a copy there", path=path)


def stays_inside(path: Path, *roots: Path) -> bool:
    """Tell whether a path, with all its symbolic links followed, is in one of these directories.

    Links that form a cycle do not lead out.
    """
    resolved = resolve(path)
    return any(resolved.is_relative_to(resolve(root)) for root in roots)
