"""Makes, renames and removes files and directories, in whatever `Place` they are.

Small local files are made by the thousand without a `Path` of each, which takes a third more
processor time in all.
"""

import os
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from streamshard.io.lock import NO_LOCK, AnyLock
from streamshard.io.place import place_of
from streamshard.io.retry import try_again
from streamshard.io.sink import Sink
from streamshard.io.writable import create, write_all


def open_sink(path: Path, *, nbytes: int, is_last: bool = False) -> Sink:
    """Open a new file of a target to write it; a local one must not exist yet.

    `is_last`: whether nobody else may have written an object of that name meanwhile.
    """
    return place_of(path).open_sink(path, nbytes=nbytes, is_last=is_last)


def lock_at(path: Path, what: Path) -> AnyLock:
    """Return a lock, not taken yet, that is the file or the object at a path."""
    return AnyLock() if os.environ.get(NO_LOCK) == "1" else place_of(path).lock(path, what)


def make_directory(path: Path, *, parents: bool = False, exist_ok: bool = False) -> None:
    place_of(path).make_directory(path, parents=parents, exist_ok=exist_ok)


def write_new(path: Path, data: bytes) -> None:
    place_of(path).write_new(path, data)


def write_durably(path: Path, data: bytes, temporary: Path) -> None:
    """Write a small file atomically: at any moment it has its old content or all of the new.

    `temporary`: path in the same directory for the new content until it is on disk; not for an
    object.
    """
    place_of(path).write_durably(path, data, temporary)


def rename(path: Path, target: Path) -> None:
    place_of(path).rename(path, target)


def link_or_copy(original: Path, path: Path) -> None:
    place_of(path).link_or_copy(original, path)


def remove_file(path: Path, *, missing_ok: bool = False) -> None:
    place_of(path).remove_file(path, missing_ok=missing_ok)


def remove(path: Path) -> None:
    place_of(path).remove(path)


def discard(directory: Path) -> None:
    """Remove what can be removed of a directory, errors ignored; or a file."""
    place_of(directory).discard(directory)


def sync_path(path: Path) -> None:
    place_of(path).sync_path(path)


def sync_tree(root: Path) -> None:
    place_of(root).sync_tree(root)


@contextmanager
def stub_directory(names: Iterable[str]) -> Iterator[Path]:
    """Make empty files of these relative paths in a temporary directory of this process."""
    with tempfile.TemporaryDirectory(prefix="streamshard-") as made:
        root = Path(made)
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
        yield root


@contextmanager
def linked_directory(links: Mapping[str, Path]) -> Iterator[Path]:
    """Make links to files under other names in a temporary directory of this process."""
    with tempfile.TemporaryDirectory(prefix="streamshard-") as made:
        root = Path(made)
        for name, path in links.items():
            (root / name).symlink_to(path)
        yield root


def write_small(
    root: Path, stop: threading.Event, path: str, parts: Sequence[bytes | memoryview]
) -> None:
    """Make a file of parts below a directory, and the directories that it lies in.

    `stop`: if set, failed writes are not retried.
    """
    full = f"{root}/{path}"
    os.makedirs(full.rpartition("/")[0], exist_ok=True)  # noqa: PTH103
    descriptor = create(full, os.O_WRONLY)

    def write() -> None:
        count = os.pwritev(descriptor, parts, 0)
        if count < sum(map(len, parts)):
            write_all(descriptor, memoryview(b"".join(parts))[count:], count)

    try:
        try_again(write, stop)
    except OSError as error:
        raise OSError(error.errno, error.strerror, full) from error
    finally:
        os.close(descriptor)
