"""Runs the command line again and again, in children of one process that has all of it imported.

A child is there in a few milliseconds, where a new interpreter takes half a second. The server is
a process with the shim preloaded; it is spoken to in lines of JSON on its standard input and
output.
"""

import contextlib
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, Self

from tests.faults.shim import NO_OPTION, NOTHING, Arming, Call, Kind, Option, Shim

HANGS_AFTER_SECONDS: Final = 120
"""What takes longer is stopped, and counts as a failure."""


@dataclass(frozen=True, slots=True)
class Kill:
    """A signal from outside."""

    number: int
    after_seconds: float
    """Since the command line was called."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended."""

    code: int
    """Exit code, or the negative number of the signal that ended it."""
    out: str
    err: str
    count: int
    """Calls to the file system on the source or the target."""
    fired: Call | None
    """The call at which something happened."""
    failed: Kind
    """Kinds of all the calls that were made to fail."""
    written: int
    """Bytes that went into files of the target."""
    slept: float
    """Seconds that the run asked to wait."""
    seconds: float
    was_killed: bool
    """Whether it was still running when it was sent the signal."""
    calls: tuple[Call, ...]
    """All calls, where they were asked for."""


class Server:
    """The process that forks; a context manager."""

    def __init__(self, library: Path) -> None:
        environment = {
            **os.environ,
            "LD_PRELOAD": str(library),
            # Threads of others would be forked with their locks held.
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
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

    def warm_up(self, *arguments: object) -> None:
        """Run a command in the server itself, so that no child has to import anything."""
        self._ask({"warm_up": list(map(str, arguments))})

    def run(
        self,
        arguments: Sequence[object],
        *,
        source: Path,
        target: Path,
        arming: Arming = NOTHING,
        options: Option = NO_OPTION,
        kill: Kill | None = None,
        filled_when_stopped: Path | None = None,
        user: int | None = None,
        with_calls: bool = False,
    ) -> Ended:
        """Run the command line in a child.

        Parameters
        ----------
        source, target
            Directories, calls on what is below which are counted.
        filled_when_stopped
            A file that takes all the space there is while the run is stopped at a call.
        user
            Number of the user as whom the command runs; by default this process's own.
        """
        answer = self._ask(
            {
                "run": list(map(str, arguments)),
                "source": str(source),
                "target": str(target),
                "arming": asdict(arming),
                "options": int(options),
                "kill": None if kill is None else asdict(kill),
                "fill": None if filled_when_stopped is None else str(filled_when_stopped),
                "user": user,
                "with_calls": with_calls,
            }
        )
        fired = answer.pop("fired")
        calls = tuple(map(Call.of, answer.pop("calls")))
        failed = Kind(answer.pop("failed"))
        fired = None if fired is None else Call.of(fired)
        return Ended(**answer, fired=fired, failed=failed, calls=calls)

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process that runs the cases has died; see its standard error")
        answer: dict[str, Any] = json.loads(line)
        return answer


class _Parent:
    """What happens in the server's process."""

    def __init__(self) -> None:
        from streamshard import cli

        self._main = cli.main
        self._shim = Shim()
        # Files, because what a child that was killed has written is not to be lost.
        self._out = tempfile.TemporaryFile()  # noqa: SIM115
        self._err = tempfile.TemporaryFile()  # noqa: SIM115

    def warm_up(self, arguments: list[str]) -> dict[str, Any]:
        assert self._main(arguments) == 0
        gc.collect()
        gc.freeze()
        return {}

    def run(self, question: dict[str, Any]) -> dict[str, Any]:
        for stream in (self._out, self._err):
            stream.seek(0)
            stream.truncate()
        self._shim.reset()
        started, starts = os.pipe()
        child = os.fork()
        if child == 0:
            self._be_child(question, starts)
        os.close(starts)
        os.read(started, 1)  # or the child has died
        os.close(started)
        began = time.monotonic()
        if question["fill"] is not None:
            _fill_when_stopped(child, Path(question["fill"]))
        was_killed = self._wait(child, question["kill"])
        status = os.waitpid(child, 0)[1]
        fired = self._shim.fired
        return {
            "code": os.waitstatus_to_exitcode(status),
            "out": self._read(self._out),
            "err": self._read(self._err),
            "count": self._shim.count,
            "fired": None if fired is None else fired.to_list(),
            "failed": int(self._shim.failed),
            "written": self._shim.written,
            "slept": self._shim.slept,
            "seconds": time.monotonic() - began,
            "was_killed": was_killed,
            "calls": [c.to_list() for c in self._shim.calls()] if question["with_calls"] else [],
        }

    def _be_child(self, question: dict[str, Any], starts: int) -> NoReturn:
        """Do one run as a process of its own would, from the call of `main` on."""
        code = 1
        try:
            os.dup2(self._out.fileno(), 1)
            os.dup2(self._err.fileno(), 2)
            arming = Arming(**question["arming"])
            source, target = Path(question["source"]), Path(question["target"])
            self._shim.arm(source, target, arming, Option(question["options"]))
            if question["user"] is not None:
                _become(question["user"])
            os.close(starts)
            code = self._main(question["run"])
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    @staticmethod
    def _wait(child: int, kill: dict[str, Any] | None) -> bool:
        """Wait for a child's end, and send the signal if it is not there by then."""
        handle = os.pidfd_open(child)
        try:
            if kill is not None:
                if select.select([handle], [], [], kill["after_seconds"])[0]:
                    return False
                signal.pidfd_send_signal(handle, kill["number"])
            if not select.select([handle], [], [], HANGS_AFTER_SECONDS)[0]:
                signal.pidfd_send_signal(handle, signal.SIGALRM)
        finally:
            os.close(handle)
        return kill is not None

    @staticmethod
    def _read(stream: Any) -> str:  # noqa: ANN401
        stream.seek(0)
        data: bytes = stream.read()
        return data.decode(errors="replace")


def _fill_when_stopped(child: int, path: Path) -> None:
    """Once a child is stopped, take all the space there is, and send it on."""
    found = os.waitid(os.P_PID, child, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    if found is None or found.si_code != os.CLD_STOPPED:
        return
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as stream:
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    stream.write(bytes(size))
                    os.fsync(stream.fileno())  # a file system may promise more than it has
    os.kill(child, signal.SIGCONT)


def _become(user: int) -> None:
    """Give up all rights but those of a user."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _serve() -> None:
    """Answer questions until there are no more."""
    questions, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    parent = _Parent()
    for line in questions:
        question = json.loads(line)
        warm_up = question.get("warm_up")
        answer = parent.warm_up(warm_up) if warm_up is not None else parent.run(question)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
