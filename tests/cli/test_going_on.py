"""Runs that are cut off at any point, and the same command after that."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from streamshard.cli.main import main
from tests.cli.conftest import optimizer_file, streamshard, tree
from tests.forked import Finished

CUT_OFF = """
import os, pathlib, signal, sys
from streamshard.cli.main import main
from streamshard.engine.journals import journal
where, what, count, signals = sys.argv[1:5]
owner = {"note": journal.Journal, "rename": pathlib.Path, "unlink": pathlib.Path}[what]
real, left = getattr(owner, what), int(count)
def cut_off(self, *rest, **options):
    global left
    if where == "after":
        real(self, *rest, **options)
    if left == 0:
        for number in signals.split():
            os.kill(os.getpid(), int(number))
    left -= 1
    if where == "before":
        return real(self, *rest, **options)
setattr(owner, what, cut_off)
# Whoever runs the tests in the background may have it ignored, which is inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(sys.argv[5:]))
"""
SIZE = 200_000
"""Bytes of a chunk, so that a store has some."""


def cut_off(
    what: str,
    count: int,
    command: Sequence[object],
    *,
    where: str = "after",
    signals: Sequence[int] = (signal.SIGKILL,),
) -> Finished:
    """Run a command that gets signals at a call of a method, before or after what it does."""
    numbers = " ".join(str(int(number)) for number in signals)
    arguments = [where, what, str(count), numbers, *map(str, command)]
    return streamshard(*arguments, script=CUT_OFF)


@pytest.fixture(scope="module")
def store(saved: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of a small checkpoint; not to be changed."""
    path = tmp_path_factory.mktemp("stores") / "run.zarr"
    assert streamshard("convert", saved(2), path, "--codec", "zstd", "--chunk-size", SIZE).code == 0
    return path


Make = Callable[[Callable[[int], Path], Path, Path], tuple[object, ...]]
VERBS: dict[str, Make] = {
    "stage 2": lambda saved, store, out: ("repartition", saved(2), out, "--world-size", 3),
    "stage 3": lambda saved, store, out: ("repartition", saved(3), out, "--world-size", 3),
    "convert": lambda saved, store, out: ("convert", saved(3), out, "--chunk-size", SIZE),
    "zstd": lambda saved, store, out: (
        "convert", saved(2), out, "--codec", "zstd", "--chunk-size", SIZE
    ),
    "from store": lambda saved, store, out: ("repartition", store, out, "--world-size", 2),
}  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_killed_it_goes_on(
    saved: Callable[[int], Path], store: Path, tmp_path: Path, verb: str
) -> None:
    make = VERBS[verb]
    source = tree(saved(2)) | tree(saved(3))
    (tmp_path / "there").mkdir()
    assert streamshard(*make(saved, store, tmp_path / "there" / "whole")).code == 0
    whole = tree(tmp_path / "there" / "whole")
    out = tmp_path / "here" / "out"
    for count in (0, 1):
        assert cut_off("note", count, make(saved, store, out)).code == -signal.SIGKILL
        assert not out.exists()
    done = streamshard(*make(saved, store, out), "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert 0 < report["kept_bytes"] < report["bytes_written"]
    assert tree(out) == whole
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert tree(saved(2)) | tree(saved(3)) == source


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_it_keeps_what_there_is_and_says_so(
    saved: Callable[[int], Path], tmp_path: Path, number: signal.Signals
) -> None:
    command = ("repartition", saved(3), tmp_path / "out", "--world-size", 3)
    done = cut_off("note", 2, command, signals=[number])
    assert done.code == 128 + number, done.err
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    lines = done.err.splitlines()
    assert lines[0] == f"streamshard: interrupted by {number.name}"
    assert lines[1:] == [
        f"{tmp_path}/out.partial: keeps what was written; run the same command again to go on"
    ]
    report = json.loads(streamshard(*command, "--json").out)
    assert 0 < report["kept_bytes"] < report["bytes_written"]


@pytest.mark.parametrize("verb", ["stage 3", "convert"])
def test_what_is_unfinished_is_called_so(
    saved: Callable[[int], Path], store: Path, tmp_path: Path, verb: str
) -> None:
    """Neither a folder of it nor a file counts as a checkpoint."""
    shutil.copytree(saved(3), tmp_path / "run")
    command = VERBS[verb](saved, store, tmp_path / "out.zarr")
    partial = tmp_path / "out.zarr.partial"
    assert cut_off("note", 2, command, signals=[signal.SIGINT]).code == 128 + signal.SIGINT
    for words in (["inspect"], ["inspect", "--json"], ["verify"], ["diff", tmp_path / "run"]):
        done = streamshard(*words, partial)
        assert done.code == 3, done.err
        assert (
            f"{partial}: unfinished: a run is writing it, or was cut off; run the same" in done.err
        )
        assert done.out == ""
    listed = streamshard("inspect", tmp_path, "--json")
    assert listed.code == 0, listed.err
    found = {one["path"]: one["is_whole"] for one in json.loads(listed.out)["checkpoints"]}
    assert found == {"run": True, partial.name: False}
    refused = streamshard("convert", tmp_path, tmp_path / "other.zarr")
    assert refused.err.strip().endswith(f"Give the one in it: {tmp_path}/run")
    assert streamshard(*command).code == 0


def test_asked_twice_it_stops_at_once(saved: Callable[[int], Path], tmp_path: Path) -> None:
    command = ("repartition", saved(3), tmp_path / "out", "--world-size", 3, "--workers", 1)
    done = cut_off("note", 2, command, signals=[signal.SIGTERM, signal.SIGTERM])
    assert (done.code, "Traceback" in done.err) == (143, False)
    assert not (tmp_path / "out").exists()
    assert streamshard(*command).code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_run_that_does_not_come_to_an_end_is_ended(
    saved: Callable[[int], Path], tmp_path: Path
) -> None:
    """Threads that wait for each other, or for a server that is gone, wait for ever."""
    script = (
        "import signal, sys, threading\n"
        "from streamshard.cli import signals\n"
        "from streamshard.cli.main import main\n"
        "from streamshard.operations.transfer.staging import PartialTarget\n"
        "signals._GRACE_SECONDS = 1\n"
        "def stuck(self, *rest):\n"
        "    threading.Event().wait()\n"
        "def asked(self, **options):\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "PartialTarget.__exit__ = stuck\n"
        "PartialTarget.commit = asked\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = ("repartition", saved(3), tmp_path / "out", "--world-size", 3)
    assert streamshard(*command, script=script).code == 143
    report = json.loads(streamshard(*command, "--json").out)
    assert 0 < report["kept_bytes"] < report["bytes_written"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("source", "code"), [(2, 0), (None, 3)])
def test_a_run_that_is_over_is_not_stopped(
    saved: Callable[[int], Path], tmp_path: Path, number: int, source: int | None, code: int
) -> None:
    """It has done all that it will; only the interpreter is still there."""
    script = (
        "import atexit, signal, sys\n"
        "from streamshard.__main__ import program\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"atexit.register(signal.raise_signal, {number:d})\n"
        "program()\n"
    )
    path = tmp_path if source is None else saved(source)
    command = [sys.executable, "-c", script, "verify", str(path), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert (done.stderr == "") == (code == 0)


def test_signals_are_given_back(saved: Callable[[int], Path]) -> None:
    """Who calls the command line as a function goes on after it."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    signal.alarm(1000)
    try:
        assert main(["verify", str(saved(2)), "--quiet"]) == 0
    finally:
        left = signal.alarm(0)
    assert left > 0  # as is an alarm of the caller's
    assert [signal.getsignal(number) for number in numbers] == before


def test_what_does_not_read_back_is_written_again(
    saved: Callable[[int], Path], tmp_path: Path
) -> None:
    """A power failure may take what was written, and leave the note of it."""
    command = ("repartition", saved(2), tmp_path / "out", "--world-size", 3)
    assert streamshard("repartition", saved(2), tmp_path / "whole", "--world-size", 3).code == 0
    assert cut_off("note", 3, command).code == -signal.SIGKILL
    partial = tmp_path / "out.partial"
    (largest,) = sorted(partial.rglob("*optim_states.pt"), key=lambda p: p.stat().st_size)[-1:]
    with largest.open("r+b") as stream:
        stream.seek(largest.stat().st_size // 2)
        stream.write(bytes(1000))
    (partial / "stranger").write_text("nobody knows")
    assert streamshard(*command).code == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def begun(saved: Callable[[int], Path], tmp_path: Path, *options: object) -> Path:
    """Leave a partial target of stage 2 for 3 ranks."""
    shutil.copytree(saved(2), tmp_path / "run", copy_function=shutil.copy2)
    command = ("repartition", tmp_path / "run", tmp_path / "out", "--world-size", 3, *options)
    assert cut_off("note", 2, command).code == -signal.SIGKILL
    return tmp_path / "out.partial"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("repartition", "run", "out", "--world-size", 4), "--world-size 3, and this one has "),
        (("repartition", "run", "out", "--world-size", 3, "--zero-stage", 1), "--zero-stage 2"),
        (("repartition", "run", "out", "--world-size", 3, "--ds-config", "c.json"), "--ds-config"),
        (("convert", "run", "out"), "the verb repartition, and this one has the verb convert"),
    ],
)
def test_another_run_is_refused_and_says_what_is_other(
    saved: Callable[[int], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[object, ...],
    told: str,
) -> None:
    partial = begun(saved, tmp_path)
    config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "steps_per_print": 7}
    (tmp_path / "c.json").write_text(json.dumps({**config, "train_batch_size": 12}))
    monkeypatch.chdir(tmp_path)
    before = tree(partial)
    done = streamshard(*command)
    assert (done.code, told in done.err, "--overwrite" in done.err) == (4, True, True), done.err
    assert tree(partial) == before
    assert streamshard(*command, "--overwrite").code == 0
    assert not partial.exists()


def test_a_changed_source_is_refused_and_named(
    saved: Callable[[int], Path], tmp_path: Path
) -> None:
    partial = begun(saved, tmp_path)
    changed = optimizer_file(tmp_path / "run", 1)
    before = tree(partial)
    for change in (lambda: os.utime(changed), lambda: shutil.copy2(changed, tmp_path / "copy")):
        change()
        if (tmp_path / "copy").exists():  # the same in all but its inode
            (tmp_path / "copy").replace(changed)
        done = streamshard("repartition", tmp_path / "run", tmp_path / "out", "--world-size", 3)
        assert (done.code, f"{changed} has changed" in done.err) == (4, True), done.err
        assert tree(partial) == before
    (tmp_path / "run" / "tokenizer.json").write_text("{}")
    done = streamshard("repartition", tmp_path / "run", tmp_path / "out", "--world-size", 3)
    assert (done.code, "files, where" in done.err) == (4, True), done.err


def test_a_target_that_was_to_be_replaced(saved: Callable[[int], Path], tmp_path: Path) -> None:
    """Is there until the new one is whole; the permission to replace it holds for going on."""
    out = tmp_path / "out"
    assert streamshard("repartition", saved(2), out, "--world-size", 2).code == 0
    before = tree(out)
    command = ("repartition", saved(2), out, "--world-size", 3)
    assert cut_off("note", 2, (*command, "--overwrite")).code == -signal.SIGKILL
    assert tree(out) == before
    done = cut_off("note", 1, (*command,), signals=[signal.SIGTERM])
    assert (done.code, "the same command again" in done.err) == (143, True)
    assert tree(out) == before
    done = cut_off("note", 1, (*command, "--overwrite"), signals=[signal.SIGTERM])
    assert (done.code, "the same command without --overwrite" in done.err) == (143, True)
    report = json.loads(streamshard(*command, "--json").out)
    assert 0 < report["kept_bytes"] < report["bytes_written"]
    assert tree(out) != before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("what", ["rename", "unlink"])
def test_killed_while_names_change(
    saved: Callable[[int], Path], tmp_path: Path, overwrite: bool, where: str, what: str
) -> None:
    out = tmp_path / "out"
    command: list[object] = ["repartition", saved(2), out, "--world-size", 3]
    assert streamshard("repartition", saved(2), tmp_path / "w", "--world-size", 3).code == 0
    whole = tree(tmp_path / "w")
    shutil.rmtree(tmp_path / "w")
    assert streamshard("repartition", saved(2), tmp_path / "o", "--world-size", 2).code == 0
    old = tree(tmp_path / "o")
    for count in range(9):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        if overwrite:
            shutil.copytree(tmp_path / "o", out)
        first = [*command, "--overwrite"] if overwrite else command
        killed = cut_off(what, count, first, where=where)
        if killed.code == 0:
            assert count > 0
            break
        assert killed.code == -signal.SIGKILL
        found = {name: data for name, data in tree(out).items() if "journal" not in name}
        assert found in ({}, old, whole)
        done = streamshard(*(first if count % 2 else command))
        if done.code == 4 and tree(out) == old:
            done = streamshard(*first)  # nothing had begun that could be gone on with
        assert done.code == 0 or (done.code == 4 and tree(out) == whole), done.err
        assert tree(out) == whole
        beside = {path.name for path in tmp_path.iterdir()} - {"o", "out"}
        # Where nothing was left to do, nobody was there to remove the lock of the dead.
        assert beside == set() or (done.code, beside) == (4, {".streamshard.lock.out"})
    else:
        pytest.fail("never came to an end")
