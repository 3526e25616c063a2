"""Targets that are empty directories already, as `mkdir -p` and `mktemp -d` of job scripts make."""

import json
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import streamshard as api
from streamshard.engine.journals import journal
from streamshard.errors import TargetError
from tests.cli.conftest import optimizer_file, streamshard, tree
from tests.cli.test_going_on import cut_off
from tests.fabricated import load, save

Saved = Callable[[int], Path]
VERBS = {
    "repartition": ("--world-size", 3),
    "convert": (),
    "export": (),
    "export, universal": ("--format", "universal"),
    "export, dcp": ("--format", "dcp"),
}


def command(saved: Saved, verb: str, out: Path) -> tuple[object, ...]:
    """Spell a command of a kind."""
    return (verb.split(",")[0], saved(2), out, *VERBS[verb])


@pytest.mark.parametrize("verb", VERBS)
def test_it_is_taken_and_mode_and_owner_stay(saved: Saved, tmp_path: Path, verb: str) -> None:
    assert streamshard(*command(saved, verb, tmp_path / "absent")).code == 0
    out = tmp_path / "out"
    out.mkdir()
    if os.geteuid() == 0:
        os.chown(out, 1234, 2345)
    out.chmod(0o2750)
    before = out.stat()
    done = streamshard(*command(saved, verb, out))
    assert (done.code, done.err) == (0, "")
    assert tree(out) == tree(tmp_path / "absent")
    after = out.stat()
    assert stat.S_IMODE(after.st_mode) == 0o2750
    assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)
    # As in any directory with that bit, what is made in it is of its group.
    assert {path.stat().st_gid for path in out.rglob("*")} == {before.st_gid}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["absent", "out"]


def test_a_directory_of_dumps_is_taken(saved: Saved, tmp_path: Path) -> None:
    source = tmp_path / "dumps" / "optimizer.{rank:02d}.pt"
    source.parent.mkdir()
    for rank in range(4):
        state = load(optimizer_file(saved(2), rank))["optimizer_state_dict"]
        save(state, Path(str(source).format(rank=rank)))
    (tmp_path / "out").mkdir(mode=0o700)
    done = streamshard(
        "repartition", source, tmp_path / "out" / "optimizer.{rank:02d}.pt", "--world-size", 3
    )
    assert (done.code, done.err) == (0, "")
    assert len(tree(tmp_path / "out")) == 3
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700


def test_it_is_as_private_while_it_is_being_made(saved: Saved, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir(mode=0o700)
    assert cut_off("note", 1, command(saved, "repartition", out)).code == -signal.SIGKILL
    assert stat.S_IMODE((tmp_path / "out.partial").stat().st_mode) == 0o700
    assert tree(out) == {}
    report = json.loads(streamshard(*command(saved, "repartition", out), "--json").out)
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
    assert streamshard(*command(saved, "convert", tmp_path / "wanted")).code == 0
    assert streamshard("repartition", saved(3), out, "--world-size", 2).code == 0
    overwriting = (*command(saved, "convert", out), "--overwrite")
    assert cut_off("rename", 0, overwriting).code == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".") == [
        "out.partial",
        "out.replaced",
        "wanted",
    ]
    out.mkdir()
    done = streamshard(*command(saved, "convert", out))
    assert (done.code, done.err) == (0, "")
    assert tree(out) == tree(tmp_path / "wanted")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "wanted"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_link_to_one_stays_a_link(saved: Saved, tmp_path: Path, verb: str) -> None:
    scratch, out = tmp_path / "scratch", tmp_path / "out"
    (scratch / "big").mkdir(parents=True)
    out.symlink_to("scratch/big")
    assert cut_off("note", 0, command(saved, verb, out)).code == -signal.SIGKILL
    assert {path.name for path in scratch.iterdir()} > {"big", "big.partial"}
    # Killed once more when the new directory is there, with its journal.
    assert cut_off("rename", 0, command(saved, verb, out)).code == -signal.SIGKILL
    done = streamshard(*command(saved, verb, out), "--json")
    assert (done.code, done.err) == (0, "")
    report = json.loads(done.out)
    assert report["kept_bytes"] == report["bytes_written"]
    assert os.readlink(out) == "scratch/big"  # noqa: PTH115 - as it is spelled
    assert [path.name for path in scratch.iterdir()] == ["big"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "scratch"]
    assert streamshard(*command(saved, verb, tmp_path / "absent")).code == 0
    assert tree(scratch / "big") == tree(tmp_path / "absent")
    again = streamshard(*command(saved, verb, out))
    assert (again.code, "exists" in again.err) == (4, True)


@pytest.fixture(params=["another file system", "within the same one"])
def mounted(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty directory where something is mounted, if this process may mount."""
    where = tmp_path / "a volume"
    where.mkdir()
    (tmp_path / "part").mkdir()
    what = ["-t", "tmpfs", "-o", "size=16m", "tmpfs"]
    if request.param == "within the same one":
        what = ["--bind", str(tmp_path / "part")]
    done = subprocess.run(["mount", *what, str(where)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs the right to mount: {done.stderr.strip()}")
    yield where
    subprocess.run(["umount", str(where)], check=True)


@pytest.mark.kernel
@pytest.mark.parametrize("verb", VERBS)
def test_a_mount_point_is_refused_at_once_with_what_does_work(
    saved: Saved, mounted: Path, verb: str
) -> None:
    for more in ((), ("--overwrite",), ("--dry-run",)):
        done = streamshard(*command(saved, verb, mounted), *more)
        assert done.code == 4
        assert f"{mounted}: is a mount point" in done.err
        assert f"Give a new name in it: {mounted}/NAME" in done.err
    assert list(mounted.iterdir()) == []
    assert streamshard(*command(saved, verb, mounted / "NAME")).code == 0
    assert [path.name for path in mounted.iterdir()] == ["NAME"]


@pytest.fixture
def lower_layer(saved: Saved, tmp_path: Path) -> Iterator[Path]:
    """A target in a lower layer of an overlay, as in a container's image."""
    lower, upper, work, where = (tmp_path / name for name in ("lower", "upper", "work", "merged"))
    for directory in (lower, upper, work, where):
        directory.mkdir()
    assert streamshard(*command(saved, "convert", lower / "out")).code == 0
    options = f"lowerdir={lower},upperdir={upper},workdir={work},redirect_dir=off"
    mount = ["mount", "-t", "overlay", "-o", options, "overlay", str(where)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs the right to mount: {done.stderr.strip()}")
    yield where / "out"
    subprocess.run(["umount", str(where)], check=True)


@pytest.mark.kernel
def test_a_directory_that_cannot_be_renamed_is_named_with_what_does_work(
    saved: Saved, lower_layer: Path
) -> None:
    before = tree(lower_layer)
    done = streamshard(*command(saved, "convert", lower_layer), "--overwrite")
    assert (done.code, "lower layer of an overlay" in done.err) == (4, True)
    assert tree(lower_layer) == before
    subprocess.run(["mv", lower_layer, lower_layer.with_name("old")], check=True)
    assert streamshard(*command(saved, "convert", lower_layer)).code == 0
    assert tree(lower_layer) == before


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A directory that others than its owner can reach."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives its rights up, which takes some")
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
    script = "import os\nfrom streamshard.__main__ import program\nos.setuid(4321)\nprogram()\n"
    done = streamshard("repartition", source, out, "--world-size", 3, script=script)
    assert done.code == 4, done.err
    assert ("may not be written" if case == "parent" else "belongs to user 1234") in done.err
    assert f"Give a new name in it: {out}/NAME" in done.err
    assert tree(place) == {}
