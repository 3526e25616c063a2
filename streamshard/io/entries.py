"""What lies at a path and in a directory: its kind, size and identity, and what is listed there.

Local directories and object stores are a `Place` each.
"""

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO, Final

from streamshard.errors import CorruptFileError
from streamshard.io.object_path import is_object
from streamshard.io.place import listings_kept as listings_kept
from streamshard.io.place import place_of
from streamshard.io.readable import Entry, OpenedFile, ReadAheadBytes, Status
from streamshard.model import SourceFile

_DOCUMENT_BYTES: Final = 16 << 20
"""More bytes than a config, a file of rules, or a note of a run's has."""
_ABSENT: Final = {errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP}
"""Errors which say that a path leads to nothing."""


def ahead_of(paths: Iterable[Path]) -> ReadAheadBytes:
    """Return how far a worker reads ahead in files: as far as where it takes longest."""
    places = {place_of(path) for path in paths} or {place_of(Path())}
    return max((place.read_ahead for place in places), key=lambda one: one.ahead)


def request_bytes(paths: Iterable[Path]) -> int:
    """Return the memory that a worker needs for what it has requested: of local files none."""
    return max((place.reading_bytes for place in {place_of(path) for path in paths}), default=0)


def list_ahead(root: Path) -> None:
    place_of(root).keep_listed(root)


def examine(path: Path, *, follows: bool = True) -> Status:
    """Return the status of what is at a path."""
    return place_of(path).examine(path, follows=follows)


def identify(path: Path) -> SourceFile:
    return examine(path).source_file(path)


def examine_if_there(path: Path, *, follows: bool = True) -> Status | None:
    try:
        return examine(path, follows=follows)
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
    except ValueError:  # no path that the system could have
        pass
    return None


def exists(path: Path) -> bool:
    return examine_if_there(path) is not None


def has_file(path: Path) -> bool:
    return place_of(path).has_file(path)


def lexists(path: Path) -> bool:
    """Tell whether there is anything at a path, even a link that leads to nothing."""
    return examine_if_there(path, follows=False) is not None


def is_file(path: Path) -> bool:
    """Tell whether a path leads to a regular file."""
    found = examine_if_there(path)
    return found is not None and found.is_file


def is_directory(path: Path) -> bool:
    """Tell whether a path leads to a directory."""
    found = examine_if_there(path)
    return found is not None and found.is_directory


def is_link(path: Path) -> bool:
    found = examine_if_there(path, follows=False)
    return found is not None and found.is_link


def is_real_directory(path: Path) -> bool:
    """Tell whether there is a directory at a path, and no link to one."""
    found = examine_if_there(path, follows=False)
    return found is not None and found.is_directory


def is_same_file(path: Path, other: Path) -> bool:
    if is_object(path) or is_object(other):
        return path == other
    one, two = examine(path), examine(other)
    return (one.device, one.file_id) == (two.device, two.file_id)


def resolve(path: Path) -> Path:
    return place_of(path).resolve(path)


def link_target(path: Path) -> str:
    """Return what a symbolic link holds, for messages."""
    return os.readlink(path)  # noqa: PTH115


def entries(directory: Path) -> Iterator[Entry]:
    return place_of(directory).entries(directory)


def paths_in(directory: Path) -> Iterator[Path]:
    return (entry.path for entry in entries(directory))


def names_in(directory: Path) -> list[str]:
    """List the names in a directory, in no order."""
    return [entry.name for entry in entries(directory)]


def entries_below(
    root: Path,
    *,
    enters: Callable[[Entry], bool] = lambda entry: True,
    skips: Callable[[OSError], bool] = lambda error: False,
) -> Iterator[Entry]:
    """List all entries below a directory; a directory comes before its content.

    `enters`: tells whether a directory's content is listed too.
    `skips`: tells whether a directory that cannot be read is passed over.
    """
    listed = place_of(root).listed(root)
    pending = [root]
    while pending:
        directory = pending.pop()
        try:
            children = [*listed.get(directory, {}).values()] or list(entries(directory))
        except OSError as error:
            if not skips(error):
                raise
            continue
        yield from children
        pending += [one.path for one in reversed(children) if one.is_directory and enters(one)]


def is_listed(directory: Path) -> bool:
    return place_of(directory).is_listed(directory)


def listed_below(root: Path) -> list[Entry]:
    """List all entries below a directory as they are now, objects with their status."""
    with listings_kept(fresh=True):
        list_ahead(root)
        return list(entries_below(root))


def is_denied(error: OSError) -> bool:
    return isinstance(error, PermissionError)


def paths_below(root: Path) -> Iterator[Path]:
    return (entry.path for entry in entries_below(root))


def files_below(root: Path) -> list[Path]:
    """List all paths below a directory that are no directories; links are not followed."""
    return [entry.path for entry in entries_below(root) if not entry.is_directory]


def paths_like(directory: Path, pattern: str) -> list[Path]:
    """List the paths in a directory whose names match a pattern; none if it cannot be listed."""
    try:
        found = list(paths_in(directory)) if is_directory(directory) else []
    except PermissionError:
        return []
    return [path for path in found if fnmatchcase(path.name, pattern)]


def open_readable(path: Path, identity: SourceFile | None = None) -> OpenedFile:
    return place_of(path).open(path, identity)


def stream_of(path: Path) -> BinaryIO:
    return place_of(path).stream(path)


def read_all(path: Path, limit: int = -1) -> bytes:
    with stream_of(path) as stream:
        return stream.read(limit)


def read_document(path: Path, most: int = _DOCUMENT_BYTES) -> bytes:
    """Read a small file; one of more bytes than `most` is a `CorruptFileError`."""
    data = read_all(path, most + 1)
    if len(data) > most:
        raise CorruptFileError(f"more than {most:,} bytes, which no such file has", path=path)
    return data
