"""`newest` on the command line, and what it says of the checkpoints that it passed over."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict

from streamshard.cli.parser import keywords
from streamshard.cli.progress import display
from streamshard.cli.streams import print_json, tell, write_path
from streamshard.operations.newest import newest
from streamshard.operations.newest.newest import Newest


def run_newest(arguments: argparse.Namespace) -> None:
    """Print the path of the newest good checkpoint."""
    with display(is_quiet=arguments.quiet) as progress:
        report = newest.search(progress=progress, **keywords(arguments))
    if arguments.json:
        print_json(asdict(report))
    if report.path is None:
        raise newest.none_good(report)
    if not arguments.quiet:
        tell(*(f"streamshard: {line}" for line in _lines(report)))
    if not arguments.json:
        write_path(report.path)


def _lines(report: Newest) -> Iterator[str]:
    """Say why newer checkpoints were passed over, and what is suspicious about the one found."""
    yield from report.notes
    for checkpoint in report.passed_over:
        yield f"passed over {checkpoint.path}: {checkpoint.reason}"
    for checkpoint in report.checkpoints:
        if checkpoint.path == report.path:
            yield from (f"{checkpoint.path}: {warning}" for warning in checkpoint.warnings)
