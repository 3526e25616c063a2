"""A disk's space, and what makes it durable."""

import ctypes
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamshard.io import durability
from streamshard.io.changes import sync_tree
from streamshard.io.durability import Reservation
from streamshard.io.file_system import EXT4
from tests.held import open_files

# Durable -----------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "a" / "b").mkdir(parents=True)
    for number in range(20):
        (root / "a" / f"{number}").write_bytes(b"x")
    (root / "a" / "b" / "deep").write_bytes(b"y")
    return root


@pytest.fixture
def synced(tree: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note what is given to fsync, and give it on."""
    found, real, lock = [], os.fsync, threading.Lock()

    def note(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        real(descriptor)
        with lock:
            found.append(str(path.relative_to(tree)))

    monkeypatch.setattr("streamshard.io.durability.os.fsync", note)
    return found


@pytest.mark.parametrize(
    "reason", ["file system", "old kernel", "no such call", "unknown file system"]
)
def test_one_by_one_where_one_call_cannot_be_trusted(
    tree: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    replaced = {
        "file system": ("_SYNCED_AS_A_WHOLE", set()),
        "old kernel": ("_linux_version", lambda: (5, 7)),
        "no such call": ("_syncfs", None),
        "unknown file system": ("file_system_of", lambda descriptor: 0),
    }
    monkeypatch.setattr(durability, *replaced[reason])
    before = open_files()
    sync_tree(tree)
    files = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    assert set(synced[: len(files)]) == files
    assert sorted(synced[len(files) :]) == [".", "a", "a/b"]
    assert open_files() == before


def test_by_one_call_where_it_does_the_same(
    tree: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    ext4 = (0xEF53).to_bytes(8, "little")

    def statfs(descriptor: int, buffer: ctypes.Array[ctypes.c_char]) -> int:
        ctypes.memmove(buffer, ext4, len(ext4))
        return 0

    def syncfs(descriptor: int) -> int:
        calls.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        return 0

    monkeypatch.setattr(durability, "_linux_version", lambda: (5, 8))
    monkeypatch.setattr("streamshard.io.file_system._fstatfs", statfs)
    monkeypatch.setattr(durability, "_syncfs", syncfs)
    before = open_files()
    sync_tree(tree)
    assert (calls, synced) == ([tree], [])
    assert open_files() == before


def test_what_the_disk_refuses_is_an_error(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> int:
        ctypes.set_errno(errno.EIO)
        return -1

    monkeypatch.setattr(durability, "_linux_version", lambda: (5, 8))
    monkeypatch.setattr(durability, "file_system_of", lambda descriptor: EXT4)
    monkeypatch.setattr(durability, "_syncfs", refuse)
    before = open_files()
    with pytest.raises(OSError, match="tree") as error:
        sync_tree(tree)
    assert error.value.errno == errno.EIO
    assert open_files() == before


# Space that is held and given back ---------------------------------------------------------------


MIB = 1 << 20


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Reservation]:
    """A reservation of 200 MiB, where the file system can hold space."""
    before = open_files()
    reservation = Reservation(tmp_path / "held", 200 * MIB)
    if not allocated(tmp_path / "held"):
        reservation.close()
        pytest.skip("this file system cannot hold space for a file")
    yield reservation
    reservation.close()
    assert open_files() == before
    assert not (tmp_path / "held").exists()


def allocated(path: Path) -> int:
    """Count the MiB that a file takes of its file system."""
    return path.stat().st_blocks * 512 // MIB


@pytest.mark.kernel
def test_no_more_is_held_than_is_still_needed(held: Reservation, tmp_path: Path) -> None:
    """Nor much less."""
    found = [allocated(tmp_path / "held")]
    for _ in range(10):
        held.give_back(20 * MIB)
        found.append(allocated(tmp_path / "held"))
    left = range(200, -1, -20)
    assert all(needed - 64 < kept <= needed for kept, needed in zip(found, left, strict=True))
    assert found[0] > found[-1] == 0
    held.give_back(MIB)


@pytest.mark.parametrize("number", ["ENOSPC", "EDQUOT", "EOPNOTSUPP", "EFBIG"])
def test_only_lack_of_space_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    def refuse(descriptor: int, mode: int, offset: int, nbytes: int) -> int:
        return -1

    error = OSError(getattr(errno, number), number)
    monkeypatch.setattr(durability, "_fallocate", refuse)
    monkeypatch.setattr(durability, "file_system_of", lambda descriptor: 0)
    monkeypatch.setattr(durability, "last_error", lambda path: error)
    before = open_files()
    if number in ("ENOSPC", "EDQUOT"):
        with pytest.raises(OSError, match=number):
            Reservation(tmp_path / "held", 100 * MIB)
    else:
        reservation = Reservation(tmp_path / "held", 100 * MIB)
        reservation.give_back(50 * MIB)
        reservation.close()
    assert open_files() == before
    assert os.listdir(tmp_path) == []  # noqa: PTH208
