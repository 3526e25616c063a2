"""Holding back, and letting others go first."""

import os
import pty
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from streamshard.io.throttle import Throttle
from tests.compact.runs import make_run

RATE = 1_000_000


def test_it_takes_as_long_as_it_must_from_any_number_of_threads() -> None:
    seen: list[int] = []
    began = time.monotonic()  # before the first byte may come
    throttle = Throttle(seen.append, RATE)

    def advance() -> None:
        for _ in range(4):
            throttle.advance(25_000)

    threads = [threading.Thread(target=advance) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(seen) == 300_000
    assert time.monotonic() - began >= 0.3


SCRIPT = """
import ctypes, os, sys
from streamshard.cli.main import main
main(["compact", *sys.argv[1:], "-n"])
numbers = {"x86_64": 252, "aarch64": 31}  # ioprio_get
get = numbers.get(os.uname().machine)
print(os.getpriority(os.PRIO_PROCESS, 0), ctypes.CDLL(None).syscall(get, 1, 0) if get else 3 << 13)
"""


@pytest.mark.parametrize(("stdin", "wanted"), [(os.devnull, 19), ("a terminal", 5)])
def test_others_go_first(tmp_path: Path, stdin: str, wanted: int) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    run = make_run(tmp_path / "run")
    command = [sys.executable, "-c", SCRIPT, str(run), str(tmp_path / "archive")]
    master, slave = pty.openpty()
    with Path(os.ttyname(slave) if stdin == "a terminal" else stdin).open() as stream:
        done = subprocess.run(command, stdin=stream, capture_output=True, text=True)
    os.close(slave)
    os.close(master)
    niceness, io_class = map(int, done.stdout.splitlines()[-1].split())
    assert niceness == min(before + wanted, 19)
    assert io_class in (3 << 13, (3 << 13) | 7)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
