"""Targets that exist, are empty, are others', are mounted, or lead elsewhere."""

import json
import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import streamshard as api
from streamshard.engine.journals import journal
from streamshard.errors import TargetError
from tests.cli.conftest import (
    OUTPUTS,
    Saved,
    as_nobody,
    command,
    in_process,
    needs_root,
    passed,
    refused,
    tree,
)
from tests.cli.test_going_on import cut_off
from tests.fabricated import write, write_dumps
from tests.job import Job

SOME = [output for output in OUTPUTS if output.split()[-1] in ("3", "zstd", "dcp")]
"""Where a target goes, and how it gets there, is the same for every kind of it."""

# What is there already ----------------------------------------------------------------------------


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_target_is_replaced_only_if_that_is_asked_for(
    saved: Saved, tmp_path: Path, output: str
) -> None:
    out = tmp_path / "out"
    assert in_process(*command(output, saved(2), out)).code == 0
    before = tree(out)
    refused(4, "use --overwrite to replace it", *command(output, saved(3), out))
    assert tree(out) == before
    assert in_process(*command(output, saved(3), out), "--overwrite").code == 0
    assert tree(out) != before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "output",
    [
        *(output for output in OUTPUTS if output.startswith("export")),
        "export --max-shard-size 300000",
        "export --format dcp --layout titan",
        "export --format dcp --layout accelerate",
    ],
)
def test_an_export_with_more_in_it_is_not_replaced(
    saved: Saved, tmp_path: Path, output: str
) -> None:
    out = tmp_path / "out"
    assert in_process(*command(output, saved(2), out)).code == 0
    (out / "notes.md").write_text("irreplaceable")
    before = tree(out)
    assert in_process(*command(output, saved(3), out), "--overwrite").code == 4
    assert tree(out) == before


def thesis(place: Path) -> None:
    place.mkdir()
    (place / "chapter").write_text("irreplaceable")


def hierarchy(place: Path) -> None:
    place.mkdir()
    (place / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')


def run_of_two_tags(place: Path) -> None:
    write(Job(), place)
    (place / "global_step99").mkdir()


@pytest.mark.parametrize(
    ("make", "says"),
    [(thesis, "remove it yourself"), (hierarchy, ""), (run_of_two_tags, "more than one")],
)
@pytest.mark.parametrize("verb", [("repartition", "--world-size", 3), ("convert",)], ids=str)
def test_overwrite_spares_what_is_not_ours(
    run: Path,
    tmp_path: Path,
    verb: Sequence[object],
    make: Callable[[Path], None],
    says: str,
) -> None:
    make(tmp_path / "out")
    before = tree(tmp_path)
    refused(4, says, verb[0], run, tmp_path / "out", *verb[1:], "--overwrite")
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("inside", "says"),
    [(".", "is the source itself"), ("../run", "is the source itself"), ("out", "lies in or")],
)
@pytest.mark.parametrize("verb", ["repartition", "convert", "export"])
def test_a_target_in_its_own_source_is_refused(
    run: Path, verb: str, inside: str, says: str
) -> None:
    before = tree(run)
    for more in ([], ["--overwrite"]):
        done = refused(2, f"{run / inside}: {says}", verb, run, run / inside, *more)
        assert done.err.endswith("; choose another place\n")
    assert tree(run) == before


@pytest.mark.parametrize("suffix", [".partial", ".replaced"])
def test_a_source_in_the_place_of_our_own_directories_is_safe(
    suffix: str, run: Path, tmp_path: Path
) -> None:
    source = run.rename(tmp_path / f"out{suffix}")
    before = tree(tmp_path)
    done = in_process("repartition", source, tmp_path / "out", "--world-size", 3)
    assert done.code in (2, 4)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("suffix", [".partial", ".replaced"])
@pytest.mark.parametrize("link", [False, True])
def test_a_strangers_directory_in_their_place_is_safe(
    suffix: str, link: bool, run: Path, tmp_path: Path
) -> None:
    place = tmp_path / f"out{suffix}"
    thesis(tmp_path / "thesis" if link else place)
    if link:
        place.symlink_to("thesis")
    before = tree(tmp_path)
    refused(4, place.name, "repartition", run, tmp_path / "out", "--world-size", 3)
    assert tree(tmp_path) == before


def test_a_journal_that_is_a_pipe_is_not_waited_for(run: Path, tmp_path: Path) -> None:
    journal = tmp_path / "out.partial/.streamshard.journal"
    journal.parent.mkdir()
    os.mkfifo(journal)
    says = f"{journal}: cannot be written (it is a pipe"
    refused(4, says, "repartition", run, tmp_path / "out", "--world-size", "3")


# Empty directories, as `mkdir -p` and `mktemp -d` of job scripts make -----------------------------


@pytest.mark.parametrize("output", SOME)
def test_it_is_taken_and_mode_and_owner_stay(saved: Saved, tmp_path: Path, output: str) -> None:
    assert in_process(*command(output, saved(2), tmp_path / "absent")).code == 0
    out = tmp_path / "out"
    out.mkdir()
    if os.geteuid() == 0:
        os.chown(out, 1234, 2345)
    out.chmod(0o2750)
    before = out.stat()
    passed(*command(output, saved(2), out))
    assert tree(out) == tree(tmp_path / "absent")
    after = out.stat()
    assert stat.S_IMODE(after.st_mode) == 0o2750
    assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)
    # As in any directory with that bit, what is made in it is of its group.
    assert {path.stat().st_gid for path in out.rglob("*")} == {before.st_gid}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["absent", "out"]


def test_a_directory_of_dumps_is_taken(run: Path, tmp_path: Path) -> None:
    source, out = write_dumps(run, tmp_path / "dumps"), tmp_path / "out"
    out.mkdir(mode=0o700)
    passed("repartition", source, out / source.name, "--world-size", 3)
    assert len(tree(out)) == 3
    assert stat.S_IMODE(out.stat().st_mode) == 0o700


def test_it_is_as_private_while_it_is_being_made(saved: Saved, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir(mode=0o700)
    assert cut_off("note_all", 1, command(OUTPUTS[0], saved(2), out)).code == -signal.SIGKILL
    assert stat.S_IMODE((tmp_path / "out.partial").stat().st_mode) == 0o700
    assert tree(out) == {}
    report = json.loads(in_process(*command(OUTPUTS[0], saved(2), out), "--json").out)
    assert 0 < report["kept_bytes"] < report["bytes_written"]
    assert stat.S_IMODE(out.stat().st_mode) == 0o700


def test_what_somebody_puts_there_meanwhile_is_not_replaced(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    note_whole = journal.Journal.note_whole

    def late(self: journal.Journal) -> None:
        note_whole(self)
        (out / "chapter").write_text("irreplaceable")

    monkeypatch.setattr(journal.Journal, "note_whole", late)
    with pytest.raises(TargetError, match="not empty"):
        api.repartition(saved(2), out, world_size=3)
    assert tree(out) == {"chapter": b"irreplaceable"}
    assert not (tmp_path / "out.replaced").exists()
    (out / "chapter").unlink()
    report = api.repartition(saved(2), out, world_size=3)
    assert report.kept_bytes == report.bytes_written


def test_one_that_was_made_while_the_old_target_is_aside_is_in_nobodys_way(
    saved: Saved, tmp_path: Path
) -> None:
    """A job script does `mkdir -p` and the same command again."""
    out = tmp_path / "out"
    assert in_process(*command(OUTPUTS[1], saved(2), tmp_path / "wanted")).code == 0
    assert in_process("repartition", saved(3), out, "--world-size", 2).code == 0
    overwriting = (*command(OUTPUTS[1], saved(2), out), "--overwrite")
    assert cut_off("rename", 0, overwriting).code == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".") == [
        "out.partial",
        "out.replaced",
        "wanted",
    ]
    out.mkdir()
    passed(*command(OUTPUTS[1], saved(2), out))
    assert tree(out) == tree(tmp_path / "wanted")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "wanted"]


def test_a_link_to_one_stays_a_link(saved: Saved, tmp_path: Path) -> None:
    output = OUTPUTS[0]
    scratch, out, absent = (tmp_path / name for name in ("scratch", "out", "absent"))
    (scratch / "big").mkdir(parents=True)
    out.symlink_to("scratch/big")
    assert cut_off("note_all", 0, command(output, saved(2), out)).code == -signal.SIGKILL
    assert {path.name for path in scratch.iterdir()} > {"big", "big.partial"}
    # Killed once more when the new directory is there, with its journal.
    assert cut_off("rename", 0, command(output, saved(2), out)).code == -signal.SIGKILL
    done = passed(*command(output, saved(2), out), "--json")
    report = json.loads(done.out)
    assert report["kept_bytes"] == report["bytes_written"]
    assert os.readlink(out) == "scratch/big"  # noqa: PTH115 - as it is spelled
    assert [path.name for path in scratch.iterdir()] == ["big"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "scratch"]
    assert in_process(*command(output, saved(2), absent)).code == 0
    assert tree(scratch / "big") == tree(absent)
    again = in_process(*command(output, saved(2), out))
    assert (again.code, "exists" in again.err) == (4, True)


def mount(*arguments: object) -> None:
    """Mount something, if this process may."""
    done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs the right to mount: {done.stderr.strip()}")


@pytest.fixture(params=["another file system", "within the same one"])
def mounted(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty directory where something is mounted."""
    where = tmp_path / "a volume"
    where.mkdir()
    (tmp_path / "part").mkdir()
    if request.param == "within the same one":
        mount("--bind", tmp_path / "part", where)
    else:
        mount("-t", "tmpfs", "-o", "size=16m", "tmpfs", where)
    yield where
    subprocess.run(["umount", str(where)], check=True)


@pytest.mark.kernel
def test_a_mount_point_is_refused_at_once_with_what_does_work(saved: Saved, mounted: Path) -> None:
    output = OUTPUTS[0]
    for more in ((), ("--overwrite",), ("--dry-run",)):
        done = refused(
            4, f"{mounted}: is a mount point", *command(output, saved(2), mounted), *more
        )
        assert f"Give a new name in it: {mounted}/NAME" in done.err
    assert list(mounted.iterdir()) == []
    assert in_process(*command(output, saved(2), mounted / "NAME")).code == 0
    assert [path.name for path in mounted.iterdir()] == ["NAME"]


@needs_root
@pytest.mark.parametrize("case", ["parent", "owner"])
def test_a_place_that_cannot_be_taken_is_refused_at_once(
    saved: Saved, open_to_all: Path, case: str
) -> None:
    source, place = open_to_all / "run", open_to_all / "place"
    shutil.copytree(saved(2), source)
    out = place / "out"
    out.mkdir(parents=True)
    os.chown(out, *((4321, 4321) if case == "parent" else (1234, 1234)))
    place.chmod(0o755 if case == "parent" else 0o777)
    done = as_nobody("repartition", source, out, "--world-size", 3)
    assert done.code == 4, done.err
    assert ("may not be written" if case == "parent" else "belongs to user 1234") in done.err
    assert f"Give a new name in it: {out}/NAME" in done.err
    assert tree(place) == {}
