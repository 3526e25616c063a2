"""Symbolic links in a source: followed where they stay in it."""

from pathlib import Path

from streamshard.errors import SourceError


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
