"""Looks at thousands of files below a directory by their relative paths, without a `Path` of each.

To make the paths would take longer than to ask the system.
"""

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from streamshard.io.entries import entries_below, examine
from streamshard.io.place import place_of
from streamshard.io.readable import Status


def _is_on_disk(root: Path) -> bool:
    """Tell whether files lie on a disk of this machine, where symbolic links may be."""
    return place_of(root) is place_of(Path())


def examiner(root: Path) -> Callable[[str], Status]:
    """Return what examines files below a directory; symbolic links are not followed."""
    if not _is_on_disk(root):
        return lambda path: examine(root / path, follows=False)
    start = f"{root}/"
    return lambda path: Status.of(os.lstat(start + path))


def inside_test(root: Path) -> Callable[[str], bool]:
    """Return what tells whether a directory below another lies in it, links followed.

    Then as many steps up as its path has names end in the other one. Where links lead to another
    depth of it, the answer is no, although they stay inside.
    """
    if not _is_on_disk(root):
        return lambda path: True
    start, top = f"{root}/", cache(root.stat)

    def leads_inside(path: str) -> bool:
        above = os.stat(f"{start}{path}{'/..' * (path.count('/') + 1)}")  # noqa: PTH116
        return os.path.samestat(above, top())

    return leads_inside


def names_below(
    root: Path, *, skips: Callable[[OSError], bool] = lambda error: False
) -> Iterator[str]:
    """List the relative paths of all entries below a directory that are no directories.

    `skips`: tells whether a directory that cannot be read is passed over.
    """
    if not _is_on_disk(root):
        below = (entry for entry in entries_below(root, skips=skips) if not entry.is_directory)
        yield from (entry.path.relative_to(root).as_posix() for entry in below)
        return
    pending = [""]
    while pending:
        directory = pending.pop()
        try:
            with os.scandir(f"{root}/{directory}") as found:
                for one in found:
                    name = f"{directory}{one.name}"
                    if one.is_dir(follow_symlinks=False):
                        pending.append(f"{name}/")
                    else:
                        yield name
        except OSError as error:
            if not skips(error):
                raise
