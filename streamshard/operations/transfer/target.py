"""Decides which paths may become a target: free ones, and our own that may be replaced."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from streamshard.engine.journals.journal import Journal
from streamshard.errors import NoSpaceError, Option, TargetExistsError, UsageError
from streamshard.formats import pretrained
from streamshard.formats.dcp import dcp_names
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.dumps.dump_names import Template
from streamshard.formats.frameworks import framework_of
from streamshard.formats.zarr.store_index import is_store
from streamshard.io.entries import (
    exists,
    files_below,
    is_directory,
    is_file,
    is_link,
    is_real_directory,
    lexists,
    paths_in,
    resolve,
)
from streamshard.io.file_system import is_mount_point
from streamshard.io.files import target_errors
from streamshard.io.object_path import ObjectPath, as_path, is_object
from streamshard.io.place import place_of
from streamshard.model import SourceFile
from streamshard.operations.source.unfinished import COMMITTED, JOURNAL
from streamshard.registry import REQUIRE_FREE_OBJECTS, load

LOCK: Final = f"{names.OWN_PREFIX}.lock"

_OVERWRITE: Final = Option("overwrite", True)


def partial_of(target: Path) -> Path:
    """Return the path where a target is built."""
    return target.with_name(f"{target.name}.partial")


def replaced_of(target: Path) -> Path:
    """Return the path that holds the old target until the new one is in place."""
    return target.with_name(f"{target.name}.replaced")


def place_to_make(target: Path) -> Path:
    """Return the path of a target: if it is a link to a free directory, that directory's path.

    The target is built next to the directory and takes its place, and the link stays. This holds
    too for a target that a run had completed when it was killed, but whose journal is still there.
    """
    with target_errors(target):
        if is_link(target) and is_directory(target):
            directory = resolve(target)
            if is_vacant(directory) or Journal(directory / JOURNAL).is_whole:
                return directory
    return target


def require_separate(source: Path, files: Sequence[SourceFile], target: Path) -> None:
    """Refuse a target that lies in its own source, or the other way round."""
    here = {resolve(source), *{resolve(file.path.parent) for file in files}}
    for place in (target, partial_of(target), replaced_of(target)):
        there = resolve(place)
        if any(h == there or h in there.parents or there in h.parents for h in here):
            message = f"{target}: lies in or around the source {source}"
            if place != target:
                message = f"{place}: is needed to make {target}, and holds the source"
            raise UsageError(f"{message}; choose another place")


def require_other(source: str | os.PathLike[str], target: Path) -> None:
    """Refuse a target that is the source, before a message advises to overwrite."""
    if resolve(target) == resolve(as_path(source)):
        raise UsageError(f"{target}: is the source itself; choose another place")


def require_named(target: Path) -> None:
    """Refuse a target without a name, from which the names next to it are made."""
    if target.name in ("", "..") or (isinstance(target, ObjectPath) and not target.key):
        raise UsageError(f"{target}: is not a name for a new directory; write it out")


def require_free(target: Path, *, overwrite: bool, template: Template | None = None) -> None:
    """Refuse a target that exists, unless it is empty, or is one of ours and may be replaced.

    A directory of dumps is ours if nothing else is in it. The remains of an earlier run are
    allowed: the run is continued, or its renaming is finished first.
    """
    require_named(target)
    with target_errors(target):
        _require_free(target, overwrite=overwrite, template=template)


def _require_free(target: Path, *, overwrite: bool, template: Template | None) -> None:
    if is_object(target):
        load(REQUIRE_FREE_OBJECTS)(target, overwrite=overwrite, template=template)
        return
    if Journal(target / JOURNAL).is_whole:
        return
    partial, replaced = partial_of(target), replaced_of(target)
    begun = Journal(partial / JOURNAL)
    if lexists(replaced) and not (is_vacant(target) and replaces(begun.header)):
        message = f"{replaced}: is in the way, and was not left by a run that was cut off"
        raise TargetExistsError(f"{message}; move it, or choose another target")
    is_of_a_run = is_real_directory(partial) and (
        begun.header is not None or _may_be_cleared(partial)
    )
    if lexists(partial) and not is_of_a_run:
        message = f"{partial}: is in the way, and was not left by a run that was cut off"
        raise TargetExistsError(f"{message}; move it, or choose another target")
    if lexists(target):
        _require_place(target)
    if is_vacant(target):
        return
    if not overwrite and not replaces(begun.header):
        raise TargetExistsError(f"{target}: exists; use {_OVERWRITE} to replace it")
    if not is_ours(target, template):
        message = f"{target}: holds more than one checkpoint or store of ours, so {_OVERWRITE} will"
        raise TargetExistsError(f"{message} not replace it; remove it yourself")


def _require_place(target: Path) -> None:
    """Refuse a directory that another one cannot replace by a rename."""
    if not is_real_directory(target):
        return
    reason = None
    if is_mount_point(target):
        reason = "is a mount point, which no other directory can take the place of"
    elif not place_of(target).may_change(target.absolute().parent):
        reason = f"its place cannot be taken, as {target.absolute().parent} may not be written"
    elif (owner := place_of(target).foreign_owner(target)) is not None:
        reason = f"belongs to user {owner}, and user {os.geteuid()} can make no directory for them"
    if reason is not None:
        message = f"{target}: {reason}; what is made is built next to its place and then renamed"
        raise TargetExistsError(f"{message}. Give a new name in it: {target / 'NAME'}")


def replaces(header: Mapping[str, Any] | None) -> bool:
    """Tell whether the run that a journal identifies may replace an existing target."""
    return header is not None and header.get("replaces") is True


def is_vacant(path: Path) -> bool:
    """Tell whether a directory can be renamed to a path: it is free, or an empty directory."""
    if not is_real_directory(path):
        return not lexists(path)
    return next(paths_in(path), None) is None


def is_there(path: Path) -> bool:
    """Tell whether a path exists, as `lexists`, for callers that do not catch OSError."""
    with target_errors(path):
        return lexists(path)


def _may_be_cleared(partial: Path) -> bool:
    """Tell whether a partial target holds no more than a journal, and so may be removed."""
    return all(entry.name.startswith(JOURNAL) for entry in paths_in(partial))


def is_ours(target: Path, template: Template | None) -> bool:
    """Tell whether a directory is one checkpoint, store, set of dumps or export, and no more."""
    if not is_real_directory(target):
        return False
    entries = [path for path in paths_in(target) if path.name not in (COMMITTED, JOURNAL)]
    if template is not None:
        return all(template.rank_of(entry.name) is not None for entry in entries)
    if is_file(target / "zarr.json"):
        return is_store(target)
    files = [path.relative_to(target) for path in files_below(target)]
    paths = [path.as_posix() for path in files if path.parts[0] not in (COMMITTED, JOURNAL)]
    if pretrained.is_export(paths) or dcp_names.is_dcp(paths):
        return True
    found = {entry.name for entry in entries if is_directory(entry)}
    universal = names.latest_of(target, names.LATEST_UNIVERSAL)
    if universal and {entry.name for entry in entries} == {
        names.LATEST_UNIVERSAL, universal.partition("/")[0]
    }:  # fmt: skip
        return _is_alone(target, universal)
    tag = names.latest_of(target) or ""
    if framework_of(tag, [entry.name for entry in entries]) is not None:
        return tag.partition("/")[0] in found and _is_alone(target, tag)
    return not entries or (found == {tag.partition("/")[0]} and _is_alone(target, tag))


def _is_alone(target: Path, tag: str) -> bool:
    """Tell whether the parent directories of a tag that is a path hold nothing else."""
    parts = Path(tag).parts
    if not names.is_tag(tag) or not is_directory(target / tag):
        return False
    levels = [target.joinpath(*parts[:depth]) for depth in range(1, len(parts))]
    return all(
        [entry.name for entry in paths_in(level)] == [parts[depth]]
        for depth, level in enumerate(levels, start=1)
    )


def require_space(target: Path, nbytes: int) -> None:
    """Refuse a run whose output does not fit on the target's file system.

    Space that an earlier run's partial target takes counts as free: it is kept or removed first.
    """
    with target_errors(target):
        place = place_of(target)
        free = place.free_bytes(nearest_directory(target))
        free += place.allocated_bytes(partial_of(target))
    if nbytes > free:
        message = f"{target}: needs {nbytes:,} bytes, {free:,} are free on its file system"
        raise NoSpaceError(f"{message}. Nothing was written; free some, or choose another place")


def nearest_directory(target: Path) -> Path:
    """Return the parent directory of a target, or the nearest parent that exists."""
    directory = target.absolute().parent
    while not is_object(directory) and not exists(directory):
        directory = directory.parent
    return directory
