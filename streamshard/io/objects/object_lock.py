"""A lock on a target in a bucket: an object that names its holder, created on a condition."""

import json
import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final, TypeAlias

from streamshard.errors import TargetLockedError
from streamshard.io.lock import Holder, Lock, holder_in, is_gone
from streamshard.io.objects.object_path import ObjectPath, object_of
from streamshard.io.objects.object_upload import get_small, put, remove_object

_TRIES: Final = 5


class ObjectLock:
    """A lock that one process takes and releases.

    Who holds it on another machine, or in another container, counts as alive: nothing tells more.
    """

    def __init__(self, path: ObjectPath, what: ObjectPath) -> None:
        self._path = path
        self._what = what
        """What is locked, for messages."""
        self._content = b""

    def take(self) -> None:
        """Take the lock; a lock whose holder is surely gone is taken over.

        Raises
        ------
        TargetLockedError
            Another run holds the lock; the message names it, and says what to do if it is gone.
        OSError
            The object cannot be written.
        """
        # Not even two threads of one process write the same, so it shows whose request succeeded.
        mine = {**asdict(Holder.this_process()), "token": secrets.token_hex(8)}
        content = json.dumps(mine).encode()
        for _ in range(_TRIES):
            with suppress(FileExistsError):
                put(self._path, content, mode="create")
                self._content = content
                return
            try:
                version, found = get_small(self._path)
            except FileNotFoundError:
                continue  # its holder has released it
            if found != content:
                self._require_gone(found)
                with suppress(OSError):
                    put(self._path, content, mode={"e_tag": version})
                    found = content
            if found == content:
                self._content = content
                return
        raise TargetLockedError(f"{self._what}: other runs take its lock, {self._path}")

    def _require_gone(self, content: bytes) -> None:
        holder = holder_in(_without_token(content))
        if not is_gone(holder):
            message = f"{self._what}: another run is writing it ({holder or 'it does not say who'})"
            raise TargetLockedError(
                f"{message}; wait for it, or if it is gone remove the object {self._path}"
            )

    def release(self) -> None:
        """Release the lock, if this process holds it."""
        if self._content:
            with suppress(OSError):
                if get_small(self._path)[1] == self._content:
                    remove_object(self._path)
            self._content = b""


AnyLock: TypeAlias = Lock | ObjectLock


def lock_at(path: Path, what: Path) -> AnyLock:
    """Return a lock, not taken yet, that is the file or the object at a path.

    Parameters
    ----------
    what
        What is locked, for messages.
    """
    if isinstance(path, ObjectPath):
        return ObjectLock(path, object_of(what))
    return Lock(path, what)


def remove_dead_locks(paths: Iterable[Path]) -> None:
    """Remove locks in a bucket that killed runs of this machine left; files of a disk stay.

    Raises
    ------
    OSError
        A lock cannot be read or removed.
    """
    for path in paths:
        if isinstance(path, ObjectPath):
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
