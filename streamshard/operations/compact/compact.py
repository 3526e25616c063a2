"""`compact`: archives old tags of a run directory, and with `delete` removes them."""

import os
import re
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from streamshard.engine.jobs.executor import current_executor
from streamshard.engine.run import resident_memory
from streamshard.engine.run.memory_limits import Limits
from streamshard.engine.run.phases import Silent
from streamshard.errors import Option, SourceNotFoundError, UsageError
from streamshard.io.entries import is_directory, is_real_directory, lexists, paths_in, resolve
from streamshard.io.files import source_errors
from streamshard.io.object_path import as_path, is_object
from streamshard.operations.compact.compact_report import CompactedTag, Compaction
from streamshard.operations.compact.compact_run import CompactRun
from streamshard.operations.compact.prune import matches, require_pattern
from streamshard.operations.compact.run_context import TagProgress
from streamshard.operations.compact.run_directory import require_on_disk
from streamshard.options import option, takes
from streamshard.transfer.report import Watched
from streamshard.verb_options import CompactOptions

_WILD: Final = re.compile(r"[*?[]")


class _Compact(CompactOptions, Watched):
    now: datetime | None = option()


@takes(_Compact)
def compact(options: _Compact) -> Compaction:
    """Archive the old tags of a run directory, each into a compressed store of its own.

    If one tag fails, the result says so, and the run continues with the others.

    Nothing in the run directory changes without `delete`, `undelete` or `purge`; with these or
    `acknowledge`, the named tags alone are dealt with. Use one archive directory for each run
    directory. `now`: time from which ages are counted, by default the present.

    Raises
    ------
    UsageError
        The arguments are invalid, or contradict each other, or the run directory is in a bucket.
    IncompleteError
        No `latest` says which tag is needed, so nothing is changed.
    TargetLockedError
        Another run is active.
    """
    began = time.monotonic()
    now = options.now or datetime.now(UTC)
    if now.tzinfo is None:
        raise UsageError(f"now={now}: has no time zone")
    limits = Limits(resident_memory.resident_bytes(), options.memory_limit, options.workers)
    run_dir = as_path(options.run_dir).absolute()
    archive_dir = as_path(options.archive_dir).absolute()
    require_on_disk(run_dir)
    if options.tags is not None:
        require_pattern(options.tags)
        if options.is_by_hand:
            message = "chooses for runs by the rules; with the names of tags, leave it out"
            raise UsageError(f"{Option('tags', options.tags)}: {message}")
    _require_apart(run_dir, archive_dir)
    if not current_executor().shares_memory:
        _require_for_cluster(options)
    progress = TagProgress(options.progress or Silent(), options.bytes_per_second)
    run = CompactRun(options, run_dir, archive_dir, limits, now, progress)
    found = tuple(run.results())
    seconds = time.monotonic() - began
    patterns = () if options.is_by_hand else options.keep_tags
    notes = tuple(_unmatched(patterns, found))
    places = str(options.run_dir), str(options.archive_dir)
    return Compaction(*places, options.dry_run, found, seconds, notes)


def _require_for_cluster(options: CompactOptions) -> None:
    if options.packed:
        message = "a cluster writes no archives of one file; leave it out"
        raise UsageError(f"{Option('packed', True)}: {message}")
    if options.bytes_per_second is not None:
        message = "workers of a cluster keep to no rate; leave it out"
        raise UsageError(f"{Option('bytes_per_second', options.bytes_per_second)}: {message}")


def _unmatched(patterns: Sequence[str], tags: Sequence[CompactedTag]) -> Iterator[str]:
    for pattern in patterns:
        if not any(matches(tag.tag, pattern) for tag in tags):
            yield f"{Option('keep_tags', [pattern])}: no tag has such a name"


def _require_apart(run_dir: Path, archive_dir: Path) -> None:
    here, there = resolve(run_dir), resolve(archive_dir)
    if here == there or here in there.parents or there in here.parents:
        message = f"{archive_dir}: lies in or around {run_dir}; choose another place, best on"
        raise UsageError(f"{message} another disk")


def runs_like(pattern: str, archive_dir: str) -> list[tuple[Path, Path]] | None:
    """List the run directories that a pattern matches, each with its archives' directory.

    That one has the same path below `archive_dir` as the run directory below the part of the
    pattern that has no wildcards. Links, and names that begin with a dot, are no run directories.
    Returns None for the path of a single run directory.
    """
    if _WILD.search(pattern) is None:
        return None
    if is_object(as_path(pattern)):
        raise UsageError(f"{pattern}: patterns match directories on a disk only")
    if lexists(Path(pattern)):
        return None
    parts = Path(pattern).parts
    first = next(number for number, part in enumerate(parts) if _WILD.search(part))
    if any(part in ("**", "..") for part in parts[first:]):
        raise UsageError(
            f"{pattern}: '**' and '..' may give one run twice; use a '*' for each level"
        )
    root = Path(*parts[:first])
    found = [root]
    for part in parts[first:]:
        with source_errors(root):
            found = [path for directory in found for path in _matching(directory, part)]
    if not found:
        raise SourceNotFoundError(f"{pattern}: matches no directory")
    return [(run, as_path(archive_dir) / os.path.relpath(run, root)) for run in sorted(found)]


def _matching(directory: Path, pattern: str) -> list[Path]:
    if not is_directory(directory):
        return []
    return [
        path
        for path in paths_in(directory)
        if fnmatchcase(path.name, pattern) and path.name[0] != "." and is_real_directory(path)
    ]
