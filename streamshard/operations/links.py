"""Symbolic links in a source: followed where they stay in it."""

from pathlib import Path
from stat import S_ISREG

from streamshard.errors import CorruptFileError, SourceError


def require_inside(path: Path, *roots: Path) -> None:
    """Refuse a symbolic link that leads out of the directories that the user gave.

    Raises
    ------
    SourceError
        It does; the message says where to.
    """
    if not is_inside(path, *roots):
        message = (
            f"{path}: a symbolic link that leads out of {roots[0]}, to {_place(path)}: what is "
            "read has to lie in the checkpoint itself. Give the directory that the link leads to, "
            "or copy the checkpoint with 'cp -rL'"
        )
        raise SourceError(message)


def require_regular(path: Path, *roots: Path) -> None:
    """Refuse what is no file that can be read to its end, or leads out of the directories.

    Raises
    ------
    SourceError
        See `require_inside`.
    CorruptFileError
        It is a pipe, a device, or a link to nothing.
    OSError
        It cannot be looked at.
    """
    require_inside(path, *roots)
    if not S_ISREG(path.stat().st_mode):
        raise CorruptFileError(f"{path}: no regular file; move it away, or copy what it should be")


def is_inside(path: Path, *roots: Path) -> bool:
    """Tell whether an entry of a directory is no symbolic link that leads out of all of these."""
    place = _place(path) if path.is_symlink() else None
    return place is None or any(place.is_relative_to(root.resolve()) for root in roots)


def _place(path: Path) -> Path | None:
    """Follow symbolic links; None if they lead round in a ring, and so nowhere."""
    try:
        return path.resolve()
    except RuntimeError:
        return None
