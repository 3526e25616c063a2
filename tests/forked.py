"""Runs the command line in a process of its own that need not load it first.

Half of the time of a short command goes into imports. A server process has done them, and forks a
child for each command, which sets up its arguments, environment, directory and streams as a new
process has them, and ends as one does. What is about loading starts a process itself.
"""

import multiprocessing
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["streamshard.__main__", "streamshard.cli.text.inspect_text"])


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    code: int
    out: str
    err: str


def run_forked(*arguments: str) -> Finished:
    """Run `streamshard` with these arguments, this process's environment and no input."""
    with TemporaryDirectory() as directory:
        streams = [str(Path(directory, name)) for name in ("out", "err")]
        given = (arguments, str(Path.cwd()), dict(os.environ), streams)
        process = _SERVER.Process(target=_be_program, args=given)
        process.start()
        process.join()
        code = process.exitcode
        process.close()
        out, err = (Path(stream).read_text() for stream in streams)
    assert code is not None
    return Finished(code, out, err)


def _be_program(
    arguments: tuple[str, ...], directory: str, environment: dict[str, str], streams: list[str]
) -> None:
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    files = [os.devnull, *streams]
    for number, path in enumerate(files):
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        opened = os.open(path, flags if number else os.O_RDONLY, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    # As Python opens them: what the server had may be a terminal, or of another encoding.
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.argv[1:] = arguments
    from streamshard.__main__ import program

    program()
