"""Places that hold files: the disks of this machine, object stores, and packed stores.

A bucket has no directories, owners and links, and renames nothing: there these methods copy and
remove, or have nothing to do. All errors are OSError.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

from streamshard import registry
from streamshard.io.disk import Disk
from streamshard.io.lock import AnyLock
from streamshard.io.readable import Entry, OpenedFile, ReadAheadBytes, Status
from streamshard.io.sink import Sink
from streamshard.model import SourceFile


class Place(Protocol):
    """A place that files are read from and written to."""

    read_ahead: ReadAheadBytes
    """How far a worker reads ahead."""
    reading_bytes: int
    """Memory that a worker needs for what it has requested."""

    def examine(self, path: Path, *, follows: bool) -> Status:
        """Return the status of what is at a path, or of the link itself that is there."""

    def entries(self, directory: Path) -> Iterator[Entry]:
        """List a directory, perhaps page by page, in any order."""

    def resolve(self, path: Path) -> Path:
        """Return an absolute path without symbolic links, as far as it exists."""

    def open(self, path: Path, known: SourceFile | None = None) -> OpenedFile:
        """Open a file to read ranges of it.

        `known`: what was known of the file when the run was planned; a place that can ask for just
        that content need not examine it again.
        """

    def stream(self, path: Path) -> BinaryIO:
        """Open a file, or a pipe, to read it from its beginning."""

    def listed(self, root: Path) -> Mapping[Any, Mapping[str, Entry]]:
        """Return entries by directory and name, where listing all below a path takes one call."""

    def keep_listed(self, root: Path) -> None:
        """List all that is below a path at once, where that saves requests; see `listings_kept`."""

    def look_ahead(self, directory: Path, name: str) -> None:
        """List a directory, and read a small file that may be in it, where that saves time."""

    def is_listed(self, directory: Path) -> bool:
        """Tell whether it is sure to list a directory; a web server may not."""

    def has_file(self, path: Path) -> bool:
        """Tell whether there is a file of that very name, whatever lies below it."""

    def free_bytes(self, directory: Path) -> int:
        """Return the free space on the file system of a directory; a bucket has no end."""

    def allocated_bytes(self, root: Path) -> int:
        """Return the space that what is below a directory takes on its file system."""

    def requests_to_read(self, nbytes: int) -> int:
        """Return how many requests it takes to read so many consecutive bytes of a file."""

    def requests_to_write(self, nbytes: int) -> int:
        """Return how many requests it takes to write a file of this size."""

    def writing_bytes(self, largest_bytes: int) -> int:
        """Return the memory that a worker needs to write files of at most this size."""

    def open_sink(self, path: Path, *, is_new: bool, nbytes: int, is_last: bool) -> Sink:
        """Open a file of a target to write it; see `changes.open_sink`."""

    def open_written(self, path: Path) -> Sink:
        """Open a file of a target only to read back what is written."""

    def lock(self, path: Path, what: Path) -> AnyLock:
        """Return a lock, not taken yet, that is the file at a path."""

    def remove_dead_locks(self, paths: Iterable[Path]) -> None:
        """Remove locks that killed runs of this machine left, if they would be in the way."""

    def make_directory(self, path: Path, *, parents: bool, exist_ok: bool) -> None:
        """Make a directory; as `Path.mkdir`."""

    def write_new(self, path: Path, data: bytes) -> None:
        """Write a small file, with the directories that it lies in."""

    def write_durably(self, path: Path, data: bytes, temporary: Path) -> None:
        """Write a small file atomically; see `changes.write_durably`."""

    def rename(self, path: Path, target: Path) -> None:
        """Rename a file or a directory; an empty directory may be replaced."""

    def replace_file(self, path: Path, target: Path) -> None:
        """Rename a file; at any moment there is the old or the new one at the target."""

    def make_link(self, known: Path, path: Path) -> None:
        """Make a hard link to a known file; a symbolic link itself is linked to."""

    def link_or_copy(self, known: Path, path: Path) -> None:
        """Make a hard link to a known file; if that is impossible, a copy."""

    def remove_file(self, path: Path, *, missing_ok: bool) -> None:
        """Remove a file or a link."""

    def remove_files(self, paths: Iterable[Path]) -> None:
        """Remove files, side by side where each takes long; none may be missing on a disk."""

    def remove(self, path: Path) -> None:
        """Remove a directory with all that is in it, or a file; nothing may be there."""

    def abort_uploads(self, *roots: Path) -> str:
        """Abort uploads that killed runs left below paths; returns why that cannot be done."""

    def discard(self, directory: Path) -> None:
        """Remove what can be removed of a directory; errors are ignored."""

    def take_over_status(self, known: Path, path: Path) -> None:
        """Give a directory owner, mode, times and access list of another one."""

    def may_change(self, directory: Path) -> bool:
        """Tell whether this process may make and remove entries of a directory."""

    def foreign_owner(self, path: Path) -> int | None:
        """Return the user that a path belongs to; None if this process may act as that user."""

    def sync_path(self, path: Path) -> None:
        """Make a file's content, or the names in a directory, durable."""

    def sync_tree(self, root: Path) -> None:
        """Make all files in a directory tree durable, with their names."""


_kept: Final[ContextVar[dict[type, Any] | None]] = ContextVar("kept", default=None)


@contextmanager
def listings_kept(*, anew: bool = False) -> Iterator[None]:
    """Let places keep listings, small files and headers while a checkpoint is opened.

    `anew`: whether what was kept before this may not be used.
    """
    if _kept.get() is not None and not anew:
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


_DISK: Final = Disk()


def place_of(path: Path) -> Place:
    """Return the place that a path belongs to."""
    name = getattr(path, "place", None)
    if name is None:
        return _DISK
    found: Place = registry.load(name)
    return found
