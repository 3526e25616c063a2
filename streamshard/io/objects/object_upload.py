"""Uploads objects: small ones by one request, large ones in parts that are sent while more come."""

import queue
import threading
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from weakref import finalize

from streamshard.io.object_path import ObjectPath
from streamshard.io.objects.clients import call, quoted
from streamshard.io.objects.listings import forget
from streamshard.io.sink import Sink

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_SINGLE_BYTES: Final = 16 << 20
"""Largest object that is uploaded by one request; of others, parts are sent while more come."""
_PART_BYTES: Final = 8 << 20
"""Smallest part: between the 5 MiB and 5 GiB that S3 allows."""
_MOST_PARTS: Final = 9_500
"""S3 allows 10,000."""
_CONCURRENT: Final = 4
"""Parts of one object that are being sent at a time; other workers upload other objects."""
_PARTS_HELD: Final = 8
"""Parts in memory: one that is filled, one that waits, those being sent, and obstore's own."""
Version: TypeAlias = dict[str, str]
"""What tells a version of an object from others, in obstore's words: its `e_tag`, and where the
service counts them (Google's) the number, `version`."""
_GROWTH_BYTES: Final = 1 << 12
_MIB: Final = 1 << 20


def _part_bytes(nbytes: int) -> int:
    return max(_PART_BYTES, -(-nbytes // _MOST_PARTS // _MIB) * _MIB)


def upload_bytes(largest_bytes: int) -> int:
    """Return the memory that each worker needs to upload objects of at most this size."""
    if largest_bytes <= _SINGLE_BYTES:
        return largest_bytes
    return max(_SINGLE_BYTES, _PARTS_HELD * _part_bytes(largest_bytes))


def upload_requests(nbytes: int) -> int:
    return 1 if nbytes <= _SINGLE_BYTES else 2 + -(-nbytes // _part_bytes(nbytes))


class _WorkerBuffer(threading.local):
    """The buffers of a worker's objects, one after the other: new memory has to be cleared."""

    def __init__(self) -> None:
        self._free = bytearray()
        self.parts: list[bytearray] = []
        """Buffers of parts that are sent."""

    def take(self, nbytes: int) -> bytearray:
        found, self._free = self._free, bytearray()
        return found if len(found) >= nbytes else bytearray(nbytes)

    def give_back(self, buffer: bytearray) -> None:
        self._free = buffer


_worker_buffer: Final = _WorkerBuffer()


class _StoppedUploadError(Exception):
    """Ends an upload that is given up, so that the service forgets its parts."""


class ObjectSink(Sink):
    """An object that is being uploaded, from its beginning to its end.

    It exists from the moment when it is complete.

    `nbytes`: its size at most; compressed content may take a little more.
    `must_be_new`: whether an object that is there already is an error; for small ones.
    """

    only_grows = True

    def __init__(self, path: ObjectPath, nbytes: int, *, must_be_new: bool = False) -> None:
        self._path = path
        self._must_be_new = must_be_new
        self._part = _part_bytes(nbytes)
        self._is_single = nbytes <= _SINGLE_BYTES
        self._free = _worker_buffer.parts
        self._buffer = _worker_buffer.take(nbytes) if self._is_single else self._next_part()
        self._filled = 0
        self._offset = 0
        # That it begins takes a request, meanwhile the first part is filled.
        self._upload = None if self._is_single else _Upload(path, self._part)
        self._error: OSError | None = None
        """Why parts that were written before could not be sent."""

    def write(self, view: memoryview, offset: int) -> None:
        if self._error is not None:
            raise self._error
        if offset != self._offset:
            raise ValueError(f"{self._path}: written at {offset}, after {self._offset}")
        while len(view):
            if self._filled == len(self._buffer):
                self._send()
            count = min(len(view), len(self._buffer) - self._filled)
            self._buffer[self._filled : self._filled + count] = view[:count]
            self._filled += count
            self._offset += count
            view = view[count:]

    def _send(self) -> None:
        if self._upload is None:
            # Not in place: a request that is over may still refer to what it sent of this buffer.
            self._buffer = self._buffer + bytes(_GROWTH_BYTES)
            return
        try:
            self._upload.send(self._filled_part())
        except OSError as error:
            self._error = error
            raise
        self._buffer, self._filled = self._next_part(), 0

    def _next_part(self) -> bytearray:
        while self._free:
            if len(found := self._free.pop()) == self._part:
                return found
        return bytearray(self._part)

    def _filled_part(self) -> memoryview:
        """Return what was added since the last part; its buffer is free once nobody has it."""
        part = memoryview(self._buffer)[: self._filled]
        finalize(part, _keep, self._free, self._buffer).atexit = False
        return part

    def finish(self, mode: int | None) -> None:
        if self._upload is not None:
            self._upload.send(self._filled_part())
            self.version = self._upload.finish()
            self._upload = None
            return
        content = memoryview(self._buffer)[: self._filled]
        if self._must_be_new:
            self.version = create(self._path, bytes(content))
        else:
            self.version = put(self._path, content)

    def close(self) -> None:
        """Give the upload up, unless it is complete."""
        if self._upload is not None:
            self._upload.stop()
            self._upload = None
        if self._is_single:
            _worker_buffer.give_back(self._buffer)
            self._is_single = False
        self._buffer = bytearray()


def _keep(free: list[bytearray], buffer: bytearray) -> None:
    if len(free) < _PARTS_HELD:
        free.append(buffer)


class _Upload(threading.Thread):
    """Sends the parts that it is given, in a thread of its own, which waits for more."""

    def __init__(self, path: ObjectPath, part: int) -> None:
        super().__init__(name="streamshard-upload", daemon=True)
        self._path = path
        self._part = part
        self._parts: queue.Queue[Any] = queue.Queue(maxsize=1)
        self._error: BaseException | None = None
        self._version = ""
        self.start()

    def run(self) -> None:
        try:
            self._version = put(self._path, self._given(), part=self._part)
        except BaseException as error:
            self._error = error

    def _given(self) -> Iterator[Any]:
        while (part := self._parts.get()) is not None:
            if isinstance(part, _StoppedUploadError):
                raise part
            if len(part):
                yield part

    def send(self, part: Any) -> None:  # noqa: ANN401
        """Hand a part over; waits while enough parts are on their way."""
        while self.is_alive():
            try:
                self._parts.put(part, timeout=0.1)
            except queue.Full:
                continue
            return
        if self._error is not None and not isinstance(part, _StoppedUploadError):
            raise self._error

    def finish(self) -> str:
        self.send(None)
        self.join()
        if self._error is not None:
            raise self._error
        return self._version

    def stop(self) -> None:
        """End the upload, unless it has ended; the service then forgets the parts."""
        self.send(_StoppedUploadError())
        self.join()


def put(
    path: ObjectPath,
    content: Any,  # noqa: ANN401
    *,
    part: int = 0,
    mode: Any = None,  # noqa: ANN401
) -> str:
    """Upload an object; returns its etag.

    `content`: bytes, or an iterator of them.
    `part`: size of the parts; 0 for one request.
    `mode`: `create`, or the version that must be replaced, from `get_small`.
    """
    options: dict[str, Any] = {"use_multipart": bool(part)}
    if part:
        options |= {"chunk_size": part, "max_concurrency": _CONCURRENT}
    if mode is not None:
        options["mode"] = mode
    forget()
    found: str | None = call(
        path, lambda client: client.put(path.key, content, **options)["e_tag"], repeats=not part
    )
    return quoted(found)


def create(path: ObjectPath, content: bytes) -> str:
    try:
        return put(path, content, mode="create")
    except FileExistsError:
        # Perhaps this very request was carried out, its answer lost, and obstore repeated it.
        version, found, _ = get_small(path)
        if found != content:
            raise
        return version.get("e_tag", "")


def get_small(path: ObjectPath) -> tuple[Version, bytes, datetime]:
    """Return an object's version and content, and when it was put, by the service's clock."""

    def get(client: "ObjectStore") -> tuple[Version, bytes, datetime]:
        result = client.get(path.key)
        found = {"e_tag": quoted(result.meta["e_tag"]), "version": result.meta["version"] or ""}
        version = {name: value for name, value in found.items() if value}
        return version, bytes(result.bytes()), result.meta["last_modified"]

    version: Version
    version, content, modified = call(path, get)
    return version, content, modified


def is_there(path: ObjectPath) -> bool:
    """Tell whether there is an object of that very name, without looking for others below it."""
    try:
        call(path, lambda client: client.head(path.key))
    except FileNotFoundError:
        return False
    return True


def remove_object(path: ObjectPath) -> None:
    forget()
    try:
        call(path, lambda client: client.delete(path.key))
    except FileNotFoundError:
        return
