"""Be one version of streamshard, that of PYTHONPATH: run its commands in children, one at a time.

A script of the standard library, so that a version of any age can be asked in the same way. A child
has everything imported, and is there in milliseconds. It is asked in lines of JSON.
"""

import gc
import json
import os
import signal
import sys
import traceback
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def _program() -> int:
    """Be the process that `streamshard` is; returns its exit code."""
    from streamshard.__main__ import program

    try:
        program()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1


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
    streams = {1: os.memfd_create("out"), 2: os.memfd_create("err")}
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for number, descriptor in streams.items():
                os.dup2(descriptor, number)
            sys.argv[1:] = asked["arguments"]
            if asked["killed_at"]:
                _kill_at(asked["killed_at"])
            code = _program()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    texts = []
    for descriptor in streams.values():
        with os.fdopen(descriptor, "rb") as stream:
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    return {"code": code, "out": texts[0], "err": texts[1]}


def _warm_up(arguments: list[str]) -> dict[str, Any]:
    """Run a command in this process, so that no child has to import what it needs."""
    sys.argv[1:] = arguments
    code = _program()
    gc.collect()
    gc.freeze()
    return {"code": code, "out": "", "err": ""}


def _serve() -> None:
    questions, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    # The lowest priority, which `compact` takes, would be that of all that follows.
    os.nice = lambda _: 0
    for line in questions:
        asked = json.loads(line)
        answer = _warm_up(asked["arguments"]) if asked["warms_up"] else _run(asked)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
