"""Stores in one file, as a place: a zip whose entries are the store's files, stored as they are.

Any tool may have made the zip, such as `zip -0` or zarr-python's ZipStore. The place is only read.
"""

import errno
import io
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path, PosixPath
from typing import Any, BinaryIO, ClassVar, Final, Never, cast

from streamshard import registry
from streamshard.formats.zarr.packed_directory import PackedDirectory
from streamshard.io.entries import examine, is_file, open_readable, resolve
from streamshard.io.object_path import PACKED_SUFFIX, ObjectPath, as_path, is_object, is_packed_name
from streamshard.io.place import Place, kept, place_of
from streamshard.io.readable import Entry, OpenedFile, ReadAheadBytes, Status, absent
from streamshard.model import SourceFile

_KEPT: Final = 4
"""Directories that are kept in memory."""


class PackedPath(PosixPath):
    """The path of a store in one file on a disk, or of a file in it."""

    __slots__ = ()
    place: ClassVar[str] = registry.PACKED

    @property
    def parent(self) -> Any:  # noqa: ANN401
        """The directory in the file; of the root the directory that the file lies in."""
        found = super().parent
        return found if _is_within(found) else Path(found)


class PackedObject(ObjectPath):
    """The path of a store in one object, or of a file in it."""

    __slots__ = ()
    place: ClassVar[str] = registry.PACKED_OBJECTS

    @property
    def parent(self) -> Any:  # noqa: ANN401
        """The directory in the object; of the root the directory that the object lies in."""
        found = super().parent
        return found if _is_within(found) else ObjectPath(found)


def is_packed(path: Path) -> bool:
    return isinstance(path, PackedPath | PackedObject)


def packed(path: Path) -> Path:
    """Return the root of the store in a file that is named like one; of others the path itself."""
    if not is_packed_name(path) or _is_within(path.absolute().parent):
        return path
    if is_packed(path) or not is_file(path):
        return path
    return PackedObject(path) if is_object(path) else PackedPath(path)


def _is_within(path: Path) -> bool:
    return any(part.endswith(PACKED_SUFFIX) for part in path.parts)


def _split(path: Path) -> tuple[Path, str]:
    """Return the file that a packed store is, and the path in it."""
    text = str(path)
    end = text.find(f"{PACKED_SUFFIX}/")
    end = len(text) if end < 0 else end + len(PACKED_SUFFIX)
    return _archive(text[:end]), text[end + 1 :]


@lru_cache(maxsize=64)
def _archive(text: str) -> Path:
    """Return the path of a file; a store has very many files, and all of them ask for it."""
    return as_path(text)


class PackedFile(OpenedFile):
    """An open file of a packed store: a range of the store's one file."""

    def __init__(self, file: OpenedFile, start: int, status: Status, whole: Status) -> None:
        self._file = file
        self._status = status
        self._whole = whole
        self.descriptor = file.descriptor
        self.origin = file.origin + start
        self.takes_requests = file.takes_requests
        self._start = start

    @property
    def nbytes(self) -> int:
        return self._status.nbytes

    def read_at(self, offset: int, count: int) -> bytes:
        count = max(0, min(count, self.nbytes - offset))
        return self._file.read_at(self._start + offset, count) if count else b""

    def prepare(self, ranges: Sequence[tuple[int, int]]) -> None:
        at = self._start
        self._file.prepare([(at + start, at + min(stop, self.nbytes)) for start, stop in ranges])

    def read_into(self, view: memoryview, offset: int) -> int:
        count = max(0, min(len(view), self.nbytes - offset))
        return self._file.read_into(view[:count], self._start + offset) if count else 0

    def will_need(self, offset: int, nbytes: int) -> None:
        count = min(nbytes, self.nbytes - offset)
        if count > 0:
            self._file.will_need(self._start + offset, count)

    def status(self) -> Status:
        """Return the present status: if the one file has changed, this one has another size too."""
        now = self._file.status()
        is_same = (now.nbytes, now.version) == (self._whole.nbytes, self._whole.version)
        return self._status if is_same else now

    def close(self) -> None:
        self._file.close()


class PackedStores(Place):
    """Stores in one file each; see `Place`."""

    def __init__(self, inner: Place) -> None:
        self._inner = inner
        self.read_ahead: ReadAheadBytes = inner.read_ahead
        self.reading_bytes: int = inner.reading_bytes
        self._known: OrderedDict[str, PackedDirectory] = OrderedDict()
        """Path of a file → its directory, the one used last at the end."""
        self._lock = threading.Lock()

    def directory_of(self, root: Path) -> PackedDirectory:
        return self._directory(_split(root)[0])

    def _directory(self, archive: Path, version: str | None = None) -> PackedDirectory:
        """Return the directory of a file, as it is now or was at a version.

        While a checkpoint is opened, the file is examined once.
        """
        listed = kept()
        if listed is None or version is not None:
            return self._read(archive, version)
        here = listed.setdefault(PackedStores, {})
        if archive not in here:
            here[archive] = self._read(archive, None)
        found: PackedDirectory = here[archive]
        return found

    def _read(self, archive: Path, version: str | None) -> PackedDirectory:
        name = str(archive)
        with self._lock:
            directory = self._known.get(name)
            if directory is None or directory.status.version != version:
                status = examine(archive)
                if directory is None or directory.status != status:
                    directory = PackedDirectory(archive, status)
            self._known[name] = directory
            self._known.move_to_end(name)
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return directory

    def _find(self, path: Path) -> tuple[PackedDirectory, int | None]:
        """Return a file's directory and its number there; None for the number of a directory."""
        archive, inner = _split(path)
        directory = self._directory(archive)
        row = directory.find(inner)
        if row is None and inner and not directory.is_directory(inner):
            raise absent(path)
        return directory, row

    def examine(self, path: Path, *, follows: bool) -> Status:
        directory, row = self._find(path)
        return directory.status_of(row)

    def entries(self, directory: Path) -> Iterator[Entry]:
        packed, row = self._find(directory)
        if row is not None:
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(directory))
        for name, number in packed.children(_split(directory)[1]):
            status = packed.status_of(number)
            yield Entry(directory / name, status.is_directory, is_link=False, known=status)

    def resolve(self, path: Path) -> Path:
        """Return an absolute path; there are no links in the file, and it keeps its name."""
        archive, inner = _split(path)
        known = self._known.get(str(archive))
        around = resolve(archive.parent) if known is None else known.around
        return type(path)(around, archive.name, inner)

    def open(self, path: Path, identity: SourceFile | None = None) -> PackedFile:
        archive, inner = _split(path)
        directory = self._directory(archive, identity.version if identity else None)
        row = directory.find(inner)
        if row is None:
            raise absent(path)
        whole = directory.status
        file = open_readable(archive, whole.source_file(archive))
        try:
            start = directory.start_of(row, file)
        except BaseException:
            file.close()
            raise
        return PackedFile(file, start, directory.status_of(row), whole)

    def stream(self, path: Path) -> BinaryIO:
        with self.open(path) as file:
            return io.BytesIO(file.read_at(0, file.nbytes))

    def has_file(self, path: Path) -> bool:
        archive, inner = _split(path)
        return self._directory(archive).find(inner) is not None

    def free_bytes(self, directory: Path) -> int:
        return 0

    def may_change(self, directory: Path) -> bool:
        return False

    def _refuse(self, *args: Any, **options: Any) -> Never:  # noqa: ANN401
        raise OSError(errno.EROFS, "a store in one file is not changed", str(args[0]))

    open_sink = lock = make_directory = write_new = write_durably = _refuse
    rename = make_link = link_or_copy = remove_file = remove_files = _refuse
    remove = discard = take_over_status = sync_path = sync_tree = _refuse


PACKED: Final[Place] = PackedStores(place_of(Path()))


def directory_of(root: Path) -> PackedDirectory:
    found: PackedDirectory = registry.load(cast(PackedPath, root).place).directory_of(root)
    return found
