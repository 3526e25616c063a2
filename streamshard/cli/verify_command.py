"""`verify` on the command line."""

import argparse

from streamshard.cli.parser import keywords
from streamshard.cli.progress import display
from streamshard.cli.streams import print_result
from streamshard.cli.text.verify_text import findings_lines, verification_text
from streamshard.errors import IntegrityError
from streamshard.operations.verify import verify


def run_verify(arguments: argparse.Namespace) -> None:
    """Verify a checkpoint; raises what was found, if it is not good."""
    with display(arguments.progress_mode, is_quiet=arguments.quiet) as progress:
        found = verify.verify(progress=progress, **keywords(arguments))
    form = {"verbose": arguments.verbose, "with_digests": arguments.digests}
    print_result(found, arguments, lambda: verification_text(found, **form))
    if not found.is_good:
        first, *others = findings_lines(found, verbose=arguments.quiet)
        error = IntegrityError(first)
        for line in others:
            error.add_note(line)
        raise error
