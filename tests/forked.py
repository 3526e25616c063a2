"""Runs the command line in a process of its own that need not load it first.

Half of the time of a short command goes into imports. A server process has done them, and forks a
child for each command, which sets up its arguments, environment, directory and streams as a new
process has them, and ends as one does. What is about loading starts a process itself.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    code: int
    """Exit code; of a process that a signal killed, its number below zero."""
    out: str
    err: str


def run_forked(*arguments: str) -> Finished:
    """Run `streamshard` with these arguments, this process's environment and no input."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with TemporaryDirectory() as directory:
        streams = [Path(directory, name) for name in ("out", "err")]
        given = {
            "arguments": arguments,
            "directory": str(Path.cwd()),
            "environment": dict(os.environ),
            "streams": [os.devnull, *map(str, streams)],
        }
        server.stdin.write(f"{json.dumps(given)}\n")
        server.stdin.flush()
        code = json.loads(server.stdout.readline())
        return Finished(code, *(stream.read_text() for stream in streams))


@cache
def _server() -> subprocess.Popen[str]:
    """Start the server, which ends with its standard input."""
    command = [sys.executable, "-m", "tests.forked"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)


def _serve() -> None:
    import streamshard.cli.text.inspect_text  # noqa: F401
    from tests.priority import keep_priority

    keep_priority()

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _be_program(json.loads(line))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()


def _be_program(given: dict[str, Any]) -> NoReturn:
    """Be a new process, from the call of `program` to the exit code."""
    os.chdir(given["directory"])
    os.environ.clear()
    os.environ.update(given["environment"])
    for number, path in enumerate(given["streams"]):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    # As Python opens them: those of the server have its buffers.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.argv[1:] = given["arguments"]
    from streamshard.__main__ import program

    program()


if __name__ == "__main__":
    _serve()
