"""The target directory: built beside its place, made durable, then renamed into it."""

import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from streamshard.engine.files import sync_directories, sync_directory, target_errors
from streamshard.errors import NoSpaceError, TargetExistsError, TargetLockedError, UsageError
from streamshard.formats import deepspeed_names as names
from streamshard.formats.dump_names import Template

_PARTIAL: Final = ".partial"
_REPLACED: Final = ".replaced"
_LOCK: Final = ".streamshard.lock"


def require_separate(source: Path, target: Path) -> None:
    """Refuse a target that would be written into its own source, or the other way round."""
    here, there = source.resolve(), target.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise UsageError(f"{target}: lies in or around the source {source}; choose another place")


def require_free(target: Path, *, overwrite: bool, template: Template | None = None) -> None:
    """Refuse a target that exists, unless it is one of ours and may be replaced.

    A directory of dumps is ours if nothing else is in it.
    """
    if not (target.exists() or target.is_symlink()):
        return
    if not overwrite:
        raise TargetExistsError(f"{target}: exists; use --overwrite to replace it")
    if not _is_ours(target, template):
        message = f"{target}: is no checkpoint and no store, so --overwrite will not replace it"
        raise TargetExistsError(f"{message}; remove it yourself or choose another place")


def _is_ours(target: Path, template: Template | None) -> bool:
    if target.is_symlink() or not target.is_dir():
        return False
    entries = {entry.name for entry in target.iterdir()}
    if template is not None:
        return all(template.rank_of(entry) is not None for entry in entries)
    return not entries or bool(entries & {names.LATEST, "zarr.json"})


def require_space(target: Path, nbytes: int) -> None:
    """Refuse a run whose output does not fit on the target's file system."""
    place = target.absolute().parent
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if nbytes > free:
        message = f"{target}: needs {nbytes:,} bytes, {free:,} are free on its file system"
        raise NoSpaceError(f"{message}. Nothing was written; free some, or choose another place")


class PartialTarget:
    """`OUT.partial`, locked while it is being written; gone again if the run fails."""

    def __init__(self, target: Path, *, overwrite: bool, template: Template | None = None) -> None:
        self._target = target
        self._overwrite = overwrite
        self._template = template
        self._lock = -1
        self.path = target.with_name(target.name + _PARTIAL)

    def __enter__(self) -> Self:
        require_free(self._target, overwrite=self._overwrite, template=self._template)
        with target_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            # Whatever an earlier run left is not known to be whole.
            for entry in self.path.iterdir():
                if entry.name != _LOCK:
                    _remove(entry)
        return self

    def _take_lock(self) -> None:
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._lock, 100, 0).decode(errors="replace").strip()
            os.close(self._lock)
            message = f"{self._target}: another run is writing it (process {holder})"
            raise TargetLockedError(f"{message}; wait for it, or stop it") from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._lock < 0:
            return
        if kind is not None:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def commit(self, latest: str | None = None) -> None:
        """Make everything durable and move it into its place.

        Parameters
        ----------
        latest
            Tag that the `latest` file is to name; it is written after everything else.
        """
        with target_errors(self._target):
            sync_directories(self.path)
            if latest is not None:
                _write_durably(self.path / names.LATEST, latest.encode())
            (self.path / _LOCK).unlink()
            sync_directory(self.path)
            replaced = self._target.with_name(self._target.name + _REPLACED)
            if self._target.exists():
                _remove(replaced)
                self._target.rename(replaced)
            self.path.rename(self._target)
            sync_directory(self._target.absolute().parent)
            _remove(replaced)


def _write_durably(path: Path, data: bytes) -> None:
    """Write a small file so that at any moment it is either not there or whole."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
