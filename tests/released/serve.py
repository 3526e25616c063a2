"""Be one version of streamshard, that of PYTHONPATH: run its commands in children, one at a time.

It needs nothing else of this tree but the standard library, so that a version of any age can be
asked in the same way.
"""

import gc
import os
import signal
import sys
from typing import Any

from tests.asking import Streams, answer_all, end_as

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def _program(arguments: list[str], killed_at: int = 0) -> None:
    """Be the process that `streamshard` is."""
    from streamshard.__main__ import program

    sys.argv[1:] = arguments
    if killed_at:
        _kill_at(killed_at)
    program()


def _kill_at(number: int) -> None:
    """Kill this process as it opens a file to write for the `number`th time."""
    left = number

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _run(asked: dict[str, Any]) -> dict[str, Any]:
    streams = Streams()
    child = os.fork()
    if child == 0:
        streams.take()
        end_as(lambda: _program(asked["arguments"], asked["killed_at"]))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {"code": code, **streams.texts()}


def _warm_up(arguments: list[str]) -> dict[str, Any]:
    """Run a command in this process, so that no child has to import what it needs."""
    code: str | int | None = 0
    try:
        _program(arguments)
    except SystemExit as ended:
        code = ended.code
    gc.collect()
    gc.freeze()
    return {"code": code, "out": "", "err": ""}


if __name__ == "__main__":
    # The lowest priority, which `compact` takes, would be that of all that follows.
    os.nice = lambda _: 0
    answer_all(lambda asked: _warm_up(asked["arguments"]) if asked["warms_up"] else _run(asked))
