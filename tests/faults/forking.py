"""The process that `server.py` speaks to: it forks a child for each run, and watches over it."""

import contextlib
import faulthandler
import gc
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

from tests.asking import Streams, answer_all, end_as
from tests.faults.shim import Action, Arming, Option, Shim

HANGS_AFTER_SECONDS: Final = 300
"""What takes longer is stopped, and counts as a failure."""


class _Parent:
    """What happens in the server's process."""

    def __init__(self) -> None:
        from streamshard import __main__
        from streamshard.cli import main
        from tests.priority import keep_priority

        keep_priority()
        self._main, self._program = main.main, __main__.program
        self._shim = Shim()

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        if "warm_up" not in question:
            return self._run(question)
        assert self._main(question["warm_up"]) == 0
        gc.collect()
        gc.freeze()
        return {}

    def _run(self, question: dict[str, Any]) -> dict[str, Any]:
        self._shim.reset()
        first = Streams()
        child = self._fork(question, first, Arming(**question["arming"]))
        began = time.monotonic()
        second = self._meanwhile(child, question)
        was_killed = self._wait(child, question["kill"])
        status = os.waitpid(child, 0)[1]
        fired = self._shim.fired
        return {
            "code": os.waitstatus_to_exitcode(status),
            **first.texts(),
            "count": self._shim.count,
            "fired": None if fired is None else fired.to_list(),
            "failed": int(self._shim.failed),
            "written": self._shim.written,
            "slept": self._shim.slept,
            "seconds": time.monotonic() - began,
            "was_killed": was_killed,
            "process": child,
            "second": second,
            "calls": [c.to_list() for c in self._shim.calls()] if question["with_calls"] else [],
        }

    def _fork(self, question: dict[str, Any], run: Streams, arming: Arming | None) -> int:
        """Begin a run; returns its process once the command line is called."""
        started, starts = os.pipe()
        child = os.fork()
        if child == 0:
            end_as(lambda: self._be_child(question, run, arming, starts))
        os.close(starts)
        os.read(started, 1)  # or the child has died
        os.close(started)
        return child

    def _be_child(
        self, question: dict[str, Any], run: Streams, arming: Arming | None, starts: int
    ) -> None:
        """Do one run as a process of its own would, from the call of `program` on."""
        run.take()
        faulthandler.register(signal.SIGALRM, file=2, chain=True)  # says where it hangs
        if arming is not None:
            source, target = Path(question["source"]), Path(question["target"])
            if question["with_content"]:
                self._shim.keep()
            self._shim.arm(source, target, arming, Option(question["options"]))
        else:
            self._shim.set_only(Option(question["options"]))
        if question["user"] is not None:
            _become(question["user"])
        self._shim.set_clock(question["ahead_seconds"])
        os.close(starts)
        sys.argv[1:] = question["run"]
        self._program()

    def _meanwhile(self, child: int, question: dict[str, Any]) -> dict[str, Any] | None:
        """Do what is to be done while a child is stopped, and send it on, or kill it."""
        if Action(question["arming"]["action"]) != Action.STOP:
            return None
        found = os.waitid(os.P_PID, child, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if found is None or found.si_code != os.CLD_STOPPED:
            return None
        second, asked = None, question["meanwhile"]
        if asked["fills"] is not None:
            _fill(Path(asked["fills"]))
        for source, target in asked["renames"]:
            Path(source).rename(target)
        if asked["second"]:
            run = Streams()
            theirs = {"run": asked["second"], "ahead_seconds": asked["second_ahead_seconds"]}
            other = self._fork({**question, **theirs}, run, None)
            self._wait(other, None)
            code = os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])
            second = {"code": code, "err": run.texts()["err"]}
        if asked["kills"]:
            os.kill(child, signal.SIGKILL)
        os.kill(child, signal.SIGCONT)
        return second

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


def _fill(path: Path) -> None:
    """Take all the space there is."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as stream:
        for size in (1 << 16, 1 << 12):
            with contextlib.suppress(OSError):
                while True:
                    stream.write(bytes(size))
        os.fsync(stream.fileno())


def _become(user: int) -> None:
    """Give up all rights but those of a user."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


if __name__ == "__main__":
    _parent = _Parent()
    answer_all(_parent.answer)
