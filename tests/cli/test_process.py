"""The process around a verb: signals, exit codes, and streams: terminals, full or closed ones."""

import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Saved, on_terminal, streamshard, without_progress
from tests.cli.test_going_on import CUT_OFF
from tests.job import TAG

PROGRAM = [sys.executable, "-m", "streamshard"]
INTERRUPT = """
import os, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Interrupt())
"""
SCRIPT = """
import re, sys
from streamshard.__main__ import program
if __name__ == "__main__":
    sys.exit(program())
"""
"""What pip writes into the file `streamshard` for the entry point in pyproject.toml."""


@pytest.mark.parametrize(
    ("how", "module", "number"),
    [
        ("script", "argparse", signal.SIGINT),
        ("module", "streamshard.cli.inspect_command", signal.SIGTERM),
        ("module", "numpy", signal.SIGINT),
        ("script", "numpy._core._multiarray_umath", signal.SIGTERM),
        ("module", "zlib", signal.SIGINT),
    ],
)
def test_a_signal_while_modules_load_is_no_traceback(
    tmp_path: Path, how: str, module: str, number: signal.Signals
) -> None:
    script = tmp_path / "streamshard"
    script.write_text(SCRIPT)
    hook = INTERRUPT.format(module=module, number=int(number))
    (tmp_path / "sitecustomize.py").write_text(hook)
    search = os.pathsep.join([str(tmp_path), str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    begin = [str(script)] if how == "script" else ["-m", "streamshard"]
    done = subprocess.run(
        [sys.executable, *begin, "inspect", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    code = {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert done.returncode == code
    assert (done.stdout, done.stderr) == ("", f"streamshard: interrupted by {number.name}\n")


HIDDEN = """
import os, signal, sys, time
from streamshard.cli import main
def locked():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except KeyboardInterrupt:
        raise RuntimeError("release unlocked lock")
class Deleted:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
def run(arguments):
    {begun}
    time.sleep(60)
load = main.registry.load
main.registry.load = lambda name: run if name.endswith(":run_newest") else load(name)
sys.exit(main.main(["newest", "."]))
"""
"""A signal comes while `threading.Condition` takes its lock, or while an object is deleted."""


@pytest.mark.parametrize("begun", ["locked()", "Deleted()"])
def test_an_error_that_a_signal_causes_is_the_signal(begun: str) -> None:
    program = HIDDEN.replace("{begun}", begun)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (143, "streamshard: interrupted by SIGTERM\n")


def test_the_script_is_the_one_that_is_tested() -> None:
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    assert 'streamshard = "streamshard.__main__:program"\n' in pyproject.read_text()


# Streams ------------------------------------------------------------------------------------------


def in_shell(arguments: str, where: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a shell that says what becomes of its streams."""
    line = f"set -o pipefail; {shlex.join(PROGRAM)} {arguments} {where}"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True)


def test_the_exit_code_is_that_of_the_outcome_whether_it_can_be_told_or_not(
    run: Path, tmp_path: Path
) -> None:
    """On a full disk, and where nobody reads what is told, in turn."""
    wheres = itertools.cycle(["2>/dev/full", "2>&1 >/dev/null | true"])
    out = tmp_path / "out"
    for step in (8, 9):
        shutil.copytree(run / TAG, run / f"global_step{step}")
    resize = f"repartition {run} {out} --world-size"
    for arguments, code in (
        (f"{resize} 1", 0),
        (f"{resize} 1", 4),
        (f"{resize} none", 2),
        (f"inspect {tmp_path / 'nothing'}", 3),
        (f"verify {run} --memory-limit 1B", 5),
    ):
        assert in_shell(arguments, next(wheres)).returncode == code, arguments
    damaged = next((run / TAG).glob("*_rank_0_*optim_states.pt"))
    damaged.write_bytes(damaged.read_bytes()[:-100])
    assert in_shell(f"verify {run} --tag {TAG}", next(wheres)).returncode == 6
    command = f"compact {run} {tmp_path / 'archive'} --min-age 0s --keep-last 2"
    assert in_shell(command, next(wheres)).returncode == 3


@pytest.mark.parametrize("arguments", ["--help", "inspect {run} --json", "inspect {run}"])
def test_a_full_standard_output_is_an_error_in_one_line(arguments: str, run: Path) -> None:
    done = in_shell(arguments.format(run=run), ">/dev/full")
    message = "streamshard: standard output: cannot be written (No space left on device)\n"
    assert (done.returncode, done.stderr) == (4, message)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_run_needs_no_open_streams(closed: str, run: Path, tmp_path: Path) -> None:
    done = in_shell(f"repartition {run} {tmp_path / 'out'} --world-size 2", closed)
    assert (done.returncode, without_progress(done.stderr)) == (0, "")
    assert streamshard("verify", tmp_path / "out", "--against", run).code == 0


@pytest.mark.parametrize("arguments", ["verify {run}", "convert {run} a.zarr -n"])
def test_a_result_that_cannot_be_printed_is_an_error(arguments: str, run: Path) -> None:
    done = in_shell(arguments.format(run=run), ">&-")
    message = "streamshard: standard output: cannot be written (Bad file descriptor)\n"
    assert (done.returncode, without_progress(done.stderr)) == (4, message)


def test_a_pipe_that_is_closed_is_no_error(saved: Saved) -> None:
    done = in_shell(f"inspect {saved(2)} -v", "| head -n 1")
    assert done.stderr == ""
    assert done.returncode in (0, 128 + signal.SIGPIPE)


# Progress -----------------------------------------------------------------------------------------


def test_a_terminal_has_a_bar_and_nothing_of_it_is_left(saved: Saved, tmp_path: Path) -> None:
    command = ("repartition", saved(2), tmp_path / "out", "--world-size", 2)
    done = on_terminal("-m", "streamshard", *command)
    assert done.code == 0
    for text in ("reading headers", "writing:   0%|", "syncing", "committing: 100%|", "B/s"):
        assert text in done.err
    assert done.err.endswith("\r\x1b[K")
    assert "\n" not in done.err


def test_a_terminal_has_nothing_where_that_is_asked_for(saved: Saved, tmp_path: Path) -> None:
    done = on_terminal("-m", "streamshard", "convert", saved(2), tmp_path / "out", "-q")
    assert (done.code, done.err) == (0, "")


def test_cut_off_on_a_terminal_the_message_stands_on_a_line_of_its_own(
    saved: Saved, tmp_path: Path
) -> None:
    command = ("repartition", saved(3), tmp_path / "out", "--world-size", 3)
    done = on_terminal("-c", CUT_OFF, "after", "note_all", 2, int(signal.SIGINT), *command)
    assert done.code == 130
    bar, _, message = done.err.rpartition("\x1b[K")
    assert "writing" in bar
    assert message.startswith("streamshard: interrupted by SIGINT\r\n")
    assert "\n" not in bar


def test_it_can_be_interrupted_in_the_middle_of_a_file_of_any_size(
    saved: Saved, tmp_path: Path
) -> None:
    """A file of holes takes longer to read than any test may, unless reading it is broken off."""
    store = tmp_path / "run.zarr"
    assert streamshard("convert", saved(2), store, "-q").code == 0
    (store / "meta/manifest/c/0").unlink()
    with (store / "chunk").open("wb") as stream:
        stream.truncate(1 << 40)
    before = {path: path.stat().st_size for path in tmp_path.rglob("*")}
    # The bar appears when reading begins.
    done = on_terminal("-m", "streamshard", "verify", store, sent=signal.SIGINT)
    assert (done.code, done.out) == (130, "")
    assert "streamshard: interrupted" in done.err
    assert "Traceback" not in done.err
    assert {path: path.stat().st_size for path in tmp_path.rglob("*")} == before
