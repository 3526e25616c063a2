"""The disks of this machine, as a place that files are read from and written to."""

import errno
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from streamshard.io.durability import sync_path, sync_tree
from streamshard.io.lock import Lock
from streamshard.io.readable import Entry, ReadableFile, ReadAheadBytes, Status, open_to_read, walk
from streamshard.io.sink import LocalSink, open_target
from streamshard.io.writable import LEAST_BYTES, open_direct, write_file
from streamshard.model import SourceFile

_BLOCK_BYTES: Final = 512
"""The unit of st_blocks in stat(2), whatever the block size of the file system."""
_NOT_RENAMED: Final = (
    "it cannot be renamed: it is in a lower layer of an overlay, or on another file system. Move "
    "it away with mv, or give another place"
)


class Disk:
    """The directories of this machine; see `Place`."""

    read_ahead = ReadAheadBytes(4 << 20, 1 << 20, 1 << 14)
    """Several windows, so that the disk never waits for a worker; at most what a disk takes at
    once; and what is smaller arrives with its neighbours' pages."""
    reading_bytes = 0

    def examine(self, path: Path, *, follows: bool) -> Status:
        return Status.of(os.stat(path, follow_symlinks=follows))  # noqa: PTH116

    def entries(self, directory: Path) -> Iterator[Entry]:
        with os.scandir(directory) as found:
            for one in found:
                is_directory = one.is_dir(follow_symlinks=False)
                yield Entry(directory / one.name, is_directory, one.is_symlink())

    def resolve(self, path: Path) -> Path:
        return Path(os.path.realpath(path))

    def open(self, path: Path, known: SourceFile | None = None) -> ReadableFile:
        return ReadableFile(open_to_read(path))

    def stream(self, path: Path) -> BinaryIO:
        descriptor = open_to_read(path)
        try:
            return os.fdopen(descriptor, "rb")
        except OSError as error:  # it is a directory
            os.close(descriptor)
            raise OSError(error.errno, error.strerror, str(path)) from error

    def listed(self, root: Path) -> Mapping[Any, Mapping[str, Entry]]:
        return {}

    def keep_listed(self, root: Path) -> None:
        pass

    def look_ahead(self, directory: Path, name: str) -> None:
        pass

    def is_listed(self, directory: Path) -> bool:
        return True

    def has_file(self, path: Path) -> bool:
        return path.is_file()

    def free_bytes(self, directory: Path) -> int:
        return shutil.disk_usage(directory).free

    def allocated_bytes(self, root: Path) -> int:
        if not os.path.lexists(root):
            return 0
        return sum(path.lstat().st_blocks * _BLOCK_BYTES for path in walk(root))

    def requests_to_read(self, nbytes: int) -> int:
        return 0

    def requests_to_write(self, nbytes: int) -> int:
        return 0

    def writing_bytes(self, largest_bytes: int) -> int:
        return 0

    def open_sink(self, path: Path, *, is_new: bool, nbytes: int, is_last: bool) -> LocalSink:
        descriptor = open_target(path, is_new=is_new)
        # Not for an existing file: the page cache may still hold its earlier pages.
        goes_past = is_new and nbytes >= LEAST_BYTES
        return LocalSink(descriptor, open_direct(path, descriptor) if goes_past else -1)

    def open_written(self, path: Path) -> LocalSink:
        return LocalSink(open_to_read(path))

    def lock(self, path: Path, what: Path) -> Lock:
        return Lock(path, what)

    def remove_dead_locks(self, paths: Iterable[Path]) -> None:
        pass  # whoever comes next takes them over

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

    def replace_file(self, path: Path, target: Path) -> None:
        path.replace(target)

    def make_link(self, known: Path, path: Path) -> None:
        os.link(known, path, follow_symlinks=False)

    def link_or_copy(self, known: Path, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.make_link(known, path)
        except FileExistsError:
            raise
        except OSError:
            new = os.fdopen(open_target(path, is_new=True), "wb")
            with self.stream(known) as given, new as copy:
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

    def abort_uploads(self, *roots: Path) -> str:
        return ""

    def discard(self, directory: Path) -> None:
        if directory.is_dir():
            shutil.rmtree(directory, ignore_errors=True)
        else:
            directory.unlink(missing_ok=True)

    def take_over_status(self, known: Path, path: Path) -> None:
        wanted, own = known.stat(), path.stat()
        if (wanted.st_uid, wanted.st_gid) != (own.st_uid, own.st_gid):
            os.chown(path, wanted.st_uid, wanted.st_gid)
        shutil.copystat(known, path)

    def may_change(self, directory: Path) -> bool:
        return os.access(directory, os.W_OK | os.X_OK)

    def foreign_owner(self, path: Path) -> int | None:
        owner = path.stat().st_uid
        return None if os.geteuid() in (0, owner) else owner

    def sync_path(self, path: Path) -> None:
        sync_path(path)

    def sync_tree(self, root: Path) -> None:
        sync_tree(root)
