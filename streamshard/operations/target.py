"""The target directory: built beside its place, made durable, then renamed into it."""

import fcntl
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from streamshard.engine.durability import sync_path
from streamshard.engine.files import target_errors
from streamshard.errors import NoSpaceError, TargetExistsError, TargetLockedError, UsageError
from streamshard.formats import deepspeed_names as names
from streamshard.formats.dump_names import Template
from streamshard.formats.frameworks import framework_of
from streamshard.formats.zarr_reader import is_store
from streamshard.model import SourceFile

_PARTIAL: Final = ".partial"
_REPLACED: Final = ".replaced"
_LOCK: Final = f"{names.OWN_PREFIX}.lock"
_MARK: Final = f"{names.OWN_PREFIX}.partial"
"""File that says of a partial target that it is one, and may be cleared."""


def _beside(target: Path, suffix: str) -> Path:
    return target.with_name(target.name + suffix)


def require_separate(source: Path, files: Sequence[SourceFile], target: Path) -> None:
    """Refuse a target that would be written into its own source, or the other way round."""
    here = {source.resolve(), *{file.path.parent.resolve() for file in files}}
    for place in (target, _beside(target, _PARTIAL), _beside(target, _REPLACED)):
        there = place.resolve()
        if any(h == there or h in there.parents or there in h.parents for h in here):
            message = f"{target}: lies in or around the source {source}"
            if place != target:
                message = f"{place}: is needed to make {target}, and holds the source"
            raise UsageError(f"{message}; choose another place")


def require_free(target: Path, *, overwrite: bool, template: Template | None = None) -> None:
    """Refuse a target that exists, unless it is one of ours and may be replaced.

    A directory of dumps is ours if nothing else is in it.
    """
    if target.name in ("", ".."):
        raise UsageError(f"{target}: is no name for a new directory; write it out")
    replaced = _beside(target, _REPLACED)
    if _exists(replaced):
        message = (
            f"{replaced}: left by an --overwrite that was interrupted; it is what {target} was"
        )
        raise TargetExistsError(f"{message} before. Move it back, or remove it")
    partial = _beside(target, _PARTIAL)
    if _exists(partial) and not _may_be_cleared(partial):
        message = f"{partial}: is in the way, and was not left by a run that failed"
        raise TargetExistsError(f"{message}; move it, or choose another target")
    if not _exists(target):
        return
    if not overwrite:
        raise TargetExistsError(f"{target}: exists; use --overwrite to replace it")
    if not _is_ours(target, template):
        message = f"{target}: holds more than one checkpoint or store of ours, so --overwrite will"
        raise TargetExistsError(f"{message} not replace it; remove it yourself")


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _may_be_cleared(partial: Path) -> bool:
    if partial.is_symlink() or not partial.is_dir():
        return False
    return (partial / _MARK).is_file() or not any(partial.iterdir())


def _is_ours(target: Path, template: Template | None) -> bool:
    """Tell whether a directory is one checkpoint, one store or one set of dumps, and no more."""
    if target.is_symlink() or not target.is_dir():
        return False
    entries = list(target.iterdir())
    if template is not None:
        return all(template.rank_of(entry.name) is not None for entry in entries)
    if (target / "zarr.json").is_file():
        return is_store(target)
    latest = target / names.LATEST
    tag = latest.read_text(errors="replace").strip() if latest.is_file() else ""
    found = {entry.name for entry in entries if entry.is_dir()}
    if framework_of(tag, [entry.name for entry in entries]) is not None:
        return tag in found
    return not entries or found == {tag}


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
        self._target = target.absolute()
        self._overwrite = overwrite
        self._template = template
        self._lock = -1
        self._lock_path = self._target.with_name(f"{_LOCK}.{target.name}")
        self._made: list[Path] = []
        """Parents that were made for the target, innermost first."""
        self.path = _beside(self._target, _PARTIAL)

    def __enter__(self) -> Self:
        with target_errors(self.path):
            self._made = [p for p in self._target.parents if not p.exists()]
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            try:
                self._clear()
            except BaseException:
                self._release_lock()
                raise
        return self

    def _clear(self) -> None:
        """Begin afresh: what an earlier run left is not known to be whole."""
        require_free(self._target, overwrite=self._overwrite, template=self._template)
        self.path.mkdir(exist_ok=True)
        (self.path / _MARK).touch()
        for entry in self.path.iterdir():
            if entry.name != _MARK:
                _remove(entry)

    def _take_lock(self) -> None:
        """Lock a file beside the target, which stays in its place until all is done."""
        while True:
            self._lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(self._lock, 100, 0).decode(errors="replace").strip()
                os.close(self._lock)
                message = f"{self._target}: another run is writing it (process {holder})"
                raise TargetLockedError(f"{message}; wait for it, or stop it") from error
            if self._holds_lock():
                break
            os.close(self._lock)  # its last holder removed the file after we had opened it
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _holds_lock(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._lock), self._lock_path.stat())
        except FileNotFoundError:
            return False

    def _release_lock(self) -> None:
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            shutil.rmtree(self.path, ignore_errors=True)
        self._release_lock()

    def commit(self, latest: str | None = None) -> None:
        """Move what was written, and is durable, into its place.

        Parameters
        ----------
        latest
            Tag that the `latest` file is to name; it is written after everything else.
        """
        with target_errors(self._target):
            if latest is not None:
                _write_durably(self.path / names.LATEST, latest.encode())
            (self.path / _MARK).unlink()
            sync_path(self.path)
            self._swap_in()
            for parent in (self._target.parent, *(made.parent for made in self._made)):
                sync_path(parent)

    def _swap_in(self) -> None:
        """Put the new directory into its place; what was there comes back if that fails."""
        replaced = _beside(self._target, _REPLACED)
        if not _exists(self._target):
            self.path.rename(self._target)
            return
        self._target.rename(replaced)
        try:
            self.path.rename(self._target)
        except BaseException:
            replaced.rename(self._target)
            raise
        _remove(replaced)


def _write_durably(path: Path, data: bytes) -> None:
    """Write a small file so that at any moment it is either not there or whole."""
    temporary = path.with_name(f"{names.OWN_PREFIX}.{path.name}")
    with temporary.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
