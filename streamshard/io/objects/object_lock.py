"""A lock on a target in a bucket: an object that names its holder, created on a condition.

The holder refreshes it every five minutes. One that was not refreshed for thirty is of a run that
was killed, and the next run replaces that very version of it. So is one of this host whose process
is gone.
"""

import errno
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Event, RLock, Thread
from typing import Final, TypeVar

from streamshard.errors import TargetError, TargetLockedError
from streamshard.io.lock import NO_LOCK, AnyLock, Holder, nothing
from streamshard.io.object_path import ObjectPath, object_of
from streamshard.io.objects.clients import together
from streamshard.io.objects.object_upload import Version, get_small, put, remove_object
from streamshard.io.retry import FROM_OUTSIDE, ignored

T = TypeVar("T")

_TRIES: Final = 5
_REFRESH_SECONDS: Final = 300.0
_LATE_SECONDS: Final = 1500.0
"""After so long without being refreshed, a lock is refreshed before anything relies on it."""
_DEAD_AFTER: Final = timedelta(minutes=30)
"""Services refuse requests of a machine whose clock is more than 15 minutes off, so that this is
after two refreshes were missed, by any clock."""
_NO_VERSION: Final = {"e_tag": '"0x0"', "version": "1"}
"""What no object has."""
_heeded: Final[set[tuple[str, str]]] = set()
"""Bucket and kind of condition, of those that its service is known to heed."""


class ObjectLock(AnyLock):
    def __init__(self, path: ObjectPath, what: ObjectPath) -> None:
        self._path = path
        self._what = what
        self._holder = Holder.this_process()
        self._contents: list[bytes] = []
        """What this run wrote last, and before that: the last may not have arrived."""
        self._refreshed = 0.0
        self._is_lost = False
        self._turn = RLock()
        self._ended = Event()

    def take(self, look: Callable[[], object] = nothing) -> None:
        for _ in range(_TRIES):
            content = self._next_content()
            if self._make(content) or self._take_over(content):
                self._begin()
                try:
                    self._meanwhile(partial(self._require_heeded, "create", content), look)
                except BaseException:
                    self.release()
                    raise
                return
        raise TargetLockedError(f"{self._what}: other runs take its lock, {self._path}")

    def _next_content(self) -> bytes:
        """Return what to write next.

        It is like nothing that was written before, by any thread, so that it shows whose request
        succeeded, and has another version.
        """
        token = {"token": secrets.token_hex(8)}
        content = json.dumps(asdict(self._holder) | token).encode()
        self._contents = [*self._contents[-1:], content]
        return content

    @staticmethod
    def _meanwhile(request: Callable[[], T], work: Callable[[], object]) -> T:
        if work is nothing:
            return request()
        found: T = together(request, work)[0]
        return found

    def _make(self, content: bytes) -> bool:
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
        """Replace a lock whose holder is gone; False if the lock is another one meanwhile.

        The lock may also be this run's, if the answer to the request that made it was lost.
        """
        try:
            version, lock_content, modified = get_small(self._path)
        except FileNotFoundError:
            return False  # its holder has released it
        if lock_content in self._contents:
            return True
        self._require_gone(lock_content, modified)
        self._require_heeded(_NO_VERSION, lock_content)
        with ignored({errno.EBUSY, errno.ENOENT}):
            put(self._path, content, mode=version)
            return True
        return False

    def _require_heeded(self, mode: str | Version, content: bytes) -> None:
        """Refuse a service that puts an object though its condition does not hold.

        `content`: what the lock holds already.
        """
        condition = self._path.bucket, "create" if mode == "create" else "replace"
        if condition in _heeded:
            return
        with ignored({errno.EEXIST, errno.EBUSY, errno.ENOENT}):
            put(self._path, content, mode=mode)
            raise self._unsafe("ignores")
        _heeded.add(condition)

    def _unsafe(self, does: str) -> TargetError:
        message = f"{self._what}: its service {does} conditions of uploads (such as If-None-Match)"
        message = f"{message}, so no lock can keep two runs from writing there at once. If no other"
        return TargetError(f"{message} run does, set {NO_LOCK}=1")

    def _require_gone(self, content: bytes, modified: datetime) -> None:
        holder, until = Holder.in_content(content), modified + _DEAD_AFTER
        if datetime.now(UTC) >= until or (holder is not None and _is_dead(holder)):
            return
        message = f"{self._what}: another run is writing it ({holder or 'it does not say who'})"
        message = f"{message}; wait for it (if it was killed, until {until:%H:%M:%S} UTC), or if"
        raise TargetLockedError(f"{message} it is gone remove the object {self._path}")

    def _begin(self) -> None:
        self._refreshed, self._ended = time.time(), Event()
        Thread(target=self._keep, name="streamshard-lock", daemon=True).start()

    def _keep(self) -> None:
        while not self._is_lost and not self._ended.wait(_REFRESH_SECONDS):
            with ignored(FROM_OUTSIDE | {errno.ENOTSUP, errno.EPROTO}):  # the next turn may succeed
                self._refresh()

    def _refresh(self) -> None:
        with self._turn:
            version = self._own_version()
            self._is_lost = version is None
            if version is None or self._ended.is_set():
                return
            with ignored({errno.EBUSY, errno.ENOENT}):
                put(self._path, self._next_content(), mode=version)
                self._refreshed = time.time()
                return
            # It is still this run's if that request was carried out, and its answer lost.
            self._is_lost = self._own_version() is None

    def require_held(self) -> None:
        if time.time() - self._refreshed > _LATE_SECONDS:  # the machine may have slept
            self._refresh()
        if self._is_lost:
            message = f"{self._what}: another run took its lock over, or someone removed it, as if"
            raise TargetLockedError(f"{message} this one were gone; run the same command again")

    def release(self, finish: Callable[[], object] = nothing) -> None:
        if not self._refreshed:
            finish()
            return
        try:
            is_held = self._meanwhile(self._is_held, finish)
        except BaseException:
            self.release()
            raise
        self._ended.set()
        with self._turn, ignored(FROM_OUTSIDE):
            if is_held:
                remove_object(self._path)
        self._refreshed = 0.0

    def _is_held(self) -> bool:
        with self._turn, ignored(FROM_OUTSIDE):
            return self._own_version() is not None
        return False

    def _own_version(self) -> Version | None:
        with suppress(FileNotFoundError):
            version, found, _ = get_small(self._path)
            return version if found in self._contents else None
        return None


def remove_dead_locks(paths: Iterable[Path]) -> None:
    for path in map(object_of, paths):
        lock = ObjectLock(path, path)
        with suppress(TargetLockedError):
            lock.take()
            lock.release()


def _is_dead(holder: Holder) -> bool:
    if holder.host != socket.gethostname() or holder.process <= 0:
        return False
    try:
        os.kill(holder.process, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False
