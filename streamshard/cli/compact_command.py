"""`compact` on the command line: one run directory or many, and `--status`."""

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Final

from streamshard.cli.parser import keywords
from streamshard.cli.progress import display
from streamshard.cli.streams import print_json, print_result, print_text, tell, tell_error
from streamshard.cli.text.compact_text import compaction_text, problem_text, status_text
from streamshard.cli.text.escaping import one_line
from streamshard.errors import (
    SourceError,
    SourceNotFoundError,
    StreamshardError,
    TargetLockedError,
    UsageError,
    memory_errors,
)
from streamshard.io.changes import make_directory
from streamshard.io.entries import is_directory, is_real_directory, lexists, paths_in
from streamshard.io.files import source_errors, target_errors
from streamshard.io.object_path import as_path, is_object
from streamshard.io.throttle import lower_priority
from streamshard.operations.compact import compact
from streamshard.operations.compact.compact_status import CompactStatus, compact_status, draw_status
from streamshard.operations.compact.run_directory import require_parent
from streamshard.sizes import show_bytes
from streamshard.verb_options import CompactOptions

_WILD: Final = re.compile(r"[*?[]")
_CHANGING: Final = ("delete", "dry_run", "undelete", "purge", "acknowledge")
"""Options that say what a run is to do."""

_Directories = tuple[str | Path, str | Path]
"""A run directory, and the directory of its archives."""


def run_compact(arguments: argparse.Namespace) -> int:
    """Run the verb; returns the exit code."""
    _require_sense(arguments)
    runs = runs_like(arguments.run_dir, arguments.archive_dir)
    if arguments.status:
        _show_status(runs or [(arguments.run_dir, arguments.archive_dir)], arguments)
        return 0
    # Someone who waits at a terminal shares the processors; a night takes what is left.
    lower_priority(5 if any(map(os.isatty, range(3))) else 19)
    return _compact(arguments, runs)


def _require_sense(arguments: argparse.Namespace) -> None:
    """Refuse options of the command line alone that contradict each other."""
    if arguments.html and not arguments.status:
        raise UsageError("--html: is a form of --status; give both")
    for name in _CHANGING if arguments.status else ():
        if getattr(arguments, name):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"--status: only reports; leave {option} out")


def _compact(arguments: argparse.Namespace, runs: Sequence[_Directories] | None) -> int:
    """Compact one run directory, or each of `runs`; returns the first exit code that is not 0."""
    require_parent(as_path(arguments.archive_dir))
    if runs is None:
        return _compact_run(arguments)
    if CompactOptions(**keywords(arguments)).is_by_hand:
        raise UsageError(f"{arguments.run_dir}: to name tags, give the one run that they are of")
    codes = [_compact_one_of_many(arguments, *run) for run in runs]
    return next(filter(None, codes), 0)


def _compact_one_of_many(
    arguments: argparse.Namespace, run: str | Path, archive: str | Path
) -> int:
    """Compact one of several runs; an error is reported, and stops no other run."""
    one = argparse.Namespace(
        **{**vars(arguments), "run_dir": str(run), "archive_dir": str(archive)}
    )
    try:
        if not arguments.dry_run:
            parent = as_path(archive).parent
            with target_errors(parent):
                make_directory(parent, parents=True, exist_ok=True)
        return _compact_run(one, indent=None)
    except StreamshardError as error:
        if arguments.json:
            print_json(
                {"run_dir": one.run_dir, "archive_dir": one.archive_dir, "error": str(error)}, None
            )
        elif not arguments.quiet:
            print_text(one_line(f"{run}: nothing was done"), is_done=True)
        tell(f"streamshard: {error}")
        return error.exit_code


def _compact_run(arguments: argparse.Namespace, indent: int | None = 2) -> int:
    """Compact one run, and return the exit code."""
    try:
        with (
            display(is_quiet=arguments.quiet) as progress,
            memory_errors(),
        ):
            report = compact.compact(progress=progress, **keywords(arguments))
    except TargetLockedError as error:
        if arguments.quiet:
            return error.exit_code
        raise
    text = partial(compaction_text, report, verbose=arguments.verbose)
    print_result(report, arguments, text, indent=indent, is_done=not arguments.dry_run)
    where = "" if indent else f"{report.run_dir}: "
    tell(*(f"streamshard: {where}{problem_text(tag)}" for tag in report.problems))
    return report.exit_code


def _show_status(runs: Sequence[_Directories], arguments: argparse.Namespace) -> None:
    """Show what was done with run directories so far; one that cannot be read hides no other."""
    statuses: list[CompactStatus] = []
    errors: list[StreamshardError] = []
    for run, archive in runs:
        try:
            statuses.append(compact_status(run, archive))
        except StreamshardError as error:
            errors.append(error)
    errors += [SourceError(problem) for status in statuses for problem in status.problems]
    drawn = ""
    if arguments.html and statuses:
        page = draw_status(statuses, arguments.html)
        drawn = f"\n\ndrew  {page.path}, {show_bytes(page.nbytes)}"
    if arguments.json:
        for status in statuses:
            print_json(asdict(status), 2 if len(runs) == 1 else None)
    elif not arguments.quiet and statuses:
        texts = (status_text(one, verbose=arguments.verbose) for one in statuses)
        print_text("\n\n".join(texts) + drawn)
    for other in errors[1:]:
        tell_error(other)
    if errors:
        raise errors[0]


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
    directories = [root]
    for part in parts[first:]:
        with source_errors(root):
            directories = [path for directory in directories for path in _matching(directory, part)]
    if not directories:
        raise SourceNotFoundError(f"{pattern}: matches no directory")
    return [(run, as_path(archive_dir) / os.path.relpath(run, root)) for run in sorted(directories)]


def _matching(directory: Path, pattern: str) -> list[Path]:
    if not is_directory(directory):
        return []
    return [
        path
        for path in paths_in(directory)
        if fnmatchcase(path.name, pattern) and path.name[0] != "." and is_real_directory(path)
    ]
