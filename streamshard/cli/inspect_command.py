"""`inspect` on the command line: checkpoints, and what cannot be opened as one."""

import argparse
import os
import shutil
import sys
from dataclasses import asdict

from streamshard.cli.parser import keywords
from streamshard.cli.streams import print_json, write_out
from streamshard.cli.text.inspect_text import inspection_text
from streamshard.errors import SourceError
from streamshard.operations.inspect import inspect
from streamshard.operations.inspect.inspect_report import (
    CheckpointList,
    IncompleteCheckpoint,
    Inspection,
)
from streamshard.options import SourceOptions, types_of


def run_inspect(arguments: argparse.Namespace) -> None:
    """Describe what is there."""
    options = keywords(arguments)
    report: Inspection | CheckpointList | IncompleteCheckpoint | None
    try:
        report = inspect.inspect(**options)
    except SourceError as error:
        # Not at the top: as a rule, a source is opened.
        from streamshard.operations.inspect.unopened import describe_unopened, draw_unopened

        source, html = options.pop("source"), options.pop("html")
        own = SourceOptions(**{name: options.pop(name) for name in types_of(SourceOptions)})
        is_more = any(map(_is_given, options.values()))
        report = None if is_more else describe_unopened(error, source, own)
        if report is None:
            raise
        if html is not None:
            report = draw_unopened(report, source, html)
        _show_inspection(report, arguments)
        if isinstance(report, CheckpointList) and report.problems:
            raise SourceError(report.problems[0]) from None  # without advice to do this
        if report.problems:
            raise
        return
    _show_inspection(report, arguments)


def _is_given(value: object) -> bool:
    return value is not None and value is not False and value != []


def _show_inspection(
    report: Inspection | CheckpointList | IncompleteCheckpoint, arguments: argparse.Namespace
) -> None:
    if arguments.json:
        print_json(asdict(report))
    elif not arguments.quiet:
        text = inspection_text(report, verbose=arguments.verbose, width=_terminal_width())
        write_out(text + "\n")


def _terminal_width() -> int | None:
    """Return the terminal's width; None if output is no terminal, or colours and lines are off."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return None
    if sys.stdout.encoding.lower() not in ("utf-8", "utf8"):
        return None
    return shutil.get_terminal_size().columns
