"""Shell completion of the command line."""

import argparse
from collections.abc import Iterator
from typing import Final

from streamshard.errors import UsageError

SHELLS: Final = ("bash", "zsh", "fish", "tcsh")
"""Shells with a completion script."""

_PATHS: Final = frozenset(
    {"SRC", "OUT", "PATH", "STORE.zarr", "RUN_DIR", "ARCHIVE_DIR", "FILE", "PLAN", "A", "B"}
)
"""Metavars of arguments that name a file or a directory."""


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script by which a shell completes this command line.

    Raises
    ------
    UsageError
        The package shtab, which writes such scripts, is not installed.
    """
    try:
        import shtab
    except ModuleNotFoundError as error:
        message = "completion needs the package shtab; install it with pip install shtab"
        raise UsageError(message) from error
    for action in _actions(parser):
        if action.metavar in _PATHS:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from _actions(verb)
        else:
            yield action
