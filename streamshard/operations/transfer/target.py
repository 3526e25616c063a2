"""Which places may become a target: free ones, and what is ours and may be replaced."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from streamshard.engine.io.files import target_errors
from streamshard.engine.io.mounts import is_mount_point
from streamshard.engine.run.journal import Journal
from streamshard.errors import NoSpaceError, TargetExistsError, UsageError
from streamshard.formats import pretrained
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.dumps.dump_names import Template
from streamshard.formats.frameworks import framework_of
from streamshard.formats.zarr.zarr_reader import is_store
from streamshard.model import SourceFile
from streamshard.posix import entries_below

JOURNAL: Final = f"{names.OWN_PREFIX}.journal"
"""File in a partial target that says what of it is written."""
_BLOCK_BYTES: Final = 512
"""In what stat(2) counts, whatever the file system has for blocks."""


def partial_of(target: Path) -> Path:
    """Where a target is built."""
    return target.with_name(f"{target.name}.partial")


def replaced_of(target: Path) -> Path:
    """Where what was at a target's place is until the new one is there."""
    return target.with_name(f"{target.name}.replaced")


def place_to_make(target: Path) -> Path:
    """Return where a target is made: where it leads, if it is a link to a directory that is free.

    What is built beside the directory takes its place, and the link stays. It leads there still
    when a run was killed that had made the target, and had not yet removed its journal.
    """
    with target_errors(target):
        if target.is_symlink() and target.is_dir():
            directory = target.resolve()
            if is_vacant(directory) or Journal(directory / JOURNAL).is_whole:
                return directory
    return target


def require_separate(source: Path, files: Sequence[SourceFile], target: Path) -> None:
    """Refuse a target that would be written into its own source, or the other way round."""
    here = {source.resolve(), *{file.path.parent.resolve() for file in files}}
    for place in (target, partial_of(target), replaced_of(target)):
        there = place.resolve()
        if any(h == there or h in there.parents or there in h.parents for h in here):
            message = f"{target}: lies in or around the source {source}"
            if place != target:
                message = f"{place}: is needed to make {target}, and holds the source"
            raise UsageError(f"{message}; choose another place")


def require_other(source: str | os.PathLike[str], target: Path) -> None:
    """Refuse a target that is the source, before anyone is told how to overwrite it."""
    if target.resolve() == Path(source).resolve():
        raise UsageError(f"{target}: is the source itself; choose another place")


def require_named(target: Path) -> None:
    """Refuse a target that has no name by which others can be put beside it."""
    if target.name in ("", ".."):
        raise UsageError(f"{target}: is no name for a new directory; write it out")


def require_free(target: Path, *, overwrite: bool, template: Template | None = None) -> None:
    """Refuse a target that exists, unless it is empty, or is one of ours and may be replaced.

    A directory of dumps is ours if nothing else is in it. What an earlier run has left is in
    nobody's way: it may be gone on from, or is put in order first.
    """
    require_named(target)
    with target_errors(target):
        _require_free(target, overwrite=overwrite, template=template)


def _require_free(target: Path, *, overwrite: bool, template: Template | None) -> None:
    if Journal(target / JOURNAL).is_whole:
        return
    partial, replaced = partial_of(target), replaced_of(target)
    begun = Journal(partial / JOURNAL)
    if exists(replaced) and not (is_vacant(target) and replaces(begun)):
        message = f"{replaced}: is in the way, and was not left by an --overwrite that was cut off"
        raise TargetExistsError(f"{message}; move it, or choose another target")
    if exists(partial) and begun.header is None and not _may_be_cleared(partial):
        message = f"{partial}: is in the way, and was not left by a run that was cut off"
        raise TargetExistsError(f"{message}; move it, or choose another target")
    if exists(target):
        _require_place(target)
    if is_vacant(target):
        return
    if not overwrite and not replaces(begun):
        raise TargetExistsError(f"{target}: exists; use --overwrite to replace it")
    if not _is_ours(target, template):
        message = f"{target}: holds more than one checkpoint or store of ours, so --overwrite will"
        raise TargetExistsError(f"{message} not replace it; remove it yourself")


def _require_place(target: Path) -> None:
    """Refuse a directory whose place another one cannot take, by a rename, as it is."""
    if not target.is_dir() or target.is_symlink():
        return
    reason = None
    if is_mount_point(target):
        reason = "is a mount point, which no other directory can take the place of"
    elif not os.access(target.absolute().parent, os.W_OK | os.X_OK):
        reason = f"its place cannot be taken, as {target.absolute().parent} may not be written"
    elif os.geteuid() not in (0, owner := target.stat().st_uid):
        reason = f"belongs to user {owner}, and user {os.geteuid()} can make no directory for them"
    if reason is not None:
        message = f"{target}: {reason}; what is made is built beside its place and then renamed"
        raise TargetExistsError(f"{message}. Give a new name in it: {target / 'NAME'}")


def replaces(journal: Journal) -> bool:
    """Tell whether the run of a journal may replace what is at its target."""
    return journal.header is not None and journal.header.get("replaces") is True


def exists(path: Path) -> bool:
    """Tell whether there is anything, if only a link that leads nowhere."""
    return path.exists() or path.is_symlink()


def is_vacant(path: Path) -> bool:
    """Tell whether a directory can be renamed to a path: nothing is there, or an empty one."""
    if path.is_symlink() or not path.is_dir():
        return not exists(path)
    with os.scandir(path) as entries:
        return next(entries, None) is None


def is_there(path: Path) -> bool:
    """Tell whether there is anything, where nobody catches what the system says.

    Raises
    ------
    TargetError
        That cannot be found out.
    """
    with target_errors(path):
        return exists(path)


def _may_be_cleared(partial: Path) -> bool:
    """Tell whether a directory is one that a run had only begun to make."""
    if partial.is_symlink() or not partial.is_dir():
        return False
    return all(entry.name.startswith(JOURNAL) for entry in partial.iterdir())


def _is_ours(target: Path, template: Template | None) -> bool:
    """Tell whether a directory is one checkpoint, store, set of dumps or export, and no more."""
    if target.is_symlink() or not target.is_dir():
        return False
    entries = list(target.iterdir())
    if template is not None:
        return all(template.rank_of(entry.name) is not None for entry in entries)
    if (target / "zarr.json").is_file():
        return is_store(target)
    files = [path for path in entries_below(target) if path.is_symlink() or not path.is_dir()]
    if pretrained.is_export([path.relative_to(target).as_posix() for path in files]):
        return True
    found = {entry.name for entry in entries if entry.is_dir()}
    universal = _named(target / names.LATEST_UNIVERSAL)
    if universal and {entry.name for entry in entries} == {
        names.LATEST_UNIVERSAL, universal.partition("/")[0]
    }:  # fmt: skip
        return _is_alone(target, universal)
    tag = _named(target / names.LATEST)
    if framework_of(tag, [entry.name for entry in entries]) is not None:
        return tag.partition("/")[0] in found and _is_alone(target, tag)
    return not entries or (found == {tag.partition("/")[0]} and _is_alone(target, tag))


def _is_alone(target: Path, tag: str) -> bool:
    """Tell whether the directories that a tag lies in, if it is a path, hold nothing else."""
    parts = Path(tag).parts
    if not names.is_tag(tag) or not (target / tag).is_dir():
        return False
    levels = [target.joinpath(*parts[:depth]) for depth in range(1, len(parts))]
    return all(
        [entry.name for entry in level.iterdir()] == [parts[depth]]
        for depth, level in enumerate(levels, start=1)
    )


def _named(file: Path) -> str:
    """Read which tag a file names; empty if there is no such file."""
    return file.read_text(errors="replace").strip() if file.is_file() else ""


def require_space(target: Path, nbytes: int) -> None:
    """Refuse a run whose output does not fit on the target's file system.

    What an earlier run has left is counted: either it is kept, or it is removed first.
    """
    with target_errors(target):
        free = shutil.disk_usage(place_of(target)).free + allocated_bytes(partial_of(target))
    if nbytes > free:
        message = f"{target}: needs {nbytes:,} bytes, {free:,} are free on its file system"
        raise NoSpaceError(f"{message}. Nothing was written; free some, or choose another place")


def place_of(target: Path) -> Path:
    """Return the directory that a target is to be made in, or the nearest around it that exists."""
    place = target.absolute().parent
    while not place.exists():
        place = place.parent
    return place


def allocated_bytes(root: Path) -> int:
    """Count what the files below a directory take of its file system."""
    if not exists(root):
        return 0
    return sum(path.lstat().st_blocks * _BLOCK_BYTES for path in entries_below(root))


def remove(path: Path) -> None:
    """Remove a directory with all that is in it, or a file.

    Raises
    ------
    OSError
        Something cannot be removed; it names the path that was given.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        # What rmtree names is relative to a directory that it does not name.
        raise OSError(error.errno, error.strerror, str(path)) from error
