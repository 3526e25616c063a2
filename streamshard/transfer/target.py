"""The paths at which a target is made, and the space for it."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from streamshard.engine.journals.journal import Journal
from streamshard.errors import NoSpaceError, UsageError
from streamshard.formats.deepspeed import names
from streamshard.io.entries import (
    exists,
    is_directory,
    is_link,
    is_real_directory,
    lexists,
    paths_in,
    resolve,
)
from streamshard.io.files import target_errors
from streamshard.io.object_path import ObjectPath, as_path, is_object
from streamshard.io.place import place_of
from streamshard.source.unfinished import JOURNAL

LOCK: Final = f"{names.OWN_PREFIX}.lock"


def partial_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.partial")


def replaced_of(target: Path) -> Path:
    """Return the path that holds the old target until the new one is in place."""
    return target.with_name(f"{target.name}.replaced")


def place_to_make(target: Path) -> Path:
    """Return the path of a target: if it is a link to a free directory, that directory's path.

    The target is built next to the directory and takes its place, and the link stays. This holds
    too for a target that a run had completed when it was killed, but whose journal is still there.
    """
    with target_errors(target):
        if not is_object(target) and is_link(target) and is_directory(target):
            directory = resolve(target)
            if is_vacant(directory) or Journal(directory / JOURNAL).is_whole:
                return directory
    return target


def require_separate(source: Path, target: Path, directories: Iterable[Path] = ()) -> None:
    """Refuse a target that lies in its own source, or the other way round.

    `directories`: where else the source's files lie.
    """
    here = {resolve(path) for path in (source, *directories)}
    for path in (target, partial_of(target), replaced_of(target)):
        there = resolve(path)
        if any(h == there or h in there.parents or there in h.parents for h in here):
            message = f"{target}: lies in or around the source {source}"
            if path != target:
                message = f"{path}: is needed to make {target}, and holds the source"
            raise UsageError(f"{message}; choose another place")


def require_other(source: str | os.PathLike[str], target: Path) -> None:
    if resolve(target) == resolve(as_path(source)):
        raise UsageError(f"{target}: is the source itself; choose another place")


def require_named(target: Path) -> None:
    if target.name in ("", "..") or (isinstance(target, ObjectPath) and not target.key):
        raise UsageError(f"{target}: is not a name for a new directory; write it out")


def is_vacant(path: Path) -> bool:
    """Tell whether a directory can be renamed to a path: it is free, or an empty directory."""
    if not is_real_directory(path):
        return not lexists(path)
    return next(paths_in(path), None) is None


def is_there(path: Path) -> bool:
    """Tell whether a path exists, as `lexists`, for callers that do not catch OSError."""
    with target_errors(path):
        return lexists(path)


def require_space(target: Path, nbytes: int) -> None:
    """Refuse a run whose output does not fit on the target's file system.

    Space that an earlier run's partial target takes counts as free: it is kept or removed first.
    """
    with target_errors(target):
        place = place_of(target)
        free = place.free_bytes(nearest_directory(target))
        free += place.allocated_bytes(partial_of(target))
    if nbytes > free:
        message = f"{target}: does not fit: it needs {nbytes:,} bytes, {free:,} are free there"
        raise NoSpaceError(f"{message}. Nothing was written; free some, or choose another place")


def nearest_directory(target: Path) -> Path:
    directory = target.absolute().parent
    while not is_object(directory) and not exists(directory):
        directory = directory.parent
    return directory
