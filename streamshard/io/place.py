"""Places that hold files: the disks of this machine, object stores, and packed stores.

A bucket has no directories, owners and links: there these methods copy, or have nothing to do. All
errors are OSError.
"""

import errno
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

from streamshard import registry
from streamshard.io.durability import sync_path, sync_tree
from streamshard.io.lock import AnyLock, Lock
from streamshard.io.readable import (
    Entry,
    OpenedFile,
    ReadableFile,
    ReadAheadBytes,
    Status,
    open_to_read,
    walk,
)
from streamshard.io.sink import LocalSink, Sink, open_target
from streamshard.io.writable import LEAST_BYTES, open_direct, write_file
from streamshard.model import SourceFile


class Place(Protocol):
    """A place that files are read from and written to.

    What has a result here, or is not done, is so where a place has nothing of the kind.
    """

    read_ahead: ReadAheadBytes
    """How far a worker reads ahead."""
    reading_bytes: int = 0
    """Memory that a worker needs for what it has requested."""

    def examine(self, path: Path, *, follows: bool) -> Status:
        """Return the status of what is at a path, or of the link itself that is there."""

    def entries(self, directory: Path) -> Iterator[Entry]:
        """List a directory, perhaps page by page, in any order."""

    def resolve(self, path: Path) -> Path:
        """Return an absolute path without symbolic links, as far as it exists."""

    def open(self, path: Path, identity: SourceFile | None = None) -> OpenedFile:
        """Open a file to read ranges of it.

        `identity`: what was known of the file when the run was planned; a place that can ask for
        just that content need not examine it again.
        """

    def stream(self, path: Path) -> BinaryIO:
        """Open a file to read it from its beginning."""

    def listed(self, root: Path) -> Mapping[Any, Mapping[str, Entry]]:
        """Return entries by directory and name, where listing all below a path takes one call."""
        return {}

    def keep_listed(self, root: Path) -> None:
        """List all that is below a path at once, where that saves requests; see `listings_kept`."""
        return

    def look_ahead(self, directory: Path, name: str) -> None:
        """List a directory, and read a small file that may be in it, where that saves time."""
        return

    def is_listed(self, directory: Path) -> bool:
        """Tell whether it is sure to list a directory; a web server may not."""
        return True

    def has_file(self, path: Path) -> bool:
        """Tell whether there is a file of that very name, whatever lies below it."""

    def free_bytes(self, directory: Path) -> int:
        """Return the free space on the file system of a directory; a bucket has no end."""

    def allocated_bytes(self, root: Path) -> int:
        """Return the space that what is below a directory takes on its file system."""
        return 0

    def writing_bytes(self, largest_bytes: int) -> int:
        """Return the memory that a worker needs to write files of at most this size."""
        return 0

    def open_sink(self, path: Path, *, nbytes: int, is_last: bool) -> Sink:
        """Open a file of a target to write it; see `changes.open_sink`."""

    def lock(self, path: Path, what: Path) -> AnyLock:
        """Return a lock, not taken yet, that is the file at a path."""

    def remove_dead_locks(self, paths: Iterable[Path]) -> None:
        """Remove locks that killed runs of this machine left, if they would be in the way."""
        return

    def make_directory(self, path: Path, *, parents: bool, exist_ok: bool) -> None:
        return

    def write_new(self, path: Path, data: bytes) -> None:
        """Write a small file, with the directories that it lies in."""

    def write_durably(self, path: Path, data: bytes, temporary: Path) -> None:
        self.write_new(path, data)

    def rename(self, path: Path, target: Path) -> None:
        """Rename a file, which may replace one, or a directory, which may replace an empty one.

        At any moment the old or the new one is at the target. In a bucket nothing is renamed.
        """

    def make_link(self, original: Path, path: Path) -> None:
        """Make a hard link to a file; a symbolic link itself is linked to."""

    def link_or_copy(self, original: Path, path: Path) -> None:
        """Make a hard link to a file; if that is impossible, a copy."""
        self.make_link(original, path)

    def remove_file(self, path: Path, *, missing_ok: bool) -> None:
        """Remove a file or a link."""

    def remove_files(self, paths: Iterable[Path]) -> None:
        """Remove files, side by side where each takes long; none may be missing on a disk."""

    def remove(self, path: Path) -> None:
        """Remove a directory with all that is in it, or a file; nothing may be there."""

    def abort_uploads(self, *roots: Path) -> str:
        """Abort uploads that killed runs left below paths; returns why that cannot be done."""
        return ""

    def discard(self, directory: Path) -> None:
        """Remove what can be removed of a directory; errors are ignored."""

    def take_over_status(self, original: Path, path: Path) -> None:
        """Give a directory owner, mode, times and access list of another one."""
        return

    def may_change(self, directory: Path) -> bool:
        """Tell whether this process may make and remove entries of a directory."""
        return True

    def foreign_owner(self, path: Path) -> int | None:
        """Return the user that a path belongs to; None if this process may act as that user."""
        return None

    def sync_path(self, path: Path) -> None:
        """Make a file's content, or the names in a directory, durable."""
        return

    def sync_tree(self, root: Path) -> None:
        """Make all files in a directory tree durable, with their names."""
        return


_kept: Final[ContextVar[dict[type, Any] | None]] = ContextVar("kept", default=None)


@contextmanager
def listings_kept(*, fresh: bool = False) -> Iterator[None]:
    """Let places keep listings, small files and headers while a checkpoint is opened.

    `fresh`: whether what was kept before this may not be used.
    """
    if _kept.get() is not None and not fresh:
        yield
        return
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def kept() -> dict[type, Any] | None:
    """Return what places keep at present, by its type; None if they may keep nothing."""
    return _kept.get()


_BLOCK_BYTES: Final = 512
"""The unit of st_blocks in stat(2), whatever the block size of the file system."""
_NOT_RENAMED: Final = (
    "it cannot be renamed: it is in a lower layer of an overlay, or on another file system. Move "
    "it away with mv, or give another place"
)


class Disk(Place):
    read_ahead = ReadAheadBytes(4 << 20, 1 << 20, 1 << 14)
    """Several windows, so that the disk never waits for a worker; at most what a disk takes at
    once; and what is smaller arrives with its neighbours' pages."""

    def examine(self, path: Path, *, follows: bool) -> Status:
        return Status.of(os.stat(path, follow_symlinks=follows))  # noqa: PTH116

    def entries(self, directory: Path) -> Iterator[Entry]:
        with os.scandir(directory) as found:
            for one in found:
                is_directory = one.is_dir(follow_symlinks=False)
                yield Entry(directory / one.name, is_directory, one.is_symlink())

    def resolve(self, path: Path) -> Path:
        return Path(os.path.realpath(path))

    def open(self, path: Path, identity: SourceFile | None = None) -> ReadableFile:
        return ReadableFile(open_to_read(path))

    def stream(self, path: Path) -> BinaryIO:
        return os.fdopen(open_to_read(path), "rb")

    def has_file(self, path: Path) -> bool:
        return path.is_file()

    def free_bytes(self, directory: Path) -> int:
        return shutil.disk_usage(directory).free

    def allocated_bytes(self, root: Path) -> int:
        if not os.path.lexists(root):
            return 0
        return sum(path.lstat().st_blocks * _BLOCK_BYTES for path in walk(root))

    def open_sink(self, path: Path, *, nbytes: int, is_last: bool) -> LocalSink:
        descriptor = open_target(path)
        return LocalSink(descriptor, open_direct(path, descriptor) if nbytes >= LEAST_BYTES else -1)

    def lock(self, path: Path, what: Path) -> Lock:
        return Lock(path, what)

    def make_directory(self, path: Path, *, parents: bool, exist_ok: bool) -> None:
        path.mkdir(parents=parents, exist_ok=exist_ok)

    def write_new(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, data)

    def write_durably(self, path: Path, data: bytes, temporary: Path) -> None:
        write_file(temporary, data)
        sync_path(temporary)
        temporary.replace(path)
        sync_path(path.parent)

    def rename(self, path: Path, target: Path) -> None:
        try:
            path.rename(target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            raise OSError(error.errno, _NOT_RENAMED, str(path)) from error

    def make_link(self, original: Path, path: Path) -> None:
        os.link(original, path, follow_symlinks=False)

    def link_or_copy(self, original: Path, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.make_link(original, path)
        except FileExistsError:
            raise
        except OSError:
            new = os.fdopen(open_target(path), "wb")
            with self.stream(original) as given, new as copy:
                shutil.copyfileobj(given, copy)

    def remove_file(self, path: Path, *, missing_ok: bool) -> None:
        path.unlink(missing_ok=missing_ok)

    def remove_files(self, paths: Iterable[Path]) -> None:
        for path in paths:
            path.unlink()

    def remove(self, path: Path) -> None:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            # rmtree may name a path relative to a directory that it does not name.
            raise OSError(error.errno, error.strerror, str(path)) from error

    def discard(self, directory: Path) -> None:
        if directory.is_dir():
            shutil.rmtree(directory, ignore_errors=True)
        else:
            directory.unlink(missing_ok=True)

    def take_over_status(self, original: Path, path: Path) -> None:
        wanted, own = original.stat(), path.stat()
        if (wanted.st_uid, wanted.st_gid) != (own.st_uid, own.st_gid):
            os.chown(path, wanted.st_uid, wanted.st_gid)
        shutil.copystat(original, path)

    def may_change(self, directory: Path) -> bool:
        return os.access(directory, os.W_OK | os.X_OK)

    def foreign_owner(self, path: Path) -> int | None:
        owner = path.stat().st_uid
        return None if os.geteuid() in (0, owner) else owner

    def sync_path(self, path: Path) -> None:
        sync_path(path)

    def sync_tree(self, root: Path) -> None:
        sync_tree(root)


_DISK: Final = Disk()


def place_of(path: Path) -> Place:
    name = getattr(path, "place", None)
    if name is None:
        return _DISK
    found: Place = registry.load(name)
    return found
