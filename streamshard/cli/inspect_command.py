"""`inspect` on the command line: checkpoints, what cannot be opened as one, and pickles."""

import argparse
import os
import shutil
import sys
from dataclasses import asdict

from streamshard.cli.parser import keywords
from streamshard.cli.streams import print_json, print_result, write_out
from streamshard.cli.text.inspect_text import inspection_text, pickles_text
from streamshard.errors import IntegrityError, SourceError, UsageError
from streamshard.operations.inspect import inspect, pickle_report
from streamshard.operations.inspect.inspect_report import (
    CheckpointList,
    IncompleteCheckpoint,
    Inspection,
)
from streamshard.operations.inspect.unopened import describe_unopened, draw_unopened
from streamshard.options import SourceOptions, types_of
from streamshard.sizes import counted


def run_inspect(arguments: argparse.Namespace) -> None:
    """Describe what is there."""
    if arguments.pickles:
        _inspect_pickles(arguments)
        return
    options = keywords(arguments)
    found: Inspection | CheckpointList | IncompleteCheckpoint | None
    try:
        found = inspect.inspect(**options)
    except SourceError as error:
        source, html, overwrite = (options.pop(k) for k in ("source", "html", "overwrite"))
        own = SourceOptions(**{name: options.pop(name) for name in types_of(SourceOptions)})
        is_more = any(map(_is_given, options.values()))
        found = None if is_more else describe_unopened(error, source, own)
        if found is None:
            raise
        if html is not None:
            found = draw_unopened(found, source, html, overwrite=overwrite)
        _show_inspection(found, arguments)
        if isinstance(found, CheckpointList) and found.problems:
            raise SourceError(found.problems[0]) from None  # without advice to do this
        if found.problems:
            raise
        return
    _show_inspection(found, arguments)


def _is_given(value: object) -> bool:
    return value is not None and value is not False and value != []


def _show_inspection(
    found: Inspection | CheckpointList | IncompleteCheckpoint, arguments: argparse.Namespace
) -> None:
    if arguments.json:
        print_json(asdict(found))
    elif not arguments.quiet:
        text = inspection_text(found, verbose=arguments.verbose, width=_terminal_width())
        write_out(text + "\n")


def _terminal_width() -> int | None:
    """Return the terminal's width; None if output is no terminal, or colours and lines are off."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return None
    if sys.stdout.encoding.lower() not in ("utf-8", "utf8"):
        return None
    return shutil.get_terminal_size().columns


def _inspect_pickles(arguments: argparse.Namespace) -> None:
    options = keywords(arguments)
    source, tag = options.pop("source"), options.pop("tag")
    if any(map(_is_given, options.values())):
        raise UsageError("--pickles lists names and nothing else: only --tag may be given with it")
    found = pickle_report.list_pickles(source, tag=tag)
    print_result(found, arguments, lambda: pickles_text(found, verbose=arguments.verbose))
    if found.dangers:
        worst = found.dangers[0]
        message = (
            f"{found.path}: a pickle calls {worst.name}, which runs what the file says as soon"
        )
        raise IntegrityError(
            f"{message} as a job loads it; in {worst.files[0]}. Nothing was run here"
        )
    if found.problems:
        count, first = len(found.problems), found.problems[0]
        files = counted(len(found.files), "file")
        message = f"{found.path}: {count} of {files} not read to the end"
        raise SourceError(f"{message}, so there may be more names; {first.path}: {first.problem}")
