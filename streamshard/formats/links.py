"""Symbolic links in a source: followed where they stay in it."""

import os
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
            f"{path}: a symbolic link that leads out of {roots[0]}, to {place_of(path)}: what is "
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
    """Tell whether no symbolic link, wherever in a path, leads out of all of these directories.

    A link that leads round in a ring, and so nowhere, leads out of none.
    """
    place = place_of(path)
    return any(place.is_relative_to(place_of(root)) for root in roots)


def place_of(path: Path) -> Path:
    """Follow all symbolic links in a path as far as they lead."""
    return Path(os.path.realpath(path))
