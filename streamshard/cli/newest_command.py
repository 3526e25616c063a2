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
        found = newest.search(progress=progress, **keywords(arguments))
    if arguments.json:
        print_json(asdict(found))
    if found.path is None:
        raise newest.none_good(found)
    if not arguments.quiet:
        tell(*(f"streamshard: {line}" for line in _lines(found)))
    if not arguments.json:
        write_path(found.path)


def _lines(found: Newest) -> Iterator[str]:
    """Say why newer checkpoints were passed over, and what is suspicious about the one found."""
    yield from found.notes
    for one in found.passed_over:
        yield f"passed over {one.path}: {one.reason}"
    for one in found.checkpoints:
        if one.path == found.path:
            yield from (f"{one.path}: {warning}" for warning in one.warnings)
