"""What somebody, or an archive that was unpacked, put where a run writes is refused by name."""

import os
from pathlib import Path

import pytest

from tests.cli.conftest import streamshard
from tests.compact.runs import make_run
from tests.fabricated import write
from tests.job import Job

PRECIOUS = b"a month of training"
KINDS = ("a symbolic link", "a hard link", "a pipe (FIFO)", "a directory")
TOLD = {"a hard link": "a file with other content than a lock's"}
"""What is told of a kind in its place."""


def plant(kind: str, path: Path, other: Path) -> None:
    """Put something at a path that leads to another file, or is no file."""
    if kind == "a symbolic link":
        path.symlink_to(other)
    elif kind == "a hard link":
        path.hardlink_to(other)
    elif kind == "a directory":
        path.mkdir()
    else:
        os.mkfifo(path)


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "precious"
    path.write_bytes(PRECIOUS)
    return path


@pytest.mark.parametrize("kind", [*KINDS, "a symbolic link to nothing"])
@pytest.mark.parametrize("verb", ["repartition", "compact"])
def test_a_lock_that_leads_elsewhere(verb: str, kind: str, tmp_path: Path, precious: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    if verb == "compact":
        make_run(run)
        words, lock = ["--delete"], run / ".streamshard.lock"
    else:
        write(Job(), run)
        words, lock = ["--world-size", "3"], tmp_path / ".streamshard.lock.out"
    name = kind.removesuffix(" to nothing")
    plant(name, lock, precious if name == kind else tmp_path / "gone")
    done = streamshard(verb, run, out, *words)
    assert (done.code, done.out) == (4, "")
    assert f"{lock}: cannot be written (it is {TOLD.get(name, name)}" in done.err
    assert "move it away" in done.err
    assert precious.read_bytes() == PRECIOUS
    assert os.path.lexists(lock)
    assert not (tmp_path / "gone").exists()


def test_a_journal_that_is_a_pipe(tmp_path: Path) -> None:
    run, journal = write(Job(), tmp_path / "run"), tmp_path / "out.partial/.streamshard.journal"
    journal.parent.mkdir()
    os.mkfifo(journal)
    done = streamshard("repartition", run, tmp_path / "out", "--world-size", "3")
    assert done.code == 4
    assert f"{journal}: cannot be written (it is a pipe" in done.err


def test_a_partial_target_that_is_a_link(tmp_path: Path) -> None:
    run, out, partial = write(Job(), tmp_path / "run"), tmp_path / "out", tmp_path / "out.partial"
    (tmp_path / "elsewhere").mkdir()
    partial.symlink_to("elsewhere")
    done = streamshard("repartition", run, out, "--world-size", "3")
    assert done.code == 4
    assert f"{partial}: is in the way" in done.err
    assert list((tmp_path / "elsewhere").iterdir()) == []
