"""What is one call on a local disk, and many requests in a bucket: copying and removing."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Final, TypeVar

from streamshard.io.object_path import ObjectPath, object_of
from streamshard.io.objects.clients import call
from streamshard.io.objects.listings import forget, list_below
from streamshard.io.objects.object_files import OBJECTS
from streamshard.io.objects.object_upload import ObjectSink, remove_object

T = TypeVar("T")

_THREADS: Final = 16
_COPIED_BYTES: Final = 5 << 30
"""Largest object that S3 copies by one request."""
_STEP_BYTES: Final = 8 << 20


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
    """List all objects below a path."""
    return [object_of(entry.path) for entry in list_below(root)]


def copy_object(known: ObjectPath, path: ObjectPath) -> None:
    """Copy an object; within a bucket the service does it, up to the size that it copies."""
    forget()
    with OBJECTS.open(known) as file:
        if known.bucket == path.bucket and file.nbytes <= _COPIED_BYTES:
            call(known, lambda client: client.copy(known.key, path.key))
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


def move_below(root: ObjectPath, target: ObjectPath) -> None:
    """Copy all objects below a path to another path, then remove them."""
    found = objects_below(root)
    for_each(found, lambda path: copy_object(path, moved(path, root, target)))
    for_each(found, remove_object)


def moved(path: ObjectPath, root: ObjectPath, target: ObjectPath) -> ObjectPath:
    """Return the path that an object has below another root."""
    return target.of_key("/".join([*target.parts[2:], *path.parts[len(root.parts) :]]))


def remove_below(root: ObjectPath) -> None:
    """Remove all objects below a path, and the one at the path."""
    for_each(objects_below(root), remove_object)
    if root.key:
        remove_object(root)
