"""`diff` on the command line."""

import argparse

from streamshard.cli.parser import keywords
from streamshard.cli.progress import display
from streamshard.cli.streams import print_result
from streamshard.cli.text.diff_text import diff_text, difference_text
from streamshard.errors import IntegrityError
from streamshard.operations.diff import diff


def run_diff(arguments: argparse.Namespace) -> None:
    """Compare two checkpoints; raises the difference, if there is one."""
    with display(arguments.progress_mode, is_quiet=arguments.quiet) as progress:
        found = diff.diff(progress=progress, **keywords(arguments))
    form = {"sort": arguments.sort, "verbose": arguments.verbose}
    print_result(found, arguments, lambda: diff_text(found, **form))
    if not found.is_equal:
        raise IntegrityError(difference_text(found))
