"""Paths of objects, such as `s3://bucket/runs/7b`; a kind of `Path` with the same pure operations.

A path that the system should open is a local one, so whatever asks the system about an object's
path gets an error, never the file of a local directory that is named `s3:`.
"""

import errno
import os
import re
from pathlib import Path, PosixPath
from typing import Any, ClassVar, Final, Never, Self
from urllib.parse import unquote, urlsplit

from streamshard.errors import UsageError
from streamshard.registry import BUCKETS

PACKED_SUFFIX: Final = ".zarr.zip"
"""What the name of a store in one file ends in."""
_SCHEMES: Final = ("s3", "gs", "az", "http", "https")
"""What a path of an object begins with, before `://`."""
_URL: Final = re.compile(rf"({'|'.join(_SCHEMES)}):/+([^/]+)(/|$)")
_FILE_URL: Final = re.compile(r"file:/{2}")
_HOST: Final = re.compile(r"[^@:?#]+(:[0-9]+)?([?#].*)?")
"""A bucket, or a server and its port."""
_ODD: Final = frozenset({"", ".", ".."})
"""Segments of a key that a path cannot have."""


class ObjectPath(PosixPath):
    """The path of an object, or of all objects below it; the first two parts are its bucket."""

    __slots__ = ()
    place: ClassVar[str] = BUCKETS
    """Name in `registry` of the `Place` that it belongs to."""

    def __str__(self) -> str:
        """Return the URL; of a relative path the part of it."""
        text = super().__str__()
        return text.replace(":/", "://", 1) if self.is_absolute() else text

    def __fspath__(self) -> str:
        """Return the URL, which the system does not find."""
        return str(self)

    def as_posix(self) -> str:
        return str(self)

    def is_absolute(self) -> bool:
        return len(self.parts) > 1 and self.parts[0].removesuffix(":") in _SCHEMES

    def absolute(self) -> Self:
        return self

    @property
    def bucket(self) -> str:
        """URL of the bucket, which a client is made for."""
        return f"{self.parts[0]}//{self.parts[1]}"

    @property
    def key(self) -> str:
        """Name of the object in its bucket; empty for the bucket itself."""
        return "/".join(self.parts[2:])

    def of_key(self, key: str) -> "ObjectPath":
        segments = key.split("/")
        if not _ODD.isdisjoint(segments):
            text = "its key has an empty segment, '.' or '..', and is no path"
            raise OSError(errno.EINVAL, text, f"{self.bucket}/{key}")
        return type(self)(*self.parts[:2], *segments)

    def _refuse(self, *args: Any, **options: Any) -> Never:  # noqa: ANN401
        raise OSError(errno.ENOTSUP, "an object, not a local file", str(self))

    stat = open = mkdir = touch = rename = replace = unlink = rmdir = iterdir = _refuse


def as_path(path: str | os.PathLike[str]) -> Path:
    """Return the path that a user means: local, or of an object."""
    if isinstance(path, ObjectPath):
        return path
    text = os.fspath(path)
    if not text:
        raise UsageError("an empty path; is a variable of the shell not set?")
    if _FILE_URL.match(text):
        url = urlsplit(text)
        if url.netloc not in ("", "localhost"):
            host = url.netloc.rpartition("@")[2]
            raise UsageError(f"file://{host}{url.path}: a file of {host}; write file:///…")
        return Path(unquote(url.path))
    if found := _URL.match(text):
        if not _HOST.fullmatch(found[2]):
            raise UsageError("A URL with a user name; credentials come from the environment")
        bare = re.split(r"[?#]", text)[0]
        if bare != text:
            message = f"{bare}: followed by a query or a fragment; credentials and other settings"
            raise UsageError(f"{message} come from the environment")
        return ObjectPath(bare)
    scheme, separator, rest = text.partition("://")
    if separator and scheme.isalnum():
        known = ", ".join(f"{one}://" for one in ("file", *_SCHEMES))
        raise UsageError(f"{scheme}://{rest.rpartition('@')[2]}: not known; there are {known}")
    return Path(path)


def object_of(path: Path) -> ObjectPath:
    if not isinstance(path, ObjectPath):
        raise TypeError(f"{path}: not the path of an object")
    return path


def is_packed_name(path: Path) -> bool:
    return path.name.endswith(PACKED_SUFFIX)


def is_object(path: Path) -> bool:
    return isinstance(path, ObjectPath)
