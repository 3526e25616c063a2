"""Runs the command line in a process of its own that need not load it first.

Nearly all the time of a short command goes into imports, and into taking them down at the end. A
server process has done them, and forks a child for each command, which sets up its arguments,
environment, directory and streams as a new process has them, and ends with its exit code. What is
about loading, or about the end of the interpreter, starts a process itself.
"""

import atexit
import gc
import importlib
import json
import os
import pkgutil
import resource
import subprocess
import sys
import threading
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NoReturn

import streamshard
from streamshard.__main__ import program
from tests.priority import keep_priority

_NOT_LOADED: Final = {"__main__", "cluster", "deepspeed", "demo", "live"}
_MOST_SECONDS: Final = 60
"""Of CPU time, which is long for all that is to be done; a command that takes more is killed."""


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    code: int
    """Exit code; of a process that a signal killed, its number below zero."""
    out: str
    err: str
    cpu_seconds: float = 0
    peak_bytes: int = 0
    """Highest resident memory, with what the server had loaded."""
    loaded_bytes: int = 0
    """Resident memory of the server."""

    @property
    def own_bytes(self) -> int:
        """Highest resident memory, without what the server had loaded."""
        return self.peak_bytes - self.loaded_bytes


def run_forked(*arguments: str, script: str = "") -> Finished:
    """Run `streamshard` with these arguments, this process's environment and no input.

    Parameters
    ----------
    script
        Python to run instead, as `python -c` does.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with TemporaryDirectory() as directory:
        streams = [Path(directory, name) for name in ("out", "err")]
        given = {
            "arguments": arguments,
            "script": script,
            "directory": str(Path.cwd()),
            "environment": dict(os.environ),
            "streams": [os.devnull, *map(str, streams)],
        }
        server.stdin.write(f"{json.dumps(given)}\n")
        server.stdin.flush()
        code, *measured = json.loads(server.stdout.readline())
        out, err = (stream.read_text() for stream in streams)
        return Finished(code, out, err, *measured)


@cache
def _server() -> subprocess.Popen[str]:
    """Start the server, which ends with its standard input."""
    command = [sys.executable, "-m", "tests.forked"]
    pipe = subprocess.PIPE
    # A process that has threads is none to fork.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, start_new_session=True, env=environment
    )


def _serve() -> None:
    _load()
    keep_priority()
    # What is loaded stays as it is: a child that looked at it for garbage would copy all its pages.
    gc.collect()
    gc.freeze()
    loaded_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _be_program(json.loads(line))
        _, status, usage = os.wait4(child, 0)
        code = os.waitstatus_to_exitcode(status)
        seconds = usage.ru_utime + usage.ru_stime
        ended = [code, seconds, usage.ru_maxrss * 1024, loaded_bytes]
        sys.stdout.write(f"{json.dumps(ended)}\n")
        sys.stdout.flush()


def _load() -> None:
    """Import all that a verb may, but for what only few do, and takes long: clusters and torch."""
    for module in pkgutil.walk_packages(streamshard.__path__, "streamshard."):
        if module.name.split(".")[1] not in _NOT_LOADED:
            importlib.import_module(module.name)


def _be_program(given: dict[str, Any]) -> NoReturn:
    """Be a new process, from the call of `program` to the exit code."""
    resource.setrlimit(resource.RLIMIT_CPU, (_MOST_SECONDS, _MOST_SECONDS))
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
    code = 1
    try:
        if given["script"]:
            exec(given["script"], {"__name__": "__main__"})
        else:
            program()
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else 1
    except BaseException:
        traceback.print_exc()
    # The interpreter's own end, without the freeing of all that it has in memory.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
