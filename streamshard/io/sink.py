"""Writes files; makes, renames and removes files and directories. All errors are OSError.

Files of local directories can be written at any offset; objects only grow at their end, and exist
when they are complete. A bucket has no directories, owners and links, and renames nothing: there
these functions copy and remove, or have nothing to do.
"""

import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from streamshard.io.entries import is_real_directory, stream_of
from streamshard.io.objects.object_changes import copy_object, move_below, remove_below
from streamshard.io.objects.object_path import ObjectPath
from streamshard.io.objects.object_upload import (
    ObjectSink,
    WrittenObject,
    put,
    remove_object,
    upload_bytes,
)
from streamshard.io.readable import open_to_read, read_into
from streamshard.io.retry import FROM_OUTSIDE, ignored
from streamshard.io.writable import (
    BLOCK_BYTES,
    LEAST_BYTES,
    open_direct,
    open_to_write,
    write_all,
    write_file,
)


class Sink(Protocol):
    """A file that is being written, perhaps by several workers at a time."""

    @property
    def version(self) -> str:
        """Etag of a complete object; empty for a local file."""

    @property
    def block_bytes(self) -> int:
        """Divisor by which a view in memory should be as far from a boundary as in the file."""

    @property
    def descriptor(self) -> int:
        """Descriptor, for hints about the page cache; -1 if the file is not local."""

    def write(self, view: memoryview, offset: int) -> None:
        """Write all of a view at an offset; once more does no harm."""

    def read_into(self, view: memoryview, offset: int) -> int:
        """Read back what is written; returns the bytes read, fewer only at the file's end."""

    def finish(self, mode: int | None) -> None:
        """Complete the file, with permission bits where they matter."""

    def close(self) -> None:
        """Stop writing, unless that is done; what is not complete is of no use to readers."""


class LocalSink:
    """A local file, written at any offset; large writes go past the page cache if they can.

    Parameters
    ----------
    direct
        Descriptor from `open_direct`; -1 if there is none.
    """

    version = ""

    def __init__(self, descriptor: int, direct: int = -1) -> None:
        self.descriptor = descriptor
        """Descriptor of the file."""
        self._direct = direct

    @property
    def block_bytes(self) -> int:
        """Block size of direct writes; 1 if there are none."""
        return BLOCK_BYTES if self._direct >= 0 else 1

    def write(self, view: memoryview, offset: int) -> None:
        """Write all of a view at an offset; once more does no harm."""
        write_blocks(self.descriptor, self._direct, view, offset)

    def read_into(self, view: memoryview, offset: int) -> int:
        """Read back what is written; returns the bytes read, fewer only at the file's end."""
        return read_into(self.descriptor, view, offset)

    def sync(self) -> None:
        """Make what this process wrote durable, on another machine's disk too."""
        os.fsync(self.descriptor)

    def finish(self, mode: int | None) -> None:
        """Complete the file, with permission bits where they matter."""
        if mode is not None:
            os.fchmod(self.descriptor, mode)
        self.close()

    def close(self) -> None:
        """Stop writing, unless that is done."""
        for descriptor in (self.descriptor, self._direct):
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptor = self._direct = -1


def open_sink(path: Path, *, is_new: bool, nbytes: int, is_last: bool = False) -> Sink:
    """Open a file of a target to write it; a new file must not exist yet.

    Parameters
    ----------
    nbytes
        How much is to be written.
    is_last
        Whether nobody else may have written an object of that name meanwhile.
    """
    if isinstance(path, ObjectPath):
        return ObjectSink(path, nbytes, must_be_new=is_last)
    descriptor = open_target(path, is_new=is_new)
    # Not for an existing file: the page cache may still hold its earlier pages.
    goes_past = is_new and nbytes >= LEAST_BYTES
    return LocalSink(descriptor, open_direct(path, descriptor) if goes_past else -1)


def open_to_fill(path: Path, *, is_direct: bool) -> LocalSink:
    """Open a local file that another process has made, to write a part of it.

    Parameters
    ----------
    is_direct
        Whether to write past the page cache, where that is faster: only if the file is new.
    """
    descriptor = open_target(path, is_new=False)
    return LocalSink(descriptor, open_direct(path, descriptor) if is_direct else -1)


class InnerPages:
    """Writes only the whole pages of a part of a file, and keeps the bytes at its ends.

    The page between two parts would have two writers. Over NFS, a machine may write back a page of
    which it changed a part, as a whole and with what the rest was before.

    Parameters
    ----------
    start, stop
        The part of the file.
    page_bytes
        Largest page of all machines that write.
    """

    version = ""

    def __init__(self, sink: LocalSink, start: int, stop: int, page_bytes: int) -> None:
        self._sink = sink
        self._start = -(-start // page_bytes) * page_bytes
        self._stop = stop // page_bytes * page_bytes
        if self._start >= self._stop:
            self._start = self._stop = stop
        self.ends: list[tuple[int, bytes]] = []
        """(byte offset, bytes) of what is left to write."""

    @property
    def block_bytes(self) -> int:
        """Divisor by which a view in memory should be as far from a boundary as in the file."""
        return self._sink.block_bytes

    @property
    def descriptor(self) -> int:
        """Descriptor of the file."""
        return self._sink.descriptor

    def write(self, view: memoryview, offset: int) -> None:
        """Write what is in whole pages of a view, and keep the rest; once more does no harm."""
        end = offset + len(view)
        start, stop = max(offset, self._start), min(end, self._stop)
        if start < stop:
            self._sink.write(view[start - offset : stop - offset], start)
        for first, last in ((offset, min(end, self._start)), (max(offset, self._stop), end)):
            if first < last:
                self.ends.append((first, bytes(view[first - offset : last - offset])))

    def read_into(self, view: memoryview, offset: int) -> int:
        """Read back what is written; returns the bytes read, fewer only at the file's end."""
        return self._sink.read_into(view, offset)

    def finish(self, mode: int | None) -> None:
        """Complete nothing: who made the file does."""

    def close(self) -> None:
        """Stop writing."""
        self._sink.close()


def upload_bytes_to(target: Path, largest_bytes: int) -> int:
    """Return the memory that a worker needs to upload files of a target: for local ones none."""
    return upload_bytes(largest_bytes) if isinstance(target, ObjectPath) else 0


def open_written(path: Path) -> Sink:
    """Open a file of a target only to read back what is written."""
    if isinstance(path, ObjectPath):
        return WrittenObject(path)
    return LocalSink(open_to_read(path))


def open_target(path: Path, *, is_new: bool) -> int:
    """Open a file for writing at any offset; a new file must not exist yet."""
    if not is_new:
        return open_to_write(path, os.O_RDWR)
    make_directory(path.parent, parents=True, exist_ok=True)
    return open_to_write(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)


def write_blocks(descriptor: int, direct: int, view: memoryview, offset: int) -> None:
    """Write all of a view at a byte offset; enough whole blocks are written past the page cache.

    Parameters
    ----------
    direct
        Descriptor from `open_direct`; -1 if there is none.
    view
        Its distance in memory from a block boundary equals that of the offset in the file.
    """
    start = -offset % BLOCK_BYTES
    stop = max(start, len(view) - (offset + len(view)) % BLOCK_BYTES)
    if direct < 0 or stop - start < LEAST_BYTES:
        write_all(descriptor, view, offset)
        return
    write_all(descriptor, view[:start], offset)
    try:
        write_all(direct, view[start:stop], offset + start)
    except OSError as error:
        # The disk may need larger blocks, or a short write may have ended within a block.
        if error.errno != errno.EINVAL:
            raise
        write_all(descriptor, view[start:stop], offset + start)
    write_all(descriptor, view[stop:], offset + stop)


class AppendedFile:
    """A file that exists and grows at its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1
        self._lock = threading.Lock()

    def open(self) -> None:
        """Open the file; before that, nothing can be appended."""
        self._descriptor = open_to_write(self._path, os.O_WRONLY | os.O_APPEND)

    def append(self, data: bytes) -> None:
        """Add bytes; may be called from several threads."""
        with self._lock:
            while data:
                data = data[os.write(self._descriptor, data) :]

    def sync(self) -> None:
        """Make all bytes durable."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file, unless that is done."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def make_directory(path: Path, *, parents: bool = False, exist_ok: bool = False) -> None:
    """Make a directory; as `Path.mkdir`."""
    if not isinstance(path, ObjectPath):
        path.mkdir(parents=parents, exist_ok=exist_ok)


def write_new(path: Path, data: bytes) -> None:
    """Write a small file, with the directories that it lies in."""
    if isinstance(path, ObjectPath):
        put(path, data)
        return
    make_directory(path.parent, parents=True, exist_ok=True)
    write_file(path, data)


def rename(path: Path, target: Path) -> None:
    """Rename a file or a directory within one file system; an empty directory may be replaced."""
    if isinstance(path, ObjectPath) and isinstance(target, ObjectPath):
        move_below(path, target)
        return
    try:
        path.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        raise OSError(error.errno, _NOT_RENAMED, str(path)) from error


_NOT_RENAMED = (
    "it cannot be renamed: it is in a lower layer of an overlay, or on another file system. Move "
    "it away with mv, or give another place"
)


def replace_file(path: Path, target: Path) -> None:
    """Rename a file; at any moment there is the old or the new one at the target."""
    if isinstance(path, ObjectPath) and isinstance(target, ObjectPath):
        copy_object(path, target)
        remove_object(path)
        return
    path.replace(target)


def make_link(known: Path, path: Path) -> None:
    """Make a hard link to a known file; a symbolic link itself is linked to. Objects are copied."""
    if isinstance(known, ObjectPath) and isinstance(path, ObjectPath):
        copy_object(known, path)
        return
    os.link(known, path, follow_symlinks=False)


def link_or_copy(known: Path, path: Path) -> None:
    """Make a hard link to a known file; if that is impossible, a copy."""
    if isinstance(known, ObjectPath) and isinstance(path, ObjectPath):
        copy_object(known, path)
        return
    make_directory(path.parent, parents=True, exist_ok=True)
    try:
        make_link(known, path)
    except FileExistsError:
        raise
    except OSError:
        with stream_of(known) as given, os.fdopen(open_target(path, is_new=True), "wb") as copy:
            shutil.copyfileobj(given, copy)


def remove_file(path: Path, *, missing_ok: bool = False) -> None:
    """Remove a file or a link."""
    if isinstance(path, ObjectPath):
        remove_object(path)
        return
    path.unlink(missing_ok=missing_ok)


def remove(path: Path) -> None:
    """Remove a directory with all that is in it, or a file; nothing may be there."""
    if isinstance(path, ObjectPath):
        remove_below(path)
        return
    try:
        if is_real_directory(path):
            shutil.rmtree(path)
        else:
            remove_file(path, missing_ok=True)
    except OSError as error:
        # rmtree may name a path relative to a directory that it does not name.
        raise OSError(error.errno, error.strerror, str(path)) from error


def discard(directory: Path) -> None:
    """Remove what can be removed of a directory; errors are ignored."""
    if isinstance(directory, ObjectPath):
        with ignored(FROM_OUTSIDE):
            remove_below(directory)
        return
    shutil.rmtree(directory, ignore_errors=True)


def take_over_status(known: Path, path: Path) -> None:
    """Give a directory owner, mode, times and access list of another one."""
    if isinstance(path, ObjectPath):
        return
    wanted, own = known.stat(), path.stat()
    if (wanted.st_uid, wanted.st_gid) != (own.st_uid, own.st_gid):
        os.chown(path, wanted.st_uid, wanted.st_gid)
    shutil.copystat(known, path)


def may_change(directory: Path) -> bool:
    """Tell whether this process may make and remove entries of a directory."""
    return isinstance(directory, ObjectPath) or os.access(directory, os.W_OK | os.X_OK)


def foreign_owner(path: Path) -> int | None:
    """Return the user that a path belongs to; None if this process may act as that user."""
    if isinstance(path, ObjectPath):
        return None
    owner = path.stat().st_uid
    return None if os.geteuid() in (0, owner) else owner


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
