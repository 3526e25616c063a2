"""A lock on a target, for runs on this host and on others that share its file system.

The lock is a file on which a run has an flock(2). The kernel, or the server of a network file
system, frees that when the process dies, however it dies: what a killed run leaves stops no other.
What is in the file is for messages alone.
"""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Self

from streamshard.errors import TargetLockedError
from streamshard.io.retry import FROM_OUTSIDE, close_unwritten, ignored
from streamshard.io.writable import not_ours, open_regular, require_one_name, write_all

NO_LOCK: Final = "STREAMSHARD_NO_LOCK"
"""Environment variable: with the value 1, no lock is taken."""
_NO_FLOCK: Final = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
"""Errors of flock(2) on file systems without it."""
_READ_BYTES: Final = 4096
"""Longer than the content of any lock."""
_BEGINNING: Final = b'{"host": "'
"""How the content of every lock begins; after a power failure it may end early."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that has a lock, for messages."""

    host: str
    process: int
    since: str

    @classmethod
    def this_process(cls) -> Self:
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return cls(socket.gethostname(), os.getpid(), now)

    @classmethod
    def in_content(cls, content: bytes) -> Self | None:
        try:
            given = json.loads(content.decode())
            return cls(str(given["host"]), int(given["process"]), str(given["since"]))
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            return None

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since}"


def nothing() -> None:
    """Do nothing."""


class AnyLock:
    """What keeps other runs from a target; itself it does not, as where the user wants no lock."""

    def take(self, look: Callable[[], object] = nothing) -> None:
        """Take the lock, and look at what it keeps; one whose holder is gone is taken over."""
        look()

    def require_held(self) -> None:
        """Refuse to go on if another run has taken the lock over."""
        return

    def release(self, finish: Callable[[], object] = nothing) -> None:
        """Finish what needs the lock, and release it if this process holds it."""
        finish()


class Lock(AnyLock):
    """A lock file that one process takes and releases."""

    def __init__(self, path: Path, what: Path) -> None:
        self._path = path
        self._what = what
        self._descriptor = -1

    def take(self, look: Callable[[], object] = nothing) -> None:
        while not self._try():
            pass
        try:
            look()
        except BaseException:
            self.release()
            raise

    def _try(self) -> bool:
        """Take the lock; False if the path no longer leads to the file that was opened."""
        descriptor, is_new = self._open()
        try:
            self._lock(descriptor)
            if not self._is_in_place(descriptor):
                return False  # its holder removed it meanwhile
            self._require_lock(descriptor)
            os.ftruncate(descriptor, 0)
            content = json.dumps(asdict(Holder.this_process())).encode()
            write_all(descriptor, memoryview(content), 0)
            self._descriptor, descriptor = descriptor, -1
        except OSError:
            if is_new:
                with ignored(FROM_OUTSIDE):
                    self._path.unlink()
            raise
        finally:
            if descriptor >= 0:
                close_unwritten(descriptor)
        return True

    def _open(self) -> tuple[int, bool]:
        """Open the lock file; tells too whether this call made it."""
        while True:
            with suppress(FileNotFoundError):
                return open_regular(self._path, os.O_RDWR), False
            try:
                return open_regular(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL), True
            except FileExistsError:
                continue
            except OSError as error:
                # Name the target: a user does not know the lock file.
                raise OSError(error.errno, error.strerror, str(self._what)) from error

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = Holder.in_content(os.pread(descriptor, _READ_BYTES, 0))
            message = f"{self._what}: another run is writing it ({holder or 'it does not say who'})"
            raise TargetLockedError(f"{message}; wait for it, or stop it") from None
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
            message = "its file system does not lock files (flock), so nothing keeps two runs from"
            message = f"{message} writing there at once. If no other run does, set {NO_LOCK}=1"
            raise OSError(error.errno, message, str(self._what)) from error

    def _is_in_place(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.lstat())
        except FileNotFoundError:
            return False

    def _require_lock(self, descriptor: int) -> None:
        content = os.pread(descriptor, _READ_BYTES, 0)
        start = content.rstrip(b"\0")[: len(_BEGINNING)]
        if len(content) == _READ_BYTES or not _BEGINNING.startswith(start):
            raise not_ours(self._path, "a file with other content than a lock's")
        require_one_name(descriptor, self._path)

    def release(self, finish: Callable[[], object] = nothing) -> None:
        try:
            finish()
        finally:
            if self._descriptor >= 0:
                with ignored(FROM_OUTSIDE):
                    self._path.unlink()
                descriptor, self._descriptor = self._descriptor, -1
                close_unwritten(descriptor)
