"""Reads ranges of an object: of the one version that was examined, several requests at a time."""

import errno
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Final

from streamshard.errors import CorruptFileError
from streamshard.io.object_path import ObjectPath
from streamshard.io.objects import listings
from streamshard.io.objects.clients import call, together
from streamshard.io.place import kept
from streamshard.io.readable import Entry, OpenedFile, Status, absent
from streamshard.io.retry import FROM_OUTSIDE, ignored

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult

REQUEST_BYTES: Final = 4 << 20
"""Bytes of one request for a tensor's data."""
AHEAD_BYTES: Final = 16 << 20
"""How far each worker's requests are ahead of what it uses."""
_LEAST_BYTES: Final = 1 << 18
"""Smallest request for data: what follows a small fragment is mostly the next one. Where it is,
the next request is twice as long."""
_HELD_BYTES: Final = AHEAD_BYTES + (12 << 20)
"""Bytes that a worker holds: those ahead, and what is left of requests that were longer."""
READING_BYTES: Final = _HELD_BYTES + AHEAD_BYTES
"""Memory of a worker: an answer takes its size twice until it is complete."""
_HEADER_BYTES: Final = 1 << 18
"""Bytes of one request for headers: a rank file's pickle and its directory take one or two each."""
_ALIKE: Final = 15
"""Objects whose ends are read together with those of the one before them."""
_NEAR_BYTES: Final = 1 << 16
"""Ranges of headers that are less apart are got by one request; data that is less apart counts as
read one after the other."""
_STREAMS: Final = 16
"""Places of a file where one worker may be reading on."""
_THREADS: Final = 32


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="streamshard-request")


def get(path: ObjectPath, start: int, stop: int, expected: Status) -> memoryview:
    options: GetOptions = {"range": (start, stop)}
    if expected.version.startswith('"'):  # a weak one matches nothing
        options["if_match"] = expected.version
    data: memoryview
    try:
        result, data = call(path, lambda client: _received(client.get(path.key, options=options)))
    except FileNotFoundError:
        raise CorruptFileError("removed while it was being read", path=path) from None
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise _changed(path) from None
        raise
    found = listings.status_of(result.meta)
    if (found.nbytes, found.version) != (expected.nbytes, expected.version):
        raise _changed(path)
    if tuple(result.range) != (start, stop) or len(data) != stop - start:
        text = f"the service answered with bytes {result.range}, not {(start, stop)}"
        raise OSError(errno.EIO, text, str(path))
    return data


def _received(result: "GetResult") -> "tuple[GetResult, memoryview]":
    return result, memoryview(result.bytes())


def _changed(path: ObjectPath) -> CorruptFileError:
    return CorruptFileError(
        "replaced by another object while it was being read. Is the job still saving? "
        "Run again when it has finished",
        path=path,
    )


class _HeldRanges(threading.local):
    """The ranges that one worker has requested, of all its files; the least used are given up."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[tuple[ObjectFile, int], int] = OrderedDict()
        self._nbytes = 0

    def add(self, file: "ObjectFile", start: int, nbytes: int) -> None:
        while self._sizes and self._nbytes + nbytes > _HELD_BYTES:
            oldest, begin = next(iter(self._sizes))
            oldest.forget(begin)
        self._sizes[file, start] = nbytes
        self._nbytes += nbytes

    def touch(self, file: "ObjectFile", start: int) -> None:
        if (file, start) in self._sizes:
            self._sizes.move_to_end((file, start))

    def discard(self, file: "ObjectFile", start: int) -> None:
        self._nbytes -= self._sizes.pop((file, start), 0)


_held: Final = _HeldRanges()


class ObjectFile(OpenedFile):
    """An object that is read in ranges; see `OpenedFile`.

    `expected`: status of the version that is read; any other is an error.
    """

    descriptor = -1
    origin = 0
    takes_requests = True

    def __init__(self, path: ObjectPath, expected: Status) -> None:
        self._path = path
        self._expected = expected
        self._headers = listings.headers_of(path, expected.version)
        self._pieces: dict[int, tuple[int, Future[memoryview]]] = {}
        """Start of a range that was requested → its stop, and its bytes."""
        self._ends_of_requests: OrderedDict[int, int] = OrderedDict()
        """Stop of a range that was requested → how much had to be requested at least."""

    @property
    def nbytes(self) -> int:
        return self._expected.nbytes

    def read_at(self, offset: int, count: int) -> bytes:
        """Read bytes of a header, with the bytes around them, which the next call may need."""
        stop = min(offset + count, self.nbytes)
        if stop <= offset:
            return b""
        header = self._header(offset, stop)
        if header is None:
            if not self._headers:
                self._read_heads()
            begin = max(0, min(offset, self.nbytes - _HEADER_BYTES))
            self.prepare([(offset, stop), (begin, begin + _HEADER_BYTES)])
            header = self._header(offset, stop)
        return b"" if header is None else bytes(header)

    def _read_heads(self) -> None:
        """Read both ends of this object, and of those that are likely read next, side by side."""
        following = listings.read_after(self._path, _ALIKE)
        files = [self, *(ObjectFile(path, status) for path, status in following)]
        ends = [(file, file._ends()) for file in files if file is self or not file._headers]
        pending = [(file, span, file._submit(*span)) for file, wanted in ends for span in wanted]
        for file, span, future in pending:
            if file is self:
                file._headers[span] = future.result()
                continue
            with ignored(FROM_OUTSIDE), suppress(CorruptFileError):  # who needs it reads it again
                file._headers[span] = future.result()

    def _ends(self) -> list[tuple[int, int]]:
        if self.nbytes <= 2 * _HEADER_BYTES:
            return [(0, self.nbytes)]
        return [(0, _HEADER_BYTES), (self.nbytes - _HEADER_BYTES, self.nbytes)]

    def _submit(self, start: int, stop: int) -> Future[memoryview]:
        return _pool().submit(get, self._path, start, stop, self._expected)

    def prepare(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Get ranges of headers side by side; those that nearly touch as one."""
        wanted: list[tuple[int, int]] = []
        for start, stop in sorted((max(0, a), min(b, self.nbytes)) for a, b in ranges):
            if start >= stop or self._header(start, stop) is not None:
                continue
            if wanted and start - wanted[-1][1] <= _NEAR_BYTES:
                wanted[-1] = wanted[-1][0], max(wanted[-1][1], stop)
            else:
                wanted.append((start, stop))
        pending = [(one, self._submit(*one)) for one in wanted]
        for one, future in pending:
            self._headers[one] = future.result()

    def _header(self, start: int, stop: int) -> memoryview | None:
        for (begin, end), data in self._headers.items():
            if begin <= start and stop <= end:
                return data[start - begin : stop - begin]
        return None

    def read_into(self, view: memoryview, offset: int) -> int:
        stop = max(offset, min(offset + len(view), self.nbytes))
        known = self._header(offset, stop) if self._headers else None
        if known is not None:
            view[: len(known)] = known
            return len(known)
        at = offset
        while at < stop:
            self._request(at, stop)
            start = self._start_of(at)
            end, future = self._pieces[start]
            piece = future.result()
            count = min(stop, end) - at
            view[at - offset : at - offset + count] = piece[at - start : at - start + count]
            at += count
            if at == end:
                self.forget(start)
        return stop - offset

    def will_need(self, offset: int, nbytes: int) -> None:
        """Request a range that is read soon, as far as there is room for it."""
        stop = min(offset + nbytes, self.nbytes)
        if offset < stop and self._header(offset, stop) is None:
            self._request(offset, stop)

    def _request(self, start: int, stop: int) -> None:
        """Request what is not requested yet of a range, within what a worker may hold."""
        at = start
        while at < min(stop, start + AHEAD_BYTES):
            known = self._start_of(at)
            if known >= 0:
                _held.touch(self, known)
                at = self._pieces[known][0]
                continue
            later = (begin for begin in self._pieces if begin > at)
            least = self._grown(at)
            end = min([at + REQUEST_BYTES, max(stop, at + least), self.nbytes, *later])
            self._ends_of_requests[end] = least
            while len(self._ends_of_requests) > _STREAMS:
                self._ends_of_requests.popitem(last=False)
            _held.add(self, at, end - at)
            self._pieces[at] = end, self._submit(at, end)
            at = end

    def _grown(self, at: int) -> int:
        """Return how much to request at least: twice as much as before it where reading goes on."""
        for end, before in self._ends_of_requests.items():
            if 0 <= at - end <= _NEAR_BYTES:
                return min(2 * before, REQUEST_BYTES)
        return _LEAST_BYTES

    def _start_of(self, at: int) -> int:
        pieces = self._pieces.items()
        return next((begin for begin, (end, _) in pieces if begin <= at < end), -1)

    def forget(self, start: int) -> None:
        _held.discard(self, start)
        if start in self._pieces:
            self._pieces.pop(start)[1].cancel()

    def status(self) -> Status:
        return self._expected

    def close(self) -> None:
        for start in list(self._pieces):
            self.forget(start)


def examine_object(path: ObjectPath) -> Status:
    """Return the status of an object, or of the directory that other objects make of a path."""
    known = listings.known_status(path)
    if isinstance(known, Status):
        return known
    if known is None:
        raise absent(path)
    status: Status | None
    listed: list[Entry]
    if kept() is not None:  # then the listing will be of use, if it is a directory
        status, listed = together(lambda: listings.head(path), lambda: listings.entries_of(path))
        may_be_directory = bool(listed)
    else:
        status, listed, may_be_directory = listings.head(path), [], True
    if status is not None and status.nbytes:
        return status
    # A service may list directories in it that are empty.
    if not all(entry.is_directory for entry in listed):
        return listings.DIRECTORY
    lists = listings.holds_objects if listings.is_listed(path) else listings.entries_of
    if may_be_directory and lists(path):
        return listings.DIRECTORY
    if status is None:
        raise absent(path)
    return status
