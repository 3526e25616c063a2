"""Servers that fork a child for each question, and those who ask them, in lines of JSON.

A server has imported what takes long, so a child is there in milliseconds. Only the standard
library is needed here, so that versions of streamshard of any age are asked in the same way.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, Self

_ROOT: Final = Path(__file__).parent.parent


class Asked:
    """A server; a context manager. It ends with its standard input, so with who asks, too."""

    def __init__(self, module: str, package: Path = _ROOT, **environment: str) -> None:
        """Start a module of the tests, which imports streamshard from a directory."""
        # Threads of others would be forked with their locks held.
        environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = f"{package}:{_ROOT}"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.communicate()

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Wait for the answer to a question."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(question, default=str)}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process that forks has died; see its standard error")
        answer: dict[str, Any] = json.loads(line)
        return answer


def answer_all(answer: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Be a server until there are no more questions."""
    questions, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    for line in questions:
        answers.write(f"{json.dumps(answer(json.loads(line)))}\n")
        answers.flush()


class Streams:
    """What a child says: in files, so that what it said before it was killed is there."""

    def __init__(self) -> None:
        self._files = {1: os.memfd_create("out"), 2: os.memfd_create("err")}

    def take(self) -> None:
        """Let what this process says go there."""
        for number, descriptor in self._files.items():
            os.dup2(descriptor, number)

    def texts(self) -> dict[str, str]:
        """Return all that was said; can be asked for once."""
        found = {}
        for name, descriptor in zip(("out", "err"), self._files.values(), strict=True):
            with os.fdopen(descriptor, "rb") as stream:
                stream.seek(0)
                found[name] = stream.read().decode(errors="replace")
        return found


def end_as(program: Callable[[], object]) -> NoReturn:
    """Call a program and end with its exit code, without the freeing of all that is in memory."""
    code = 1
    try:
        program()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
