"""Finds the run directories that a pattern such as `runs/*` names, and a place for each archive."""

import os
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from streamshard.errors import SourceNotFoundError, UsageError
from streamshard.io.entries import is_directory, is_real_directory, lexists, paths_in
from streamshard.io.files import source_errors
from streamshard.io.object_path import as_path, is_object

_WILD: Final = re.compile(r"[*?[]")


def runs_like(pattern: str, archive_dir: str) -> list[tuple[Path, Path]] | None:
    """List the run directories that a pattern matches, each with its archives' directory.

    That one has the same path below `archive_dir` as the run directory below the part of the
    pattern that has no wildcards. Links, and names that begin with a dot, are no run directories.
    Returns None for the path of a single run directory.
    """
    if _WILD.search(pattern) is None:
        return None
    if is_object(as_path(pattern)):
        raise UsageError(f"{pattern}: patterns match directories on a disk only")
    if lexists(Path(pattern)):
        return None
    parts = Path(pattern).parts
    first = next(number for number, part in enumerate(parts) if _WILD.search(part))
    if any(part in ("**", "..") for part in parts[first:]):
        raise UsageError(
            f"{pattern}: '**' and '..' may give one run twice; use a '*' for each level"
        )
    root = Path(*parts[:first])
    found = [root]
    for part in parts[first:]:
        with source_errors(root):
            found = [path for directory in found for path in _matching(directory, part)]
    if not found:
        raise SourceNotFoundError(f"{pattern}: matches no directory")
    return [(run, as_path(archive_dir) / os.path.relpath(run, root)) for run in sorted(found)]


def _matching(directory: Path, pattern: str) -> list[Path]:
    if not is_directory(directory):
        return []
    return [
        path
        for path in paths_in(directory)
        if fnmatchcase(path.name, pattern) and path.name[0] != "." and is_real_directory(path)
    ]
