"""Runs that are cut off at any point, the same command after that, and journals of others."""

import json
import os
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from streamshard.cli.main import main
from streamshard.source.unfinished import JOURNAL
from tests.cli.conftest import Saved, flip, in_process, refused, streamshard, tree
from tests.fabricated import optimizer_file
from tests.forked import Finished

CUT_OFF = """
import os, pathlib, signal, sys
from streamshard.cli.main import main
from streamshard.engine.journals import journal
where, what, count, signals = sys.argv[1:5]
owner = {"note_all": journal.Journal, "rename": pathlib.Path, "unlink": pathlib.Path}[what]
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_it_keeps_what_there_is_and_says_so(
    saved: Saved, tmp_path: Path, number: signal.Signals
) -> None:
    command = ("repartition", saved(3), tmp_path / "out", "--world-size", 3)
    done = cut_off("note_all", 2, command, signals=[number])
    assert done.code == 128 + number, done.err
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    lines = done.err.splitlines()
    assert lines[0] == f"streamshard: interrupted by {number.name}"
    assert lines[1:] == [
        f"{tmp_path}/out.partial: keeps what was written; run the same command again to go on"
    ]
    report = json.loads(streamshard(*command, "--json").out)
    assert 0 < report["kept_bytes"] < report["bytes_written"]


def test_what_is_unfinished_is_called_so(saved: Saved, tmp_path: Path) -> None:
    """Neither a folder of it nor a file counts as a checkpoint."""
    shutil.copytree(saved(3), tmp_path / "run")
    command = ("convert", saved(3), tmp_path / "out.zarr")
    partial = tmp_path / "out.zarr.partial"
    assert cut_off("note_all", 2, command, signals=[signal.SIGINT]).code == 128 + signal.SIGINT
    for words in (["inspect"], ["inspect", "--json"], ["verify"], ["diff", tmp_path / "run"]):
        done = in_process(*words, partial)
        assert (done.code, done.out) == (3, "")
        said = f"{partial}: unfinished: a run is writing it, or was cut off; run the same"
        assert said in done.err
    listed = in_process("inspect", tmp_path, "--json")
    found = {one["path"]: one["is_whole"] for one in json.loads(listed.out)["checkpoints"]}
    assert found == {"run": True, partial.name: False}
    refused = in_process("convert", tmp_path, tmp_path / "other.zarr")
    assert refused.err.strip().endswith(f"Give the one in it: {tmp_path}/run")
    assert in_process(*command).code == 0


def test_asked_twice_it_stops_at_once(saved: Saved, tmp_path: Path) -> None:
    command = ("repartition", saved(3), tmp_path / "out", "--world-size", 3, "--workers", 1)
    done = cut_off("note_all", 2, command, signals=[signal.SIGTERM, signal.SIGTERM])
    assert done.code == 143
    assert not (tmp_path / "out").exists()
    assert streamshard(*command).code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_run_that_does_not_come_to_an_end_is_ended(saved: Saved, tmp_path: Path) -> None:
    """Threads that wait for each other, or for a server that is gone, wait for ever."""
    script = (
        "import signal, sys, threading\n"
        "from streamshard.cli import signals\n"
        "from streamshard.cli.main import main\n"
        "from streamshard.transfer.staging import PartialTarget\n"
        "signals._GRACE_SECONDS = 1\n"
        "def stuck(self, *rest):\n"
        "    threading.Event().wait()\n"
        "def asked(self, *args, **options):\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "PartialTarget.__exit__ = stuck\n"
        "PartialTarget.commit = asked\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = ("repartition", saved(3), tmp_path / "out", "--world-size", 3)
    assert streamshard(*command, script=script).code == 143
    report = json.loads(streamshard(*command, "--json").out)
    assert 0 < report["kept_bytes"] < report["bytes_written"]


@pytest.mark.parametrize(
    ("number", "source", "code"), [(signal.SIGINT, 2, 0), (signal.SIGTERM, None, 3)]
)
def test_a_run_that_is_over_is_not_stopped(
    saved: Saved, tmp_path: Path, number: int, source: int | None, code: int
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


def test_signals_are_given_back(saved: Saved) -> None:
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


def test_what_does_not_read_back_is_written_again(saved: Saved, tmp_path: Path) -> None:
    """A power failure may take what was written, and leave the note of it."""
    command = ("repartition", saved(2), tmp_path / "out", "--world-size", 3)
    assert streamshard("repartition", saved(2), tmp_path / "whole", "--world-size", 3).code == 0
    assert cut_off("note_all", 3, command).code == -signal.SIGKILL
    partial = tmp_path / "out.partial"
    flip(max(partial.rglob("*optim_states.pt"), key=lambda path: path.stat().st_size))
    (partial / "stranger").write_text("nobody knows")
    assert streamshard(*command).code == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.parametrize("count", [1, 3])
def test_what_a_killed_run_read_is_compared_by_the_next(
    saved: Saved, tmp_path: Path, count: int
) -> None:
    """It had no time to compare what it had read of a damaged source for files that are kept."""
    run = shutil.copytree(saved(2), tmp_path / "run", copy_function=shutil.copy2)
    flip(optimizer_file(run, 0))
    command = ("repartition", run, tmp_path / "out", "--world-size", 3, "--workers", 1)
    assert cut_off("note_all", count, command).code == -signal.SIGKILL
    assert "were saved" in refused(6, f"{optimizer_file(run, 0)}", *command).err
    assert not (tmp_path / "out").exists()


@pytest.fixture
def begun(saved: Saved, tmp_path: Path) -> Path:
    """A partial target of stage 2 for 3 ranks."""
    shutil.copytree(saved(2), tmp_path / "run", copy_function=shutil.copy2)
    command = ("repartition", tmp_path / "run", tmp_path / "out", "--world-size", 3)
    assert cut_off("note_all", 2, command).code == -signal.SIGKILL
    return tmp_path / "out.partial"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("repartition run out --world-size 4", "--world-size 3, and this one has "),
        ("repartition run out --world-size 3 --zero-stage 1", "--zero-stage 2"),
        ("repartition run out --world-size 3 --ds-config c.json", "--ds-config"),
        ("convert run out", "the verb repartition, and this one has the verb convert"),
    ],
)
def test_another_run_is_refused_and_says_what_is_other(
    begun: Path, monkeypatch: pytest.MonkeyPatch, command: str, told: str
) -> None:
    monkeypatch.chdir(begun.parent)
    config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "steps_per_print": 7}
    Path("c.json").write_text(json.dumps({**config, "train_batch_size": 12}))
    before = tree(begun)
    done = in_process(*command.split())
    assert (done.code, told in done.err, "--overwrite" in done.err) == (4, True, True), done.err
    assert tree(begun) == before
    assert in_process(*command.split(), "--overwrite").code == 0
    assert not begun.exists()


def with_another_inode(path: Path) -> None:
    Path(shutil.copy2(path, path.with_name("copy"))).replace(path)


def rewritten_in_place(path: Path) -> None:
    """Change a byte, as a program does that restores the time, such as `rsync --inplace -t`."""
    stat = path.stat()
    flip(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def of_another_mode(path: Path) -> None:
    """Change what the system dates as it does a change of the content."""
    path.chmod(0o640)


@pytest.mark.parametrize(
    "change", [os.utime, with_another_inode, rewritten_in_place, of_another_mode]
)
def test_a_changed_source_is_refused_and_named(begun: Path, change: Callable[[Path], None]) -> None:
    run, before = begun.with_name("run"), tree(begun)
    command = ("repartition", run, begun.with_name("out"), "--world-size", 3)
    change(optimizer_file(run, 1))
    refused(4, f"{optimizer_file(run, 1)} has changed", *command)
    assert tree(begun) == before
    (run / "tokenizer.json").write_text("{}")
    refused(4, "files, where", *command)


def test_a_target_that_was_to_be_replaced(saved: Saved, tmp_path: Path) -> None:
    """Is there until the new one is whole; the permission to replace it holds for going on."""
    out = tmp_path / "out"
    assert streamshard("repartition", saved(2), out, "--world-size", 2).code == 0
    before = tree(out)
    command = ("repartition", saved(2), out, "--world-size", 3)
    assert cut_off("note_all", 2, (*command, "--overwrite")).code == -signal.SIGKILL
    assert tree(out) == before
    done = cut_off("note_all", 1, (*command,), signals=[signal.SIGTERM])
    assert (done.code, "the same command again" in done.err) == (143, True)
    assert tree(out) == before
    done = cut_off("note_all", 1, (*command, "--overwrite"), signals=[signal.SIGTERM])
    assert (done.code, "the same command without --overwrite" in done.err) == (143, True)
    report = json.loads(streamshard(*command, "--json").out)
    assert 0 < report["kept_bytes"] < report["bytes_written"]
    assert tree(out) != before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# Journals with correct checksums and other content ------------------------------------------------


def line(text: str) -> bytes:
    return b"\n%08x %s\n" % (zlib.crc32(text.encode()), text.encode())


def header(**changes: object) -> str:
    """Spell a header of the present format that is no run's."""
    known = {"format": 5, "options": {}, "headers": "", "files": "", "replaces": False}
    return json.dumps({**known, **changes})


def noted(*row: object, read: object = "") -> str:
    """Spell the line of a file that a job finished."""
    return json.dumps([[row], read])


FOREIGN: dict[str, Sequence[str]] = {
    "a header of another format": [header(format=4)],
    "a span of another format": [header(format=4), '["a", 0, 1, 2]'],
    "an empty header": ["{}"],
    "a format that is no number": [header(format=[2])],
    "options that are a list": [header(options=[["verb", "x"]])],
    "options that are no texts": [header(options={"verb": 3})],
    "files that are a number": [header(files=3)],
    "files that are no base64": [header(files="ä")],
    "headers that are a list": [header(headers=[])],
    "no JSON": [header(), "{"],
    "nested without end": [header(), "[" * 100_000],
    "a number of many digits": [header(), f'[[["a", "", 1, {"9" * 5000}]], ""]'],
    "a text": [header(), '"done"'],
    "a number": [header(), "7"],
    "null": [header(), "null"],
    "a short file": [header(), noted("a", "", 1)],
    "a file of texts": [header(), noted("a", "", "1", "2")],
    "a file of lists": [header(), noted("a", "", [1], 2)],
    "a version that is a number": [header(), noted("a", 0, 1, 2)],
    "a path that is a number": [header(), noted(1, "", 1, 2)],
    "a path that is no text": [header(), noted("\ud800", "", 1, 2)],
    "a path that leads away": [header(), noted("../a", "", 1, 2)],
    "a path that begins at the root": [header(), noted("/a", "", 1, 2)],
    "a negative number": [header(), noted("a", "", -1, 2)],
    "a large number": [header(), noted("a", "", 1 << 64, 2)],
    "a short span": [header(), noted("a", "", 1, 2, 0, 1, 2)],
    "a span without its regions": [header(), noted("a", "", 1, 2, 0, 1, 2, 1 << 40)],
    "a short region": [header(), noted("a", "", 1, 2, 0, 1, 2, 1, 0, 1, 2, 3)],
    "a span of texts": [header(), noted("a", "", 1, 2, "0", 1, 2, 0)],
    "ranges that are no base64": [header(), noted("a", "", 1, 2, read="ä")],
    "a torn range": [header(), noted("a", "", 1, 2, read="AAAA")],
    "a file before the header": [noted("a", ""), header()],
    "two headers": [header(), header()],
    "whole before the header": ['"whole"', "[]"],
}


def test_a_journal_of_another_version_is_refused_with_what_to_do(
    saved: Saved, tmp_path: Path
) -> None:
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    command = ("repartition", saved(2), out, "--world-size", 3)
    partial.mkdir()
    (partial / "of another").write_bytes(b"!")
    for lines in FOREIGN.values():
        journal = b"".join(map(line, lines))
        (partial / JOURNAL).write_bytes(journal)
        before = tree(tmp_path)
        done = refused(4, "--overwrite", *command)
        assert "is of another version of streamshard" in done.err, lines
        assert tree(tmp_path).items() >= before.items()
    assert in_process(*command, "--overwrite").code == 0
    assert not partial.exists()
    whole = tree(out)
    assert "of another" not in whole
    (out / JOURNAL).write_bytes(journal)
    refused(4, "exists; use --overwrite to replace it", *command)
    assert in_process(*command, "--overwrite").code == 0
    assert tree(out) == whole


def test_a_journal_that_was_whole_completes_nothing_that_is_not_known(
    saved: Saved, tmp_path: Path
) -> None:
    command = ("repartition", saved(2), tmp_path / "out", "--world-size", 3)
    assert in_process(*command).code == 0
    (tmp_path / "out" / JOURNAL).write_bytes(line("{}") + line('"whole"'))
    assert in_process(*command).code == 4
