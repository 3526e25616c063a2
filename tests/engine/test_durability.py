"""What is written becomes durable: every file and every name, by one call or one by one."""

import ctypes
import errno
import os
import threading
from pathlib import Path

import pytest

from streamshard.io import durability
from streamshard.io.changes import sync_tree
from tests.held import open_files


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

    monkeypatch.setattr(durability, "_syncs_as_a_whole", lambda descriptor: True)
    monkeypatch.setattr(durability, "_syncfs", refuse)
    before = open_files()
    with pytest.raises(OSError, match="tree") as error:
        sync_tree(tree)
    assert error.value.errno == errno.EIO
    assert open_files() == before


def test_on_the_file_system_that_is_here(tree: Path, tmp_path: Path) -> None:
    sync_tree(tree)
    with pytest.raises(FileNotFoundError):
        sync_tree(tmp_path / "nowhere")
