"""Runs the command line in a process of its own that need not load it first.

Nearly all the time of a short command goes into imports, and into taking them down at the end. A
server process has done them, and forks a child for each command, which sets up its arguments,
environment, directory and streams as a new process has them, and ends with its exit code. What is
about loading, or about the end of the interpreter, starts a process itself.
"""

import atexit
import gc
import importlib
import os
import pkgutil
import resource
import sys
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import streamshard
from streamshard.__main__ import program
from tests.asking import Asked, Streams, answer_all, end_as
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
    given = {
        "arguments": arguments,
        "script": script,
        "directory": Path.cwd(),
        "environment": {**os.environ},
    }
    return Finished(**_server().ask(given))


@cache
def _server() -> Asked:
    return Asked("tests.forked")


def _serve() -> None:
    _load()
    keep_priority()
    # What is loaded stays as it is: a child that looked at it for garbage would copy all its pages.
    gc.collect()
    gc.freeze()
    loaded_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def answer(given: dict[str, Any]) -> dict[str, Any]:
        streams = Streams()
        child = os.fork()
        if child == 0:
            streams.take()
            end_as(lambda: _be_program(given))
        _, status, usage = os.wait4(child, 0)
        return {
            "code": os.waitstatus_to_exitcode(status),
            **streams.texts(),
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "peak_bytes": usage.ru_maxrss * 1024,
            "loaded_bytes": loaded_bytes,
        }

    answer_all(answer)


def _load() -> None:
    """Import all that a verb may, but for what only few do, and takes long: clusters and torch."""
    for module in pkgutil.walk_packages(streamshard.__path__, "streamshard."):
        if module.name.split(".")[1] not in _NOT_LOADED:
            importlib.import_module(module.name)


def _be_program(given: dict[str, Any]) -> None:
    """Be a new process, up to the interpreter's own end."""
    resource.setrlimit(resource.RLIMIT_CPU, (_MOST_SECONDS, _MOST_SECONDS))
    os.chdir(given["directory"])
    os.environ.clear()
    os.environ.update(given["environment"])
    sys.argv[1:] = given["arguments"]
    try:
        if given["script"]:
            exec(given["script"], {"__name__": "__main__"})
        else:
            program()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


if __name__ == "__main__":
    _serve()
