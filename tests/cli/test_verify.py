"""`verify` on the command line: what is printed where, and the exit code."""

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

from tests.cli.conftest import model_file, optimizer_file, streamshard, tree


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_good_checkpoint(saved: Callable[[int], Path], stage: int) -> None:
    before = tree(saved(stage))
    done = streamshard("verify", saved(stage))
    assert (done.code, done.err) == (0, "")
    for text in ("DeepSpeed shards", "global_step", "checksums", "No problem found."):
        assert text in done.out
    assert tree(saved(stage)) == before


def test_every_problem_is_printed_and_the_exit_code_is_6(stage_3: Path) -> None:
    for path in (optimizer_file(stage_3, 1), model_file(stage_3, 2)):
        damage(path)
    done = streamshard("verify", stage_3)
    assert done.code == 6
    assert done.err == f"streamshard: {stage_3}: 2 problems\n"
    assert done.out.count("damaged: ") + done.out.count("malformed: ") == 2
    for path in (optimizer_file(stage_3, 1), model_file(stage_3, 2)):
        assert str(path) in done.out


def test_quiet_tells_the_problems_and_nothing_else(stage_2: Path) -> None:
    done = streamshard("verify", stage_2, "-q")
    assert (done.code, done.out, done.err) == (0, "", "")
    damage(optimizer_file(stage_2, 1))
    done = streamshard("verify", stage_2, "-q")
    assert (done.code, done.out) == (6, "")
    assert str(optimizer_file(stage_2, 1)) in done.err
    assert "Traceback" not in done.err


def test_json_is_one_document_whatever_is_found(stage_2: Path) -> None:
    assert json.loads(streamshard("verify", stage_2, "--json").out)["problems"] == []
    optimizer_file(stage_2, 3).unlink()
    damage(optimizer_file(stage_2, 1))
    done = streamshard("verify", stage_2, "--json")
    assert done.code == 6
    found = json.loads(done.out)
    assert [(p["kind"], p["file"]) for p in found["problems"]] == [
        ("missing", str(optimizer_file(stage_2, 3))),
        ("damaged", str(optimizer_file(stage_2, 1))),
    ]
    assert found["bytes_read"] > 0
    assert found["peak_bytes"] <= found["projected_bytes"]


def test_two_checkpoints(saved: Callable[[int], Path], tmp_path: Path) -> None:
    out, store = tmp_path / "out", tmp_path / "run.zarr"
    assert streamshard("convert", saved(2), store, "--codec", "zstd", "--verify", "-q").code == 0
    verb = ("repartition", store, out, "--world-size", 3, "--zero-stage", 3, "--verify")
    written = streamshard(*verb)
    assert written.code == 0
    assert "read back: no difference" in written.out
    done = streamshard("verify", out, "--against", saved(2))
    assert (done.code, done.err) == (0, "")
    assert "No difference." in done.out


def test_differences_are_printed(stage_2: Path, saved: Callable[[int], Path]) -> None:
    damage(optimizer_file(stage_2, 1))
    done = streamshard("verify", stage_2, "--against", saved(2))
    assert done.code == 6
    assert done.err == f"streamshard: {stage_2}: 1 difference from {saved(2)}\n"
    assert " elements differ, the first at index " in done.out


def test_samples_and_digests(saved: Callable[[int], Path], tmp_path: Path) -> None:
    done = streamshard("verify", saved(2), "--sample", "2/3")
    assert done.code == 0
    assert "2/3" in done.out
    assert streamshard("verify", saved(2), "--sample", "5%", "-q").code == 0
    done = streamshard("verify", saved(2), "--sample", "a third")
    assert (done.code, done.out) == (2, "")
    assert "write 5% or 3/20" in done.err
    streamshard("repartition", saved(2), tmp_path / "out", "--world-size", 3, "-q")
    digests = [
        json.loads(streamshard("verify", path, "--digests", "--json").out)["digests"]
        for path in (saved(2), tmp_path / "out")
    ]
    assert digests[0] == digests[1] != {}
    table = streamshard("verify", saved(2), "--digests").out
    assert all(f"{digest}  {name}" in table for name, digest in digests[0].items())
    both = streamshard("verify", saved(2), "--digests", "--against", saved(3))
    assert both.code == 2


@pytest.mark.parametrize("place", ["", "none", "x.{rank}.pt"])
def test_what_is_no_checkpoint_exits_with_3(tmp_path: Path, place: str) -> None:
    done = streamshard("verify", tmp_path / place)
    assert (done.code, done.out) == (3, "")
    assert "Traceback" not in done.err


def test_too_small_a_limit_exits_with_5(saved: Callable[[int], Path]) -> None:
    for options in ((), ("--against", saved(3))):
        done = streamshard("verify", saved(2), *options, "--memory-limit", "1MiB")
        assert done.code == 5
        assert "use --memory-limit" in done.err


def test_against_tells_what_it_does_not_look_at(saved: Callable[[int], Path]) -> None:
    done = streamshard("verify", saved(2), "--against", saved(2))
    assert "No difference. Checksums were not looked at" in done.out


def test_a_file_is_no_checkpoint(saved: Callable[[int], Path]) -> None:
    done = streamshard("verify", saved(2) / "latest")
    assert (done.code, done.out) == (3, "")
    assert f"give its directory, {saved(2)}" in done.err


def test_it_can_be_interrupted_in_the_middle_of_a_file_of_any_size(
    saved: Callable[[int], Path], tmp_path: Path
) -> None:
    """A file of holes takes longer to read than any test may, unless reading it is broken off."""
    store = tmp_path / "run.zarr"
    assert streamshard("convert", saved(2), store, "-q").code == 0
    (store / "meta/manifest/c/0").unlink()
    with (store / "chunk").open("wb") as stream:
        stream.truncate(1 << 40)
    before = sizes_below(tmp_path)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    # `timeout` passes a signal on, and ends what does not end by itself.
    command = ["timeout", "60", sys.executable, "-m", "streamshard", "verify", str(store)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=slave)
    os.close(slave)
    shown = os.read(master, 1000)  # the bar appears when reading begins
    child.send_signal(signal.SIGINT)
    while data := _read_terminal(master):
        shown += data
    os.close(master)
    out, _ = child.communicate()
    assert (child.returncode, out) == (130, b"")
    assert b"streamshard: interrupted" in shown
    assert b"Traceback" not in shown
    assert sizes_below(tmp_path) == before


def _read_terminal(master: int) -> bytes:
    try:
        return os.read(master, 1000)
    except OSError:  # how the end of a terminal reads
        return b""


def sizes_below(root: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in root.rglob("*")}
