"""Object stores as a place that files are read from."""

import errno
import io
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Final

from streamshard.io.object_path import ObjectPath, object_of
from streamshard.io.objects import listings
from streamshard.io.objects.clients import call, together
from streamshard.io.objects.object_reader import ObjectFile, get
from streamshard.io.readable import Entry, Status
from streamshard.model import SourceFile


class ObjectFiles:
    """All object stores; see `ByteSource`."""

    def examine(self, path: Path, *, follows: bool) -> Status:
        """Return the status of an object, or of the directory that other objects make of a path."""
        path = object_of(path)
        known = listings.known_status(path)
        if isinstance(known, Status):
            return known
        if known is None:
            raise _absent(path)
        found: Status | None
        listed: list[Entry]
        if listings.is_keeping():  # then the listing will be of use, if it is a directory
            found, listed = together(lambda: listings.head(path), lambda: listings.entries_of(path))
            may_be_directory = bool(listed)
        else:
            found, listed, may_be_directory = listings.head(path), [], True
        if found is not None and found.nbytes:
            return found
        # A service may list directories in it that are empty.
        if not all(entry.is_directory for entry in listed):
            return listings.DIRECTORY
        if may_be_directory and _is_directory(path):
            return listings.DIRECTORY
        if found is None:
            raise _absent(path)
        return found

    def entries(self, directory: Path) -> Iterator[Entry]:
        found = listings.entries_of(object_of(directory))
        if not found and listings.is_listed(object_of(directory)):
            raise _absent(directory)
        if not found:
            raise OSError(errno.ENOTSUP, "the web server does not list it", str(directory))
        return iter(found)

    def resolve(self, path: Path) -> Path:
        return path

    def open(self, path: Path, known: SourceFile | None = None) -> ObjectFile:
        expected = (
            self.examine(path, follows=True)
            if known is None
            else replace(listings.DIRECTORY, nbytes=known.nbytes, version=known.version)
        )
        return ObjectFile(object_of(path), expected)

    def stream(self, path: Path) -> BinaryIO:
        """Return the whole content of a small object."""
        path = object_of(path)
        content = listings.kept_content(path)
        if content is None:
            content = _content(path)
            listings.keep_content(path, content)
        return io.BytesIO(content)


OBJECTS: Final = ObjectFiles()


def _absent(path: Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _is_directory(path: ObjectPath) -> bool:
    if listings.is_listed(path):
        return listings.holds_objects(path)
    return bool(listings.entries_of(path))


def _content(path: ObjectPath) -> bytes:
    known = listings.known_status(path)
    if isinstance(known, Status) and known.nbytes:
        return bytes(get(path, 0, known.nbytes, known))
    return bytes(call(path, lambda client: client.get(path.key).bytes()))
