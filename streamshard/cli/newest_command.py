"""`newest` on the command line."""

import argparse
from dataclasses import asdict

from streamshard.cli.parser import keywords
from streamshard.cli.progress import display
from streamshard.cli.streams import print_json, tell, write_path
from streamshard.cli.text.newest_text import newest_lines
from streamshard.operations.newest import newest


def run_newest(arguments: argparse.Namespace) -> None:
    """Print the path of the newest good checkpoint."""
    with display(arguments.progress_mode, is_quiet=arguments.quiet) as progress:
        found = newest.search(progress=progress, **keywords(arguments))
    if arguments.json:
        print_json(asdict(found))
    if found.path is None:
        raise newest.none_good(found)
    if not arguments.quiet:
        tell(*newest_lines(found))
    if not arguments.json:
        write_path(found.path)
