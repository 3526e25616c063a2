"""Progress of real commands: on a terminal, in a pipe, for a program, and when they are cut off."""

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import streamshard
from tests.cli.test_going_on import CUT_OFF


def on_terminal(*command: str) -> tuple[int, str]:
    """Run a command with a terminal for standard error; returns exit code and what it shows."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    environment = {**os.environ, "TERM": "xterm"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=slave, env=environment)
    os.close(slave)
    shown = os.read(master, 100_000).decode()
    os.close(master)
    return done.returncode, shown


def test_a_terminal_has_a_bar_and_nothing_of_it_is_left(
    saved: Callable[[int], Path], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "streamshard", "repartition", str(saved(2))]
    code, shown = on_terminal(*command, str(tmp_path / "on"), "--world-size", "2")
    assert code == 0
    for text in ("reading headers", "writing:   0%|", "syncing", "committing: 100%|", "B/s"):
        assert text in shown
    assert shown.endswith("\r\x1b[K")
    assert "\n" not in shown


@pytest.mark.parametrize("mode", ["-q", "--progress=none"])
def test_a_terminal_has_nothing_where_that_is_asked_for(
    saved: Callable[[int], Path], tmp_path: Path, mode: str
) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "streamshard", "convert", str(saved(2)), mode]
    done = subprocess.run([*command, str(tmp_path / "on")], stdout=subprocess.PIPE, stderr=slave)
    os.write(slave, b"end")
    assert (done.returncode, os.read(master, 100)) == (0, b"end")
    os.close(slave)
    os.close(master)


def test_cut_off_on_a_terminal_the_message_stands_on_a_line_of_its_own(
    saved: Callable[[int], Path], tmp_path: Path
) -> None:
    arguments = ["after", "note", "2", str(int(signal.SIGINT))]
    command = ["repartition", str(saved(3)), str(tmp_path / "out"), "--world-size", "3"]
    code, shown = on_terminal(sys.executable, "-c", CUT_OFF, *arguments, *command)
    assert code == 130
    bar, _, message = shown.rpartition("\x1b[K")
    assert "writing" in bar
    assert message.startswith("streamshard: interrupted by SIGINT\r\n")
    assert "\n" not in bar


def test_a_pipe_has_nothing_of_a_run_of_a_moment_but_what_is_asked_for(
    saved: Callable[[int], Path], tmp_path: Path
) -> None:
    command = ("repartition", saved(2), tmp_path / "out", "--world-size", 2, "--json")
    done = streamshard(*command, "--progress", "json")
    assert done.code == 0
    assert json.loads(done.out)["verb"] == "repartition"
    told = [json.loads(line) for line in done.err.splitlines()]
    phases = list(dict.fromkeys(one["phase"] for one in told))
    assert phases == ["reading headers", "writing", "syncing", "committing"]
    assert told[-1]["done_bytes"] == told[-1]["total_bytes"]
