"""`compact` as cron meets it: what is printed, exit codes, overlapping runs."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import streamshard as api
from streamshard.io.lock import Lock
from streamshard.sizes import show_bytes
from tests.cli.conftest import in_process, passed, refused
from tests.compact.runs import NO_GRACE, STEPS, age, bits, make_run, save, tag_of
from tests.documents import TEXTS

FIRST = tag_of(STEPS[0])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory of which the oldest tag may go."""
    return make_run(tmp_path / "run")


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "archive"


def test_a_dry_run_tells_of_each_tag_and_does_nothing(
    run: Path, tmp_path: Path, archive: Path
) -> None:
    before = bits(tmp_path)
    done = passed("compact", run, archive, "--delete", "-n")
    nbytes = sum(path.stat().st_size for path in (run / FIRST).iterdir())
    assert re.search(rf"{FIRST} +trashed +{show_bytes(nbytes)} .* no rule keeps it", done.out)
    assert re.search(rf"{tag_of(1000)} +kept .* 'latest' names it", done.out)
    assert bits(tmp_path) == before
    assert not archive.exists()


def test_a_dry_run_says_which_tags_do_not_fit(run: Path, archive: Path) -> None:
    with (run / FIRST / "notes.txt").open("ab") as stream:
        stream.truncate(1 << 43)
    age(run / FIRST, 30)
    done = in_process("compact", run, archive, "--delete", "-n")
    assert (done.code, "1 failed, 3 kept" in done.out) == (4, True)
    assert f"{FIRST}: failed: {archive / FIRST}.zarr: does not fit: it needs 8,796," in done.err


@pytest.mark.parametrize("more", ["", "-n"])
@pytest.mark.parametrize("runs", ["run", "*"])
def test_of_the_path_of_archives_only_the_last_part_is_made(
    run: Path, tmp_path: Path, runs: str, more: str
) -> None:
    """The disk that they go to may not be mounted."""
    where = tmp_path / "my disk"
    command = ("compact", tmp_path / runs, where / "archive", *more.split())
    done = refused(4, f"{where}: not there, and archive is to be made in it; is it mou", *command)
    assert [path.name for path in tmp_path.iterdir()] == [run.name]
    (advice,) = re.findall(r": (mkdir .*)\n", done.err)
    subprocess.run(shlex.split(advice), check=True)
    command = ("compact", run, where / "archive", *more.split())
    assert in_process(*command).code == 0
    assert (where / "archive").exists() == (not more)


def test_lengths_of_time_are_said_as_they_are_asked_for(run: Path, archive: Path) -> None:
    command = ("compact", run, archive)
    tag = run / FIRST
    for path in (*tag.iterdir(), tag):
        os.utime(path)
    done = in_process(*command, "-n")
    assert re.search(rf"{FIRST} +kept .* changed [0-9.]+ s ago, --min-age is 2h\n", done.out)
    assert in_process(*command).out == f"{run}: 4 kept; -v says why\n"
    assert in_process(*command, "--min-age", "0s", "--delete", "-q").code == 0
    done = in_process(*command, "--delete", "--min-age", "0s", "--grace", "90m", "-n")
    assert re.search(rf"{FIRST} +in the trash .* since 20[0-9: -]+ UTC, --grace is 90m\n", done.out)


def test_a_night_says_a_line_or_nothing_or_a_table(
    run: Path, tmp_path: Path, archive: Path
) -> None:
    command = ("compact", run, archive)
    done = passed(*command)
    (told,) = api.compact(run, tmp_path / "again").tags[:1]
    into = f"{show_bytes(told.source_bytes)} archived in {show_bytes(told.archive_bytes)}"
    assert done.out == f"{run}: 1 archived, 3 kept; {into}\n"
    done = in_process("compact", run, tmp_path / "again", "--delete")
    assert done.out.startswith(f"{run}: 1 trashed, 3 kept; {into}\n")
    api.compact(run, tmp_path / "again", undelete=[FIRST])
    done = in_process(*command, "-q", "--delete")
    assert (done.code, done.out, done.err) == (0, "", "")
    done = in_process(*command, "-v")
    assert (done.code, FIRST in done.out, "in the trash" in done.out) == (0, True, True)
    found = json.loads(in_process(*command, "--undelete", FIRST, "--json").out)
    assert [(tag["tag"], tag["action"]) for tag in found["tags"]] == [(FIRST, "brought back")]
    assert "unless --keep-tag names it" in found["tags"][0]["reason"]


def test_a_name_to_keep_that_is_mistyped_is_told(run: Path, archive: Path) -> None:
    command = ("compact", run, archive, "--keep-tag", f"{FIRST}O", "--keep-tag", "*5*")
    for more in (["-n"], []):
        done = passed(*command, *more)
        assert f"--keep-tag {FIRST}O: no tag has such a name" in done.out
    assert in_process(*command, "-q").out == ""
    assert "--keep-tag" not in in_process(*command, "--undelete", FIRST).out


@pytest.mark.parametrize("option", ["--undelete", "--purge"])
def test_a_dry_run_by_hand_finds_what_the_run_would_find(
    run: Path, tmp_path: Path, option: str, archive: Path
) -> None:
    api.compact(run, archive, delete=True)
    before = bits(tmp_path)
    command = ("compact", run, archive, "--grace", "0s", option, FIRST, "nope", "-n")
    done = in_process(*command)
    assert (done.code, "1 failed" in done.out) == (2, True)
    assert f"no tag nope in its trash, which holds {FIRST}\n" in done.err
    assert bits(tmp_path) == before
    api.compact(run, archive, grace=NO_GRACE, purge=[FIRST])
    done = in_process("compact", run, archive, option, FIRST)
    assert (done.code, done.err.endswith(", which holds nothing\n")) == (2, True)


def test_what_needs_somebody_is_told_though_quiet(run: Path, archive: Path) -> None:
    save(run, 2000)
    (run / "latest").write_text(tag_of(1000))
    done = in_process("compact", run, archive, "-q")
    assert (done.code, done.out) == (3, "")
    (line,) = done.err.splitlines()
    assert line.startswith(f"streamshard: {tag_of(2000)}: ambiguous: its step is above 1,000")
    done = in_process("compact", run, archive, "-n")
    assert done.err.splitlines() == [line]
    assert re.search(rf"{tag_of(2000)} +ambiguous .* listed on standard error\n", done.out)
    (run / "latest").unlink()
    done = in_process("compact", run, archive, "--delete", "-q")
    assert (done.code, "no 'latest'" in done.err, done.out) == (3, True, "")


@pytest.mark.parametrize("which", ["run", "archive"])
def test_a_second_run_ends_at_once_and_quietly(
    run: Path, tmp_path: Path, which: str, archive: Path
) -> None:
    archive.mkdir()
    lock = Lock(tmp_path / which / ".streamshard.lock", tmp_path / which)
    lock.take()
    command = ("compact", run, archive, "--delete")
    done = in_process(*command, "-q")
    assert (done.code, done.out, done.err) == (4, "", "")
    refused(4, "another run", *command)
    assert not list(archive.glob("*.zarr"))
    lock.release()
    assert in_process(*command, "-q").code == 0
    assert not list(tmp_path.rglob(".streamshard.lock*"))


def test_a_run_directory_that_may_only_be_read_is_archived(run: Path, archive: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert in_process("compact", run, archive).code == 0
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.mark.parametrize("place", ["run", "run/archive", "."])
def test_an_archive_in_or_around_the_run_is_refused(run: Path, tmp_path: Path, place: str) -> None:
    refused(2, "choose another place", "compact", run, tmp_path / place)


CRON = sorted({*re.findall(r"^30 3 \* \* \* (.*)$", "\n".join(TEXTS.values()), re.MULTILINE)})


@pytest.mark.parametrize("line", CRON)
def test_a_line_for_cron_does_what_it_says(line: str, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "7b"
    run.parent.mkdir()
    (tmp_path / "archive").mkdir()  # where the disk is mounted
    make_run(run)
    assert "%" not in line  # which cron takes for the end of a line
    program, *words = shlex.split(line)
    assert Path(program).is_absolute()  # cron would not find it otherwise
    words = [
        f"{tmp_path}{word}" if word.startswith(("/runs", "/archive")) else word for word in words
    ]
    source = f"PYTHONPATH={Path(api.__file__).parent.parent}"
    cron = ["env", "-i", "HOME=/", "SHELL=/bin/sh", "PATH=/usr/bin:/bin", source, "/bin/sh", "-c"]
    command = shlex.join([sys.executable, "-m", "streamshard", *words])
    done = subprocess.run([*cron, command], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (run / ".streamshard.trash" / FIRST).is_dir()
    assert (tmp_path / "archive" / "7b" / f"{FIRST}.zarr").is_dir()
