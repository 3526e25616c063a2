"""A lock on a target, for runs on this host and on others that share its file system.

The lock is a file with who holds it. Where the file system has flock(2), that tells whether a
holder on this host lives; where it has not, or the holder is on another host, what is in the file
has to do. In doubt the holder lives.
"""

import errno
import fcntl
import glob
import json
import os
import secrets
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Self

from streamshard.engine.io.file_system import LOCAL, file_system_of
from streamshard.errors import TargetLockedError

_NO_LINKS: Final = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL}
"""What os.link says on file systems that have no hard links."""
_READ_BYTES: Final = 4096
_START_TIME: Final = 19
"""Which of the fields behind the name in /proc/PID/stat is the start time."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock."""

    host: str
    process: int
    since: str
    boot: str = ""
    """Identifies the time since the host was started."""
    namespace: str = ""
    """Identifies those among whom the process has its number."""
    started: str = ""
    """When the process was started, in the kernel's own time."""

    @classmethod
    def this_process(cls) -> Self:
        """Describe the process that asks."""
        return cls(
            host=socket.gethostname(),
            process=os.getpid(),
            since=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
            boot=_read_text("/proc/sys/kernel/random/boot_id"),
            namespace=_namespace(),
            started=_start_time(os.getpid()),
        )

    def __str__(self) -> str:
        """Say who it is."""
        return f"process {self.process} on {self.host}, since {self.since}"


class Lock:
    """One process's hold on a file."""

    def __init__(self, path: Path, what: Path) -> None:
        self._path = path
        self._what = what
        """What is locked, for messages."""
        self._descriptor = -1

    def take(self) -> None:
        """Take the lock, also over from a holder that is gone.

        Raises
        ------
        TargetLockedError
            Another run holds it; the message says who, and what to do if that is gone.
        OSError
            The file cannot be made.
        """
        while not self._make() and not self._try():
            pass
        # Of those who did not come so far; who is on the way there makes another.
        with suppress(OSError):
            for left in self._path.parent.glob(f"{glob.escape(self._path.name)}.new.*"):
                left.unlink(missing_ok=True)

    def _make(self) -> bool:
        """Make the file, in which it says at any moment who holds it; False if there is one."""
        new = self._path.with_name(f"{self._path.name}.new.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            # That a file of ours cannot be made tells nobody which of their directories it is.
            raise OSError(error.errno, error.strerror, str(self._what)) from error
        try:
            _flock(descriptor)
            _spell(descriptor)
            os.link(new, self._path)
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
                os.close(descriptor)
        return True

    def _make_without_links(self) -> bool:
        """Make the file, in which for a moment nothing is said."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
        except FileExistsError:
            return False
        try:
            if _flock(descriptor) is False:
                return False  # somebody has it who found it empty
            _spell(descriptor)
            self._descriptor, descriptor = descriptor, -1
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return True

    def _try(self) -> bool:
        """Try to take over the lock that is there; False if it is not the one that counts."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            is_locked = _flock(descriptor)
            if not self._is_in_place(descriptor):
                return False  # its holder removed it meanwhile
            self._require_gone(descriptor, is_locked)
            if is_locked is None:
                return self._take_over(descriptor)
            _spell(descriptor)
            self._descriptor, descriptor = descriptor, -1
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return True

    def _is_in_place(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        except FileNotFoundError:
            return False

    def _require_gone(self, descriptor: int, is_locked: bool | None) -> None:
        """Refuse a lock that somebody holds, or may hold."""
        holder = _holder(descriptor)
        if is_locked is not False and _is_gone(holder, descriptor, has_flock=is_locked is True):
            return
        message = f"{self._what}: another run is writing it ({holder or 'it does not say who'})"
        if is_locked is False:
            raise TargetLockedError(f"{message}; wait for it, or stop it")
        raise TargetLockedError(f"{message}; wait for it, or if it is gone remove {self._path}")

    def _take_over(self, descriptor: int) -> bool:
        """Make a dead holder's lock this process's where there is no flock to say who is first."""
        turn = self._path.with_name(f"{self._path.name}.turn")
        try:
            turn.mkdir()
        except FileExistsError:
            message = f"{self._what}: another run is taking it over"
            raise TargetLockedError(f"{message}; if that is gone remove {turn}") from None
        try:
            self._require_gone(descriptor, None)
            _spell(descriptor)
            self._descriptor = os.dup(descriptor)
        finally:
            turn.rmdir()
        return True

    def release(self) -> None:
        """Give the lock back, if it is held."""
        if self._descriptor >= 0:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def _flock(descriptor: int) -> bool | None:
    """Try to lock a file; None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL):
            return None
        raise
    return True


def _spell(descriptor: int) -> None:
    """Write into the file who holds it now."""
    data = json.dumps(asdict(Holder.this_process())).encode()
    os.pwrite(descriptor, data.ljust(len(os.pread(descriptor, _READ_BYTES, 0))), 0)
    os.ftruncate(descriptor, len(data))
    os.fsync(descriptor)  # for who finds it after a power failure


def _holder(descriptor: int) -> Holder | None:
    """Read who holds a file; None if it does not tell."""
    try:
        return Holder(**json.loads(os.pread(descriptor, _READ_BYTES, 0)))
    except (ValueError, TypeError, RecursionError):
        return None


def _is_gone(holder: Holder | None, descriptor: int, *, has_flock: bool) -> bool:
    """Tell whether a holder that keeps no flock, or can keep none, has ended for sure."""
    here = Holder.this_process()
    if has_flock and (file_system_of(descriptor) in LOCAL or not here.boot):
        return True
    if holder is None or not here.boot:
        return False
    if holder.boot != here.boot:
        return holder.host == here.host  # which was started anew since then
    if has_flock:
        return True
    if holder.namespace != here.namespace:
        return False
    return _start_time(holder.process) != holder.started


def _start_time(process: int) -> str:
    """Return when a process was started; empty if there is none of that number."""
    fields = _read_text(f"/proc/{int(process)}/stat").rpartition(")")[2].split()
    return fields[_START_TIME] if len(fields) > _START_TIME else ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    except OSError:
        return ""


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
