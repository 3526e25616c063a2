"""A lock on a target, for runs on this host and on others that share its file system.

The lock is a file that names its holder. If the file system has flock(2), flock tells whether a
holder on this host is alive. If it has not, or the holder is on another host, the content of the
file decides. In doubt the holder counts as alive.
"""

import errno
import fcntl
import glob
import json
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Self

from streamshard.errors import TargetLockedError
from streamshard.io.file_system import LOCAL, boot_id, file_system_of, told_by
from streamshard.io.retry import FROM_OUTSIDE, close_unwritten, ignored
from streamshard.io.writable import not_ours, open_regular, require_one_name

_NO_LINKS: Final = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL}
"""Errors of os.link on file systems without hard links."""
_LIMIT_PROCESS: Final = 1 << 31
_READ_BYTES: Final = 4096
"""Longer than the content of any lock."""
_BEGINNING: Final = b'{"host": "'
"""How the content of every lock begins; after a power failure it may end early."""
_START_TIME: Final = 19
"""Index of the start time among the fields after the name in /proc/PID/stat."""


@dataclass(frozen=True, slots=True)
class Holder:
    host: str
    process: int
    since: str
    boot: str = ""
    """Identifier of the host's current boot."""
    namespace: str = ""
    """Identifier of the PID namespace in which the process has its number."""
    started: str = ""
    """Start time of the process, in the kernel's clock ticks since boot."""

    @classmethod
    def this_process(cls) -> Self:
        return cls(
            host=socket.gethostname(),
            process=os.getpid(),
            since=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
            boot=boot_id(),
            namespace=_namespace(),
            started=_start_time(os.getpid()),
        )

    def __str__(self) -> str:
        """Name the process for messages."""
        return f"process {self.process} on {self.host}, since {self.since}"


def nothing() -> None:
    """Do nothing."""


class AnyLock:
    """What keeps other runs from a target; itself it does not, as where the user wants no lock."""

    def take(self, look: Callable[[], object] = nothing) -> None:
        """Take the lock, and look at what it keeps; one whose holder is gone is taken over."""
        look()

    def release(self, finish: Callable[[], object] = nothing) -> None:
        """Finish what needs the lock, and release it if this process holds it."""
        finish()


class Lock(AnyLock):
    """A lock file that one process takes and releases."""

    def __init__(self, path: Path, what: Path) -> None:
        self._path = path
        self._what = what
        """What is locked, for messages."""
        self._descriptor = -1

    def take(self, look: Callable[[], object] = nothing) -> None:
        while not self._make() and not self._try():
            pass
        self._remove_temporary()
        try:
            look()
        except BaseException:
            self.release()
            raise

    def _make(self) -> bool:
        """Create the lock file, which names its holder at any moment; False if one exists."""
        new = self._path.with_name(f"{self._path.name}.new.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            descriptor = open_regular(new, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except OSError as error:
            # Name the target: a user does not know the temporary file.
            raise OSError(error.errno, error.strerror, str(self._what)) from error
        try:
            _flock(descriptor)
            _serialize(descriptor)
            self._link(new)
            self._descriptor, descriptor = descriptor, -1
        except (FileExistsError, FileNotFoundError):
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return self._make_without_links()
        finally:
            new.unlink(missing_ok=True)
            if descriptor >= 0:
                close_unwritten(descriptor)
        return True

    def _link(self, new: Path) -> None:
        try:
            os.link(new, self._path)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            # So does `rclone mount` say that it has no links.
            message = f"{error.strerror}, as a hard link was made for the lock. If a bucket is"
            message = f"{message} mounted there, give the bucket's URL, such as s3://bucket/path"
            raise OSError(error.errno, message, str(self._what)) from error

    def _make_without_links(self) -> bool:
        """Create the lock file, which for a moment is empty."""
        try:
            descriptor = open_regular(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        try:
            if _flock(descriptor) is False:
                return False  # another process found the empty file and locked it
            _serialize(descriptor)
            self._descriptor, descriptor = descriptor, -1
        finally:
            if descriptor >= 0:
                close_unwritten(descriptor)
        return True

    def _try(self) -> bool:
        """Try to take over an existing lock file; False if the path no longer leads to it."""
        try:
            descriptor = open_regular(self._path, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            is_locked = _flock(descriptor)
            if not self._is_in_place(descriptor):
                return False  # its holder removed it meanwhile
            self._require_gone(descriptor, is_locked)
            if os.fstat(descriptor).st_nlink > 1:  # a killed run may have left a temporary name
                self._remove_temporary()
            require_one_name(descriptor, self._path)
            if is_locked is None:
                return self._take_over(descriptor)
            _serialize(descriptor)
            self._descriptor, descriptor = descriptor, -1
        finally:
            if descriptor >= 0:
                close_unwritten(descriptor)
        return True

    def _is_in_place(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.lstat())
        except FileNotFoundError:
            return False

    def _require_gone(self, descriptor: int, is_locked: bool | None) -> None:
        """Raise an error if a process holds the lock, or may hold it."""
        if is_locked is not False and not _is_of_a_run(descriptor):
            raise not_ours(self._path, "a file with other content than a lock's")
        holder = holder_in(os.pread(descriptor, _READ_BYTES, 0))
        if is_locked is not False and _is_gone(holder, descriptor, has_flock=is_locked is True):
            return
        message = f"{self._what}: another run is writing it ({holder or 'it does not say who'})"
        if is_locked is False:
            raise TargetLockedError(f"{message}; wait for it, or stop it")
        raise TargetLockedError(f"{message}; wait for it, or if it is gone remove {self._path}")

    def _remove_temporary(self) -> None:
        """Remove temporary files of killed runs; a run that is just starting makes another one."""
        for left in self._path.parent.glob(f"{glob.escape(self._path.name)}.new.*"):
            with ignored(FROM_OUTSIDE | {errno.EISDIR}):
                left.unlink()

    def _take_over(self, descriptor: int) -> bool:
        """Take over a dead holder's lock without flock; creating a directory decides a race."""
        turn = self._path.with_name(f"{self._path.name}.turn")
        try:
            turn.mkdir()
        except FileExistsError:
            message = f"{self._what}: another run is taking it over"
            raise TargetLockedError(f"{message}; if that is gone remove {turn}") from None
        try:
            self._require_gone(descriptor, None)
            _serialize(descriptor)
            self._descriptor = os.dup(descriptor)
        finally:
            turn.rmdir()
        return True

    def release(self, finish: Callable[[], object] = nothing) -> None:
        try:
            finish()
        finally:
            if self._descriptor >= 0:
                with ignored(FROM_OUTSIDE):
                    self._path.unlink()
                descriptor, self._descriptor = self._descriptor, -1
                close_unwritten(descriptor)


def _flock(descriptor: int) -> bool | None:
    """Try to lock a file; None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL):
            return None
        raise
    return True


def _serialize(descriptor: int) -> None:
    data = json.dumps(asdict(Holder.this_process())).encode()
    os.pwrite(descriptor, data.ljust(len(os.pread(descriptor, _READ_BYTES, 0))), 0)
    os.ftruncate(descriptor, len(data))
    os.fsync(descriptor)  # so that it is readable after a power failure


def _is_of_a_run(descriptor: int) -> bool:
    """Tell whether a file is empty, or has what a run writes into its lock, perhaps cut off."""
    content = os.pread(descriptor, _READ_BYTES, 0)
    start = content.rstrip(b"\0")[: len(_BEGINNING)]
    return len(content) < _READ_BYTES and _BEGINNING.startswith(start)


def holder_in(content: bytes) -> Holder | None:
    """Read the holder in a lock's content; None if it does not name one."""
    try:
        holder = Holder(**json.loads(content.decode()))
    except (ValueError, TypeError, RecursionError):
        return None
    of_types = all(type(getattr(holder, one.name)) is one.type for one in fields(holder))
    return holder if of_types and 0 <= holder.process < _LIMIT_PROCESS else None


def _is_gone(holder: Holder | None, descriptor: int, *, has_flock: bool) -> bool:
    """Tell whether a holder without an flock, or on a file system without flock, is surely gone."""
    here = Holder.this_process()
    if has_flock and (file_system_of(descriptor) in LOCAL or not here.boot):
        return True
    if has_flock and holder is not None and holder.boot == here.boot != "":
        return True
    return is_gone(holder)


def is_gone(holder: Holder | None) -> bool:
    """Tell whether a holder, known only by what it wrote down, is surely gone."""
    here = Holder.this_process()
    if holder is None or not here.boot:
        return False
    if holder.boot != here.boot:
        return holder.host == here.host  # this host has rebooted since
    if holder.namespace != here.namespace:
        return False
    return _start_time(holder.process) != holder.started


def _start_time(process: int) -> str:
    """Return the start time of a process; empty if no process has that number."""
    fields = told_by(f"/proc/{int(process)}/stat").rpartition(")")[2].split()
    return fields[_START_TIME] if len(fields) > _START_TIME else ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    except OSError:
        return ""
