"""Object stores, as a place that files are read from and written to; see `Place`."""

import errno
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

from streamshard.io.lock import AnyLock
from streamshard.io.object_path import ObjectPath, object_of
from streamshard.io.objects import listings, object_lock
from streamshard.io.objects.clients import call, s3_options, together
from streamshard.io.objects.listings import forget, list_below
from streamshard.io.objects.object_reader import (
    AHEAD_BYTES,
    READING_BYTES,
    REQUEST_BYTES,
    ObjectFile,
    examine_object,
    get,
)
from streamshard.io.objects.object_upload import (
    ObjectSink,
    is_there,
    put,
    remove_object,
    upload_bytes,
)
from streamshard.io.place import Place
from streamshard.io.readable import Entry, ReadAheadBytes, Status, absent
from streamshard.io.retry import FROM_OUTSIDE, ignored
from streamshard.model import SourceFile

T = TypeVar("T")

_THREADS: Final = 16
_COPIED_BYTES: Final = 5 << 30
"""Largest object that S3 copies by one request."""
_STEP_BYTES: Final = 8 << 20
_ENDLESS: Final = 1 << 62


def for_each(items: Iterable[T], work: Callable[[T], object]) -> None:
    """Do something with many objects, side by side; the first error ends it."""
    remaining = iter(items)
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            while some := list(islice(remaining, 64 * _THREADS)):
                list(pool.map(work, some))
    finally:
        forget()  # the caller's listings: those of the threads are others


def objects_below(root: ObjectPath) -> list[ObjectPath]:
    return [object_of(entry.path) for entry in list_below(root)]


def copy_object(original: ObjectPath, path: ObjectPath) -> None:
    """Copy an object; within a bucket the service does it, up to the size that it copies."""
    forget()
    with ObjectFile(original, examine_object(original)) as file:
        if original.bucket == path.bucket and file.nbytes <= _COPIED_BYTES:
            call(original, lambda client: client.copy(original.key, path.key))
            return
        sink = ObjectSink(path, file.nbytes)
        try:
            buffer = memoryview(bytearray(_STEP_BYTES))
            for offset in range(0, file.nbytes, _STEP_BYTES):
                file.will_need(offset + _STEP_BYTES, _STEP_BYTES)
                sink.write(buffer[: file.read_into(buffer, offset)], offset)
            sink.finish(None)
        finally:
            sink.close()


def moved(path: ObjectPath, root: ObjectPath, target: ObjectPath) -> ObjectPath:
    return target.of_key("/".join([*target.parts[2:], *path.parts[len(root.parts) :]]))


def _abort_strays(*roots: ObjectPath) -> str:
    """Abort all uploads to objects at or below paths; returns why that cannot be done.

    They are no one's any more: the caller holds the target's lock.
    """
    scheme = roots[0].bucket.partition(":")[0]
    if scheme != "s3":
        return "" if scheme == "az" else "Google's are not listed by obstore"
    try:
        import boto3  # type: ignore[import-untyped]
        from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]
    except ImportError:
        return "without boto3 they are not found: pip install 'streamshard[cloud]'"
    try:
        client = boto3.client("s3", **s3_options())
        pages = client.get_paginator("list_multipart_uploads")
        for root in roots:
            bucket = root.parts[1]
            for page in pages.paginate(Bucket=bucket, Prefix=root.key):
                for upload in page.get("Uploads", ()):
                    if not f"{upload['Key']}/".startswith(f"{root.key}/"):
                        continue
                    client.abort_multipart_upload(
                        Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )
    except ClientError as error:
        return f"the service answers {error.response.get('Error', {}).get('Code', 'with an error')}"
    except BotoCoreError as error:
        return type(error).__name__
    return ""


class Buckets(Place):
    read_ahead = ReadAheadBytes(AHEAD_BYTES, REQUEST_BYTES, 1)
    reading_bytes = READING_BYTES

    def examine(self, path: Path, *, follows: bool) -> Status:
        return examine_object(object_of(path))

    def entries(self, directory: Path) -> Iterator[Entry]:
        listing = listings.entries_of(object_of(directory))
        if not listing and listings.is_listed(object_of(directory)):
            raise absent(directory)
        if not listing:
            raise OSError(errno.ENOTSUP, "the web server does not list it", str(directory))
        return iter(listing)

    def resolve(self, path: Path) -> Path:
        return path  # there are no links

    def open(self, path: Path, identity: SourceFile | None = None) -> ObjectFile:
        expected = (
            examine_object(object_of(path))
            if identity is None
            else listings.DIRECTORY._replace(nbytes=identity.nbytes, version=identity.version)
        )
        return ObjectFile(object_of(path), expected)

    def stream(self, path: Path) -> BinaryIO:
        place = object_of(path)
        content = listings.kept_content(place)
        if content is None:
            known = listings.known_status(place)
            if isinstance(known, Status) and known.nbytes:
                content = bytes(get(place, 0, known.nbytes, known))
            else:
                content = bytes(call(place, lambda client: client.get(place.key).bytes()))
            listings.keep_content(place, content)
        return io.BytesIO(content)

    def listed(self, root: Path) -> Mapping[Any, Mapping[str, Entry]]:
        return listings.tree_of(object_of(root))

    def keep_listed(self, root: Path) -> None:
        if object_of(root).key:
            listings.keep_tree(object_of(root))

    def look_ahead(self, directory: Path, name: str) -> None:
        with ignored(FROM_OUTSIDE | {errno.ENOTSUP}):  # who needs it asks again
            together(lambda: self.entries(directory), lambda: self.stream(directory / name))

    def is_listed(self, directory: Path) -> bool:
        return listings.is_listed(object_of(directory))

    def has_file(self, path: Path) -> bool:
        return is_there(object_of(path))

    def free_bytes(self, directory: Path) -> int:
        return _ENDLESS

    def writing_bytes(self, largest_bytes: int) -> int:
        return upload_bytes(largest_bytes)

    def open_sink(self, path: Path, *, nbytes: int, is_last: bool) -> ObjectSink:
        return ObjectSink(object_of(path), nbytes, must_be_new=is_last)

    def lock(self, path: Path, what: Path) -> AnyLock:
        return object_lock.ObjectLock(object_of(path), object_of(what))

    def remove_dead_locks(self, paths: Iterable[Path]) -> None:
        object_lock.remove_dead_locks(paths)

    def write_new(self, path: Path, data: bytes) -> None:
        put(object_of(path), data)

    def rename(self, path: Path, target: Path) -> None:
        raise OSError(errno.ENOTSUP, "objects are not renamed", str(path))

    def make_link(self, original: Path, path: Path) -> None:
        copy_object(object_of(original), object_of(path))

    def remove_file(self, path: Path, *, missing_ok: bool) -> None:
        remove_object(object_of(path))

    def remove_files(self, paths: Iterable[Path]) -> None:
        for_each(map(object_of, paths), remove_object)

    def remove(self, path: Path) -> None:
        root = object_of(path)
        for_each(objects_below(root), remove_object)
        if root.key:
            remove_object(root)

    def abort_uploads(self, *roots: Path) -> str:
        return _abort_strays(*map(object_of, roots))

    def discard(self, directory: Path) -> None:
        with ignored(FROM_OUTSIDE):
            self.remove(directory)


BUCKETS: Final = Buckets()
