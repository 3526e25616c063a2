"""A lock on a target in a bucket: an object that names its holder, created on a condition."""

import errno
import json
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from streamshard.errors import Option, TargetError, TargetLockedError
from streamshard.io.lock import AnyLock, Holder, holder_in, is_gone, nothing
from streamshard.io.object_path import ObjectPath, object_of
from streamshard.io.objects.clients import together
from streamshard.io.objects.object_upload import Version, get_small, put, remove_object
from streamshard.io.retry import FROM_OUTSIDE, ignored

T = TypeVar("T")

_TRIES: Final = 5
_NO_VERSION: Final = {"e_tag": '"0x0"', "version": "1"}
"""What no object has."""
_heeded: Final[set[tuple[str, str]]] = set()
"""Bucket and kind of condition, of those that its service is known to heed."""


class ObjectLock(AnyLock):
    """A lock that one process takes and releases.

    Who holds it on another machine, or in another container, counts as alive: nothing tells more.
    """

    def __init__(self, path: ObjectPath, what: ObjectPath) -> None:
        self._path = path
        self._what = what
        """What is locked, for messages."""
        self._content = b""

    def take(self, look: Callable[[], object] = nothing) -> None:
        # Not even two threads of one process write the same, so it shows whose request succeeded.
        mine = {**asdict(Holder.this_process()), "token": secrets.token_hex(8)}
        content = json.dumps(mine).encode()
        for _ in range(_TRIES):
            if self._make(content) or self._take_over(content):
                self._content = content
                try:
                    self._meanwhile(partial(self._require_heeded, "create", content), look)
                except BaseException:
                    self.release()
                    raise
                return
        raise TargetLockedError(f"{self._what}: other runs take its lock, {self._path}")

    @staticmethod
    def _meanwhile(request: Callable[[], T], work: Callable[[], object]) -> T:
        """Return the answer to a request, while other work is done if there is any."""
        if work is nothing:
            return request()
        found: T = together(request, work)[0]
        return found

    def _make(self, content: bytes) -> bool:
        """Create the lock; False if there is one."""
        try:
            put(self._path, content, mode="create")
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno == errno.ENOTSUP:
                raise self._unsafe("does not take") from error
            raise
        return True

    def _take_over(self, content: bytes) -> bool:
        """Replace a lock whose holder is surely gone; False if the lock is another one meanwhile.

        The lock may also be this run's, if the answer to the request that made it was lost.
        """
        try:
            version, found = get_small(self._path)
        except FileNotFoundError:
            return False  # its holder has released it
        if found == content:
            return True
        self._require_gone(found)
        self._require_heeded(_NO_VERSION, found)
        with ignored({errno.EBUSY, errno.ENOENT}):
            put(self._path, content, mode=version)
            return True
        return False

    def _require_heeded(self, mode: str | Version, content: bytes) -> None:
        """Refuse a service that puts an object though its condition does not hold.

        `content`: what the lock holds already.
        """
        known = self._path.bucket, "create" if mode == "create" else "replace"
        if known in _heeded:
            return
        with ignored({errno.EEXIST, errno.EBUSY, errno.ENOENT}):
            put(self._path, content, mode=mode)
            raise self._unsafe("ignores")
        _heeded.add(known)

    def _unsafe(self, does: str) -> TargetError:
        message = f"{self._what}: its service {does} conditions of uploads (such as If-None-Match)"
        message = f"{message}, so no lock can keep two runs from writing there at once. If no other"
        return TargetError(f"{message} run does, give {Option('lock', False)}")

    def _require_gone(self, content: bytes) -> None:
        holder = holder_in(_without_token(content))
        if not is_gone(holder):
            message = f"{self._what}: another run is writing it ({holder or 'it does not say who'})"
            raise TargetLockedError(
                f"{message}; wait for it, or if it is gone remove the object {self._path}"
            )

    def release(self, finish: Callable[[], object] = nothing) -> None:
        if not self._content:
            finish()
            return
        try:
            is_held = self._meanwhile(self._is_held, finish)
        except BaseException:
            self.release()
            raise
        with ignored(FROM_OUTSIDE):
            if is_held:
                remove_object(self._path)
        self._content = b""

    def _is_held(self) -> bool:
        """Tell whether the lock is still this run's."""
        with ignored(FROM_OUTSIDE):
            return get_small(self._path)[1] == self._content
        return False


def remove_dead_locks(paths: Iterable[Path]) -> None:
    """Remove locks that killed runs of this machine left."""
    for path in map(object_of, paths):
        lock = ObjectLock(path, path)
        with suppress(TargetLockedError):
            lock.take()
            lock.release()


def _without_token(content: bytes) -> bytes:
    with suppress(ValueError, AttributeError, RecursionError):
        found = json.loads(content)
        found.pop("token", None)
        return json.dumps(found).encode()
    return content
