"""Runs the command of `--notify` when a run needs attention."""

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from streamshard.errors import UsageError
from streamshard.operations.compact.compact_report import RunRecord

_SECONDS: Final = 60
"""How long the command may take."""


def require_command(command: str) -> list[str]:
    """Split a command into words, as a shell does."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--notify {command}: {error}") from error
    if not words:
        raise UsageError("--notify: no command")
    return words


def notify(command: str, runs: Sequence[RunRecord]) -> str:
    """Run a command with the outcome of runs as JSON on its standard input, without a shell.

    What it prints goes to standard error. It is killed after a minute. The outcome of the runs is
    the same whatever becomes of it; returned is what went wrong, empty if nothing did.
    """
    code = next((run.exit_code for run in runs if run.exit_code), 0)
    document = json.dumps({"exit_code": code, "runs": [*map(asdict, runs)]}).encode()
    words = require_command(command)
    try:
        done = subprocess.run(  # noqa: S603 - it is the user's own command
            words, input=document, stdout=sys.stderr.fileno(), timeout=_SECONDS, check=False
        )
    except OSError as error:
        return f"--notify {command}: cannot be run ({error.strerror})"
    except subprocess.TimeoutExpired:
        return f"--notify {command}: killed after {_SECONDS} seconds"
    return f"--notify {command}: ended with {done.returncode}" if done.returncode else ""
