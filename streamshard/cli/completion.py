"""Prints what teaches a shell to complete this command line.

`python -m docs.site.completion_scripts` makes the scripts next to this module from the parser.
"""

import argparse
from pkgutil import get_data

from streamshard.cli.streams import write_out


def run_completion(arguments: argparse.Namespace) -> None:
    """Print the script for a shell."""
    write_out((get_data(__package__, f"completion.{arguments.shell}") or b"").decode())
