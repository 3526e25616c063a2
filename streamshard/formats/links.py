"""Checks the symbolic links in a source: they are followed only if they stay inside it."""

from pathlib import Path

from streamshard.errors import CorruptFileError, SourceError
from streamshard.io.entries import examine, resolve


def require_inside(path: Path, *roots: Path) -> None:
    """Refuse a symbolic link that leads out of the directories that the user gave."""
    if not is_inside(path, *roots):
        message = (
            f"a symbolic link that leads out of {roots[0]}, to {resolve(path)}: what is "
            "read has to lie in the checkpoint itself. Give the directory that the link leads to, "
            "or copy the checkpoint with 'cp -rL'"
        )
        raise SourceError(message, path=path)


def require_regular(path: Path, *roots: Path) -> None:
    """Refuse a path that is not a regular file, or leads out of the directories."""
    require_inside(path, *roots)
    if not examine(path).is_file:
        raise CorruptFileError("not a regular file; move it away, or put a copy there", path=path)


def is_inside(path: Path, *roots: Path) -> bool:
    """Tell whether a path, with all its symbolic links followed, is in one of these directories.

    Links that form a cycle do not lead out.
    """
    resolved = resolve(path)
    return any(resolved.is_relative_to(resolve(root)) for root in roots)
