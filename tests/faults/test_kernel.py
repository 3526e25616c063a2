"""What the kernel refuses by itself: full and read-only disks, limits, missing permissions.

Left out is a real quota, for which few kernels and machines are set up; that its error is treated
as that of a full disk is tried at every call.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks._fabricate import fabricate
from benchmarks._model import transformer
from tests.faults.scenarios import OUT, Tree, tree
from tests.faults.server import Ended, Meanwhile, Server
from tests.faults.shim import NO_KIND, Action, Arming, Call, Kind, Side

RANKS = 4
DISKS = ("tmpfs", "ext4")
DISK_MIB = 16
"""Several times what the checkpoint takes; ext4 takes some for itself."""
NOBODY = 65534
INSTANTS = 5

Run = Callable[..., Ended]


@dataclass(frozen=True)
class Saved:
    """A checkpoint of some MiB, and what becomes of it."""

    path: Path
    whole: Tree

    def arguments(self, target: Path) -> list[str]:
        """Spell the command line for a directory to put the target into."""
        fixed = ("--world-size", "3", "--workers", "1")
        return ["repartition", str(self.path), str(target / OUT), *fixed]


@pytest.fixture(scope="module")
def server(shim: Path) -> Iterator[Server]:
    with Server(shim) as found:
        yield found


@pytest.fixture(scope="module")
def saved(place: Path, server: Server) -> Saved:
    run_dir = place / "saved"
    fabricate(run_dir, transformer(1 << 20, stage=2), stage=2, world_size=RANKS)
    out = place / "undisturbed"
    server.warm_up(*Saved(run_dir, {}).arguments(out))
    return Saved(run_dir, tree(out / OUT))


@pytest.fixture
def run(saved: Saved, server: Server) -> Run:
    """Repartition the checkpoint into a directory."""

    def run_once(target: Path, **options: object) -> Ended:
        arguments = saved.arguments(target)
        return server.run(arguments, source=saved.path, target=target, **options)  # type: ignore[arg-type]

    return run_once


@contextmanager
def disk(kind: str, directory: Path, mib: int) -> Iterator[Path]:
    """Mount an empty file system in a directory; where that cannot be, the test is skipped."""
    where = directory / "disk"
    where.mkdir()
    if kind == "tmpfs":
        options = ["-t", "tmpfs", "-o", f"size={mib}m", "tmpfs"]
    else:
        image = directory / "image"
        with image.open("wb") as stream:
            stream.truncate(mib << 20)
        options = ["-o", "loop", str(image)]
        _run_or_skip([shutil.which(f"mkfs.{kind}") or f"mkfs.{kind}", "-q", str(image)])
    _run_or_skip(["mount", *options, str(where)])
    try:
        for entry in where.iterdir():
            entry.rmdir()  # lost+found
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


def remount(where: Path, option: str) -> None:
    """Change a mount: `ro`, `rw`."""
    subprocess.run(["mount", "-o", f"remount,{option}", str(where)], check=True)


def _run_or_skip(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        pytest.skip(f"needs a program: {error}")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"needs the right to make a file system: {error.stderr.strip()}")


def require_whole(ended: Ended, target: Path, saved: Saved, *beside: str) -> None:
    """Check that a run has made the target, and left nothing else."""
    assert ended.code == 0, ended.err
    assert tree(target / OUT) == saved.whole
    assert {path.name for path in target.iterdir()} == {OUT, *beside}


def require_refused(ended: Ended, place: Path, said: str = "") -> None:
    """Check that a run has failed because of the target, and said where and what."""
    assert ended.code == 4, ended.err
    assert "Traceback" not in ended.err
    assert str(place) in ended.err
    assert said in ended.err


def instants(calls: Sequence[Call]) -> list[int]:
    """Choose calls that write, or make durable, from the first to the last."""
    kinds = Kind.MAKE | Kind.WRITE | Kind.SYNC
    numbers = [call.number for call in calls if call.side & Side.TARGET and call.kind & kinds]
    return [numbers[i * (len(numbers) - 1) // (INSTANTS - 1)] for i in range(INSTANTS)]


@pytest.mark.kernel
@pytest.mark.parametrize("kind", DISKS)
def test_a_disk_that_somebody_else_fills(kind: str, run: Run, saved: Saved, tmp_path: Path) -> None:
    """The free space is looked at when a run begins, and is gone at some later instant of it."""
    with disk(kind, tmp_path, DISK_MIB) as target:
        ballast, codes = target / "ballast", []
        for at in instants(run(target, with_calls=True).calls):
            shutil.rmtree(target / OUT)
            anything = Kind.MAKE | Kind.WRITE | Kind.SYNC
            stop = Arming(at, Action.STOP, 0, anything, Side.TARGET, NO_KIND)
            ended = run(target, arming=stop, meanwhile=Meanwhile(fills=ballast))
            codes.append(ended.code)
            if ended.code == 0:
                require_whole(ended, target, saved, ballast.name)
            else:
                require_refused(ended, target, "space")
                assert not (target / OUT).exists()
            ballast.unlink()
            if ended.code:
                require_whole(run(target), target, saved)
        assert 4 in codes


@pytest.mark.kernel
def test_a_disk_that_is_full_before(run: Run, saved: Saved, tmp_path: Path) -> None:
    with disk("ext4", tmp_path, DISK_MIB) as target:
        ballast = target / "ballast"
        free = shutil.disk_usage(target).free
        # Some blocks are left, for a lock and a directory; far too few for the checkpoint.
        ballast.write_bytes(bytes(free - sum(len(data) for _, data in saved.whole.values()) // 4))
        require_refused(run(target), target, "are free there")
        assert {path.name for path in target.iterdir()} == {ballast.name}
        ballast.unlink()
        require_whole(run(target), target, saved)


@pytest.mark.kernel
def test_a_read_only_file_system(run: Run, saved: Saved, tmp_path: Path) -> None:
    with disk("tmpfs", tmp_path, DISK_MIB) as target:
        remount(target, "ro")
        require_refused(run(target), target, "Read-only file system")
        remount(target, "rw")
        assert list(target.iterdir()) == []
        require_whole(run(target), target, saved)


@pytest.mark.kernel
def test_a_source_on_a_read_only_file_system(server: Server, saved: Saved, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    with disk("tmpfs", tmp_path, DISK_MIB) as where:
        moved = Saved(Path(shutil.copytree(saved.path, where / "run")), saved.whole)
        remount(where, "ro")
        ended = server.run(moved.arguments(target), source=moved.path, target=target)
    require_whole(ended, target, saved)


def test_a_limit_on_the_size_of_files(run: Run, saved: Saved, tmp_path: Path) -> None:
    limited = 'ulimit -f "$0" && exec "$@"'
    program = [sys.executable, "-m", "streamshard", *saved.arguments(tmp_path)]
    command = ["bash", "-c", limited, "64", *program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (4, False), done.stderr
    assert str(tmp_path) in done.stderr
    assert not (tmp_path / OUT).exists()
    require_whole(run(tmp_path), tmp_path, saved)


@pytest.fixture
def somebody(place: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Path, int | None]]:
    """A directory of a user without rights, and that user's number; None is who we are anyway."""
    where = place / request.node.name
    where.mkdir()
    user = NOBODY if os.geteuid() == 0 else None
    if user is not None:
        os.chown(where, user, user)
    yield where, user
    shutil.rmtree(where)


def test_a_directory_that_may_not_be_written(
    somebody: tuple[Path, int | None], run: Run, saved: Saved
) -> None:
    where, user = somebody
    where.chmod(0o555)
    require_refused(run(where, user=user), where, "Permission denied")
    where.chmod(0o755)
    assert list(where.iterdir()) == []
    require_whole(run(where, user=user), where, saved)


@pytest.mark.parametrize("name", ["latest", "global_step7"])
def test_a_source_that_may_not_be_read(
    name: str, somebody: tuple[Path, int | None], server: Server, saved: Saved
) -> None:
    where, user = somebody
    copied = Saved(Path(shutil.copytree(saved.path, where / "run")), saved.whole)
    target = where / "target"
    target.mkdir()
    for path in (where, target, *copied.path.rglob("*"), copied.path):
        if user is not None:
            os.chown(path, user, user)
    locked = copied.path / name
    mode = locked.stat().st_mode
    locked.chmod(0)
    ended = server.run(copied.arguments(target), source=copied.path, target=target, user=user)
    locked.chmod(mode)
    assert (ended.code, "Permission denied" in ended.err) == (3, True), ended.err
    assert str(locked) in ended.err
    assert list(target.iterdir()) == []
    again = server.run(copied.arguments(target), source=copied.path, target=target, user=user)
    require_whole(again, target, saved)


@pytest.mark.kernel
def test_what_another_user_has_begun(
    somebody: tuple[Path, int | None], run: Run, saved: Saved
) -> None:
    """Their partial target is neither taken over nor harmed, and they finish it."""
    where, user = somebody
    if user is None:
        pytest.skip("needs the right to be two users")
    where.chmod(0o777)
    middle = instants(run(where, with_calls=True).calls)[INSTANTS // 2]
    shutil.rmtree(where / OUT)
    kill = Arming(middle, Action.KILL_BEFORE, 0, Kind.WRITE, Side.TARGET, NO_KIND)
    assert run(where, arming=kill).code == -9
    before = tree(where)
    require_refused(run(where, user=user), where)
    assert tree(where) == before
    require_whole(run(where), where, saved)
