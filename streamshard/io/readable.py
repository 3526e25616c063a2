"""Files and directories that are read, whatever holds them; files are opened for reading only.

Not even the access time of a local file changes, where the system allows.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from stat import S_ISBLK, S_ISCHR, S_ISDIR, S_ISFIFO, S_ISLNK, S_ISREG, S_ISSOCK
from typing import Final, NamedTuple, Protocol, Self

from streamshard.io.retry import UNSUPPORTED, close_unwritten, ignored
from streamshard.model import Decoder, SourceFile

_QUIET: Final = getattr(os, "O_NOATIME", 0)
"""Flag of open(2) that keeps the access time; allowed only for the owner of a file."""
_KINDS: Final = {
    S_ISLNK: "a symbolic link",
    S_ISDIR: "a directory",
    S_ISFIFO: "a pipe (FIFO)",
    S_ISSOCK: "a socket",
    S_ISCHR: "a device",
    S_ISBLK: "a device",
}


class Status(NamedTuple):
    """What a place tells of a file or a directory without opening it."""

    mode: int
    """Kind and permission bits, as in stat(2)."""
    nbytes: int
    modified_ns: int
    version: str
    """Changes whenever the content does: the time of change of a local file, or an etag."""
    file_id: int
    """Inode; 0 where the place has no such number."""
    device: int
    links: int
    changed_ns: int = 0
    """When content, mode, owner or links changed, which no program can set; 0 where unknown."""

    @property
    def is_file(self) -> bool:
        return S_ISREG(self.mode)

    @property
    def is_directory(self) -> bool:
        return S_ISDIR(self.mode)

    @property
    def is_link(self) -> bool:
        return S_ISLNK(self.mode)

    @property
    def permissions(self) -> int:
        return self.mode & 0o777

    def source_file(self, path: Path, decoder: Decoder | None = None) -> SourceFile:
        identity = self.version, str(self.file_id)
        return SourceFile(path, self.nbytes, *identity, decoder, self.changed_ns)

    @classmethod
    def of(cls, stat: os.stat_result) -> "Status":
        changed = stat.st_mtime_ns
        ids = stat.st_ino, stat.st_dev, stat.st_nlink
        return cls(stat.st_mode, stat.st_size, changed, str(changed), *ids, stat.st_ctime_ns)


class Readable(Protocol):
    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    takes_requests: bool
    """Whether each reading takes a request to a service, which takes long."""

    def read_at(self, offset: int, count: int) -> bytes:
        """Read bytes from an offset; fewer than requested only at the end of the file."""

    def prepare(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Get small ranges (start, stop) that are read next, side by side where each takes long."""
        return


class OpenedFile(Readable, Protocol):
    """A file that is open for reading; a context manager, too."""

    descriptor: int
    """Descriptor, for the page cache and for memory maps; -1 if the file is not local."""
    origin: int
    """Byte offset in what the descriptor is of, where the file begins."""

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill a view from an offset; returns the bytes read, fewer only at the file's end."""

    def will_need(self, offset: int, nbytes: int) -> None:
        """Start reading a range that is needed soon, without waiting."""

    def status(self) -> Status:
        """Return the present status of the file that is open."""

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ReadableFile(OpenedFile):
    origin = 0
    takes_requests = False

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @cached_property
    def nbytes(self) -> int:
        return os.fstat(self.descriptor).st_size

    def read_at(self, offset: int, count: int) -> bytes:
        data = bytearray(max(0, min(count, self.nbytes - offset)))
        done = self.read_into(memoryview(data), offset)
        return bytes(data[:done])

    def read_into(self, view: memoryview, offset: int) -> int:
        return read_into(self.descriptor, view, offset)

    def will_need(self, offset: int, nbytes: int) -> None:
        """Start reading a range into the page cache, without waiting; a hint, where supported."""
        if hasattr(os, "posix_fadvise"):
            with ignored(UNSUPPORTED):
                os.posix_fadvise(self.descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def status(self) -> Status:
        return Status.of(os.fstat(self.descriptor))

    def close(self) -> None:
        close_unwritten(self.descriptor)


def absent(path: Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def open_to_read(path: Path) -> int:
    """Open a regular local file for reading; returns its descriptor.

    A pipe would be waited for until someone writes to it; a device may have no end.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags | _QUIET)
    except PermissionError:
        descriptor = os.open(path, flags)
    mode = os.fstat(descriptor).st_mode
    if S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    number = errno.EISDIR if S_ISDIR(mode) else errno.EINVAL
    raise OSError(number, f"it is {kind_of(mode)}; put a regular file there", str(path))


def kind_of(mode: int) -> str:
    """Name what is no regular file."""
    return next((text for is_kind, text in _KINDS.items() if is_kind(mode)), "no file")


def read_into(descriptor: int, view: memoryview, offset: int) -> int:
    """Fill a view from a byte offset of a local file; returns the bytes read, as `OpenedFile`."""
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if not count:
            break
        done += count
    return done


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a directory as it was listed; links are not followed."""

    path: Path
    is_directory: bool
    is_link: bool
    known: Status | None = None
    """Status, if it is part of the listing."""

    @property
    def name(self) -> str:
        return self.path.name

    def status(self) -> Status:
        return self.known or Status.of(os.stat(self.path, follow_symlinks=False))  # noqa: PTH116


@dataclass(frozen=True, slots=True)
class ReadAheadBytes:
    ahead: int
    """How far at most."""
    request: int
    """How much at once at most."""
    least: int
    """Smaller ranges are not requested."""


def walk(root: Path) -> Iterator[Path]:
    """List all paths below a local directory; links are not followed."""
    pending = [root]
    while pending:
        with os.scandir(pending.pop()) as found:
            for one in found:
                yield Path(one.path)
                if one.is_dir(follow_symlinks=False):
                    pending.append(Path(one.path))
