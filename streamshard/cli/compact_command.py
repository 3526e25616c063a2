"""`compact` on the command line: one run directory or many, `--status`, and `--notify`."""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

from streamshard.cli.parser import keywords
from streamshard.cli.progress import display
from streamshard.cli.streams import (
    print_json,
    print_result,
    print_text,
    tell,
    tell_error,
    write_out,
)
from streamshard.cli.text.compact_text import (
    compaction_text,
    problem_text,
    prometheus_text,
    status_text,
)
from streamshard.cli.text.escaping import one_line
from streamshard.errors import (
    SourceError,
    StreamshardError,
    TargetLockedError,
    UsageError,
    memory_errors,
)
from streamshard.io.throttle import lower_priority
from streamshard.operations.compact import compact
from streamshard.operations.compact.compact_report import RunRecord
from streamshard.operations.compact.compact_status import CompactStatus, compact_status
from streamshard.operations.compact.status_page import draw_status
from streamshard.sizes import show_bytes
from streamshard.verb_options import CompactOptions

_CHANGING: Final = ("delete", "dry_run", "notify", "undelete", "purge", "acknowledge")
"""Options that say what a run is to do."""
_SECONDS: Final = 60
"""How long the command of `--notify` may take."""

_Directories = tuple[str | Path, str | Path]
"""A run directory, and the directory of its archives."""


def run_compact(arguments: argparse.Namespace) -> int:
    """Run the verb; returns the exit code."""
    _require_sense(arguments)
    runs = compact.runs_like(arguments.run_dir, arguments.archive_dir)
    if arguments.status:
        _show_status(runs or [(arguments.run_dir, arguments.archive_dir)], arguments)
        return 0
    if arguments.notify is not None:
        _words_of(arguments.notify)
    lower_priority()
    records: list[RunRecord] = []
    try:
        code = _compact(arguments, runs, records)
    except StreamshardError:
        _notify(records, arguments)
        raise
    _notify(records, arguments)
    return code


def _require_sense(arguments: argparse.Namespace) -> None:
    """Refuse options of the command line alone that contradict each other."""
    if arguments.prometheus and not arguments.status:
        raise UsageError("--prometheus: is a form of --status; give both")
    if arguments.html and not arguments.status:
        raise UsageError("--html: is a form of --status; give both")
    if arguments.overwrite and not arguments.html:
        raise UsageError("--overwrite: is for the page of --html; leave it out")
    if arguments.prometheus and arguments.json:
        raise UsageError("--prometheus and --json: are two forms of --status; give one of them")
    for name in _CHANGING if arguments.status else ():
        if getattr(arguments, name):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"--status: only reports; leave {option} out")


def _is_by_hand(arguments: argparse.Namespace) -> bool:
    return CompactOptions(**keywords(arguments)).is_by_hand


def _compact(
    arguments: argparse.Namespace, runs: Sequence[_Directories] | None, records: list[RunRecord]
) -> int:
    """Compact one run directory, or each of `runs`; returns the first exit code that is not 0."""
    if runs is None:
        return _compact_run(arguments, records)
    if _is_by_hand(arguments):
        raise UsageError(f"{arguments.run_dir}: to name tags, give the one run that they are of")
    codes = [_compact_one_of_many(arguments, records, *run) for run in runs]
    return next(filter(None, codes), 0)


def _compact_one_of_many(
    arguments: argparse.Namespace, records: list[RunRecord], run: str | Path, archive: str | Path
) -> int:
    """Compact one of several runs; an error is reported, and stops no other run."""
    one = argparse.Namespace(
        **{**vars(arguments), "run_dir": str(run), "archive_dir": str(archive)}
    )
    try:
        return _compact_run(one, records, indent=None)
    except StreamshardError as error:
        if arguments.json:
            print_json(
                {"run_dir": one.run_dir, "archive_dir": one.archive_dir, "error": str(error)}, None
            )
        elif not arguments.quiet:
            print_text(one_line(f"{run}: nothing was done"), is_done=True)
        tell(f"streamshard: {error}")
        return error.exit_code


def _compact_run(
    arguments: argparse.Namespace, records: list[RunRecord], indent: int | None = 2
) -> int:
    """Compact one run, and return the exit code; its outcome is added to `records`."""
    record = RunRecord(arguments.run_dir, arguments.archive_dir)
    try:
        with (
            display(arguments.progress_mode, is_quiet=arguments.quiet) as progress,
            memory_errors(),
        ):
            found = compact.compact(progress=progress, **keywords(arguments))
    except TargetLockedError as error:
        if arguments.quiet:
            return error.exit_code
        raise
    except StreamshardError as error:
        records.append(record.after((), error))
        raise
    records.append(record.after(found.tags))
    text = partial(compaction_text, found, verbose=arguments.verbose)
    print_result(found, arguments, text, indent=indent, is_done=not arguments.dry_run)
    where = "" if indent else f"{found.run_dir}: "
    tell(*(f"streamshard: {where}{problem_text(tag)}" for tag in found.problems))
    return found.exit_code


def _notify(records: Sequence[RunRecord], arguments: argparse.Namespace) -> None:
    """Run the command of `--notify` if a run needs attention."""
    wanting = [record for record in records if record.needs_attention]
    if arguments.notify is None or arguments.dry_run or _is_by_hand(arguments) or not wanting:
        return
    if problem := _run_command(arguments.notify, wanting):
        tell(f"streamshard: --notify {arguments.notify}: {problem}")


def _run_command(command: str, runs: Sequence[RunRecord]) -> str:
    """Run a command with the outcome of runs as JSON on its standard input, without a shell.

    What it prints goes to standard error. It is killed after a minute. The outcome of the runs is
    the same whatever becomes of it; returned is what went wrong, empty if nothing did.
    """
    code = next((run.exit_code for run in runs if run.exit_code), 0)
    document = json.dumps({"exit_code": code, "runs": [*map(asdict, runs)]}).encode()
    words = _words_of(command)
    try:
        done = subprocess.run(  # noqa: S603 - it is the user's own command
            words, input=document, stdout=sys.stderr.fileno(), timeout=_SECONDS, check=False
        )
    except OSError as error:
        return f"cannot be run ({error.strerror})"
    except subprocess.TimeoutExpired:
        return f"killed after {_SECONDS} seconds"
    return f"ended with {done.returncode}" if done.returncode else ""


def _words_of(command: str) -> list[str]:
    """Split a command into words, as a shell does."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--notify {command}: {error}") from error
    if not words:
        raise UsageError("--notify: no command")
    return words


def _show_status(runs: Sequence[_Directories], arguments: argparse.Namespace) -> None:
    """Show what was done with run directories so far; one that cannot be read hides no other."""
    found: list[CompactStatus] = []
    errors: list[StreamshardError] = []
    for run, archive in runs:
        try:
            found.append(compact_status(run, archive))
        except StreamshardError as error:
            errors.append(error)
    errors += [SourceError(problem) for status in found for problem in status.problems]
    drawn = ""
    if arguments.html and found:
        page = draw_status(found, arguments.html, overwrite=arguments.overwrite)
        drawn = f"\n\ndrew  {page.path}, {show_bytes(page.nbytes)}"
    if arguments.json:
        for status in found:
            print_json(asdict(status), 2 if len(runs) == 1 else None)
    elif arguments.prometheus:
        write_out(prometheus_text(found) + "\n")
    elif not arguments.quiet and found:
        texts = (status_text(one, verbose=arguments.verbose) for one in found)
        print_text("\n\n".join(texts) + drawn)
    for other in errors[1:]:
        tell_error(other)
    if errors:
        raise errors[0]
