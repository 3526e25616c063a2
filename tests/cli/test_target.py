"""Targets that exist, are locked, full or forbidden; interruption; dry runs."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import streamshard as api
from streamshard.errors import TargetError
from streamshard.io.lock import Lock
from tests.cli.conftest import streamshard, tree


def test_an_existing_target_is_refused_and_left_alone(
    saved: Callable[[int], Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert streamshard("repartition", saved(2), out, "--world-size", 2).code == 0
    before = tree(out)
    done = streamshard("repartition", saved(2), out, "--world-size", 3)
    assert (done.code, "--overwrite" in done.err) == (4, True)
    assert tree(out) == before
    assert streamshard("repartition", saved(2), out, "--world-size", 3, "--overwrite").code == 0
    assert tree(out) != before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_overwrite_spares_what_is_not_ours(saved: Callable[[int], Path], tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("irreplaceable")
    done = streamshard(
        "repartition", saved(2), tmp_path / "thesis", "--world-size", 3, "--overwrite"
    )
    assert (done.code, "remove it yourself" in done.err) == (4, True)
    assert tree(tmp_path) == {"thesis/chapter": b"irreplaceable"}


@pytest.mark.parametrize("inside", [".", "out", "../run"])
def test_a_target_in_its_own_source_is_refused(stage_2: Path, inside: str) -> None:
    before = tree(stage_2)
    done = streamshard("repartition", stage_2, stage_2 / inside, "--world-size", 2, "--overwrite")
    assert done.code == 2
    assert tree(stage_2) == before


@pytest.mark.parametrize("verb", ["repartition", "convert", "export"])
def test_the_source_as_its_own_target_is_not_told_to_be_overwritten(
    stage_2: Path, verb: str
) -> None:
    before = tree(stage_2)
    for more in ([], ["--overwrite"]):
        done = streamshard(verb, stage_2, stage_2, *more)
        assert (done.code, "is the source itself; choose another place" in done.err) == (2, True)
    assert tree(stage_2) == before


def test_a_second_run_on_a_target_is_refused(saved: Callable[[int], Path], tmp_path: Path) -> None:
    lock = Lock(tmp_path / ".streamshard.lock.out", tmp_path / "out")
    lock.take()
    done = streamshard("repartition", saved(2), tmp_path / "out", "--world-size", 2)
    who = f"process {os.getpid()} on {socket.gethostname()}, since "
    assert (done.code, who in done.err) == (4, True)
    assert len(list(tmp_path.iterdir())) == 1
    lock.release()
    assert streamshard("repartition", saved(2), tmp_path / "out", "--world-size", 2).code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("suffix", [".partial", ".replaced"])
def test_a_source_in_the_place_of_our_own_directories_is_safe(
    suffix: str, stage_2: Path, tmp_path: Path
) -> None:
    source = stage_2.rename(tmp_path / f"out{suffix}")
    before = tree(source)
    done = streamshard("repartition", source, tmp_path / "out", "--world-size", 3)
    assert done.code in (2, 4)
    assert tree(source) == before
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", [".partial", ".replaced"])
@pytest.mark.parametrize("link", [False, True])
def test_a_strangers_directory_in_their_place_is_safe(
    suffix: str, link: bool, saved: Callable[[int], Path], tmp_path: Path
) -> None:
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "chapter").write_text("irreplaceable")
    place = tmp_path / f"out{suffix}"
    if link:
        place.symlink_to(thesis)
    else:
        thesis.rename(place)
    done = streamshard("repartition", saved(2), tmp_path / "out", "--world-size", 3)
    assert (done.code, place.name in done.err) == (4, True)
    assert (place / "chapter").read_text() == "irreplaceable"
    assert not (tmp_path / "out").exists()


def test_overwrite_spares_a_run_with_more_than_one_tag(stage_2: Path, tmp_path: Path) -> None:
    (stage_2 / "global_step99").mkdir()
    before = tree(stage_2)
    other = tmp_path / "other"
    assert streamshard("repartition", stage_2, other, "--world-size", 2).code == 0
    done = streamshard("repartition", other, stage_2, "--world-size", 3, "--overwrite")
    assert (done.code, "more than one" in done.err) == (4, True)
    assert tree(stage_2) == before


def test_overwrite_spares_a_zarr_hierarchy_of_others(
    saved: Callable[[int], Path], tmp_path: Path
) -> None:
    (tmp_path / "a.zarr").mkdir()
    (tmp_path / "a.zarr" / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    done = streamshard("convert", saved(2), tmp_path / "a.zarr", "--overwrite")
    assert done.code == 4
    assert len(tree(tmp_path)) == 1


def test_a_replacement_that_fails_brings_the_old_target_back(
    saved: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    api.repartition(saved(2), out, world_size=2)
    before, rename = tree(out), Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name == "out.partial":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(TargetError, match="Input/output error"):
        api.repartition(saved(2), out, world_size=3, overwrite=True)
    assert tree(out) == before
    monkeypatch.undo()
    # What was to replace it is whole, so that it only has to be renamed.
    report = api.repartition(saved(2), out, world_size=3)
    assert report.kept_bytes == report.bytes_written == sum(map(len, tree(out).values()))
    assert tree(out) != before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_targets_without_a_name_are_refused(
    saved: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for target in (".", "..", "/"):
        done = streamshard("repartition", saved(2), target, "--world-size", 3, "--overwrite")
        assert done.code == 2
        assert "Traceback" not in done.err


@pytest.mark.kernel
def test_a_disk_that_is_too_small(saved: Callable[[int], Path], small_disk: Path) -> None:
    done = streamshard("repartition", saved(2), small_disk / "out", "--world-size", 8)
    assert (done.code, "free on its file system" in done.err) == (4, True)
    assert list(small_disk.iterdir()) == []


@pytest.mark.kernel
def test_a_disk_that_fills_up_on_the_way(saved: Callable[[int], Path], small_disk: Path) -> None:
    """The free space is looked at once; another program may take it after that."""
    script = (
        "import os, sys\n"
        "from streamshard.cli.main import main\n"
        "from streamshard.operations.transfer import plan\n"
        "plan.require_space = lambda target, nbytes: None\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = ["repartition", str(saved(2)), str(small_disk / "out"), "--world-size", "8"]
    done = streamshard(*command, script=script)
    assert (done.code, "no space left" in done.err) == (4, True), done.err
    assert "Traceback" not in done.err
    assert [path.name for path in small_disk.iterdir()] == ["out.partial"]
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    report = json.loads(streamshard(*command, "--json").out)
    assert 0 < report["kept_bytes"] < report["bytes_written"]
    assert [path.name for path in small_disk.iterdir()] == ["out"]


@pytest.mark.kernel
def test_a_read_only_file_system(saved: Callable[[int], Path], small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    done = streamshard("repartition", saved(2), small_disk / "out", "--world-size", 1)
    assert done.code == 4
    assert "Traceback" not in done.err


def test_a_file_size_limit(saved: Callable[[int], Path], tmp_path: Path) -> None:
    script = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "from streamshard.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = ["repartition", str(saved(2)), str(tmp_path / "out"), "--world-size", "1"]
    done = streamshard(*command, script=script)
    assert done.code == 4, done.err
    assert "out.partial" in done.err
    assert not (tmp_path / "out").exists()
    assert streamshard(*command).code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_dry_run_touches_nothing_and_tells_the_exact_size(
    saved: Callable[[int], Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    dry = streamshard("repartition", saved(3), out, "--world-size", 3, "--dry-run", "--json")
    assert dry.code == 0
    assert list(tmp_path.iterdir()) == []
    planned = json.loads(dry.out)
    assert planned["seconds"] is None
    assert streamshard("repartition", saved(3), out, "--world-size", 3, "-q").code == 0
    written = tree(out)
    assert planned["files"] == len(written)
    assert planned["bytes_written"] == sum(map(len, written.values()))


def test_permissions_and_links(stage_2: Path, tmp_path: Path) -> None:
    script = stage_2 / "zero_to_fp32.py"
    script.chmod(0o755)
    (stage_2 / "link").symlink_to("/etc/hostname")
    out = tmp_path / "out"
    assert streamshard("repartition", stage_2, out, "--world-size", 2, "-q").code == 0
    assert (out / "zero_to_fp32.py").stat().st_mode & 0o777 == 0o755
    assert not (out / "link").exists()


def test_sigpipe_is_no_error(saved: Callable[[int], Path]) -> None:
    command = f"{sys.executable} -m streamshard inspect {saved(2)} -v | head -n 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True)
    assert done.stderr == b""
    assert done.returncode in (0, 128 + signal.SIGPIPE)
