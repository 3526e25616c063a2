"""The process around a verb: signals while its modules load, and streams that cannot be written."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import streamshard
from tests.forked import Finished
from tests.job import TAG

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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "module", ["argparse", "streamshard.cli.main", "numpy", "numpy._core._multiarray_umath", "zlib"]
)
@pytest.mark.parametrize("how", ["script", "module"])
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


def test_the_script_is_the_one_that_is_tested() -> None:
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    assert 'streamshard = "streamshard.__main__:program"\n' in pyproject.read_text()


def mute(arguments: str, where: str) -> int:
    """Run the command line with streams of its own; returns the exit code."""
    line = f"{shlex.quote(sys.executable)} -m streamshard {arguments} {where}"
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}"], capture_output=True
    ).returncode


@pytest.mark.parametrize("where", ["2>/dev/full", "2>&1 >/dev/null | true"])
def test_the_exit_code_is_that_of_the_outcome_whether_it_can_be_told_or_not(
    where: str, run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    resize = f"repartition {run} {out} --world-size"
    assert mute(f"{resize} 1 --progress json", where) == 0
    assert mute(f"verify {out} --against {run}", where) == 0
    assert mute(f"{resize} 1", where) == 4
    assert mute(f"{resize} none", where) == 2
    assert mute(f"inspect {tmp_path / 'nothing'}", where) == 3
    assert mute(f"verify {run} --memory-limit 1B", where) == 5
    for step in (8, 9):
        shutil.copytree(run / TAG, run / f"global_step{step}")
    damaged = next((run / TAG).glob("*_rank_0_*optim_states.pt"))
    damaged.write_bytes(damaged.read_bytes()[:-100])
    assert mute(f"verify {run} --tag {TAG}", where) == 6
    night = f"compact {run} {tmp_path / 'archive'} --min-age 0s --keep-last 2"
    assert mute(night, where) == 3


@pytest.mark.parametrize("arguments", ["--help", "--version", "convert --help"])
def test_help_that_cannot_be_shown_is_an_error_in_one_line(arguments: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "streamshard", *arguments.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    message = "streamshard: standard output: cannot be written (No space left on device)\n"
    assert (done.returncode, done.stderr) == (4, message)


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (("repartion", "a", "b"), "repartition"),
        (("repartition", "a", "b", "--word-size", "6"), "--world-size"),
        (("repartition", "a", "b", "--ds_config=ds.json", "--verfy"), "--ds-config --verify"),
        (("convert", "a", "b.zarr", "--codec", "ztsd"), "zstd"),
        (("verify", "a", "--agianst", "b"), "--against"),
    ],
)
def test_what_is_mistyped_is_answered_with_what_is_near(
    arguments: tuple[str, ...], near: str
) -> None:
    done = streamshard(*arguments)
    assert done.code == 2
    assert done.err.endswith(f"; did you mean {near}?\n")


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        (
            ("convert", "a", "b.zarr", "--expert-parallel", "1"),
            "--expert-parallel 1; --expert-parallel is an option of repartition\n",
        ),
        (
            ("diff", "a", "b", "--codec=zstd", "--workrs", "2"),
            "; --codec is an option of convert, compact; did you mean --workers?\n",
        ),
    ],
)
def test_an_option_of_other_verbs_is_not_taken_for_a_mistyped_one(
    arguments: tuple[str, ...], end: str
) -> None:
    done = streamshard(*arguments)
    assert done.code == 2
    assert done.err.endswith(end)


def test_what_is_near_to_nothing_gets_no_advice() -> None:
    for arguments in (("frobnicate",), ("inspect", "a", "b"), ("inspect", "a", "--qqqqqq")):
        done: Finished = streamshard(*arguments)
        assert (done.code, "did you mean" in done.err) == (2, False)
