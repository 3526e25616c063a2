"""Writes the scripts that complete this command line: `python -m docs.site.completion_scripts`.

`shtab` makes them from the parser. `streamshard completion` prints them, and needs no `shtab`.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import shtab

import streamshard.cli
from streamshard.cli.parser import SHELLS, arguments_of

_PATHS: Final = frozenset(
    {"SRC", "OUT", "PATH", "STORE.zarr", "RUN_DIR", "ARCHIVE_DIR", "FILE", "A", "B"}
)
"""What stands for the path of a file or a directory."""


def path_of(shell: str) -> Path:
    """Return where the package has the script for a shell."""
    return Path(streamshard.cli.__path__[0]) / f"completion.{shell}"


def scripts() -> Mapping[str, str]:
    """Make the script for each shell."""
    parser = arguments_of()
    (verbs,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    of_help = verbs.add_parser("help", help="show what a verb takes", add_help=False)
    of_help.add_argument("verb", choices=[verb for verb in verbs.choices if verb != "help"])
    of_help.add_argument("--help-all", action="store_true", help="show the rarer options too")
    for verb in verbs.choices.values():
        for action in verb._actions:
            if action.metavar in _PATHS:
                action.complete = shtab.FILE
    return {shell: shtab.complete(parser, shell=shell) for shell in SHELLS}


if __name__ == "__main__":
    for name, script in scripts().items():
        path_of(name).write_text(script)
