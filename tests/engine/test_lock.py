"""Who may have a lock."""

import errno
import fcntl
import json
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from streamshard.errors import TargetLockedError
from streamshard.io.changes import lock_at, write_durably, write_new
from streamshard.io.durability import Reservation
from streamshard.io.lock import Holder, Lock
from streamshard.io.sink import AppendedFile, open_to_fill
from tests.held import open_files


def dead_process() -> Holder:
    child = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    return replace(Holder.this_process(), process=int(child.stdout))


HOLDERS: dict[str, Callable[[], Holder]] = {
    "alive": Holder.this_process,  # a lock of its own that it has not: let go of, or copied
    "dead": dead_process,
    "another host": lambda: replace(Holder.this_process(), host="elsewhere"),
}


def left_by(path: Path, holder: Holder) -> None:
    """Leave a lock as a process does that was killed, or whose lock is not seen here."""
    path.write_text(json.dumps(asdict(holder)))


@pytest.mark.parametrize("name", HOLDERS)
def test_a_lock_that_no_process_has_is_taken_over(tmp_path: Path, name: str) -> None:
    """Whoever it names: the kernel knows better."""
    path, before = tmp_path / "lock", open_files()
    left_by(path, HOLDERS[name]())
    lock = Lock(path, Path("out"))
    lock.take()
    found = Holder(**json.loads(path.read_text()))
    assert found == replace(Holder.this_process(), since=found.since)
    lock.release()
    assert os.listdir(tmp_path) == []  # noqa: PTH208
    assert open_files() == before


def test_a_killed_run_stops_no_later_one(tmp_path: Path) -> None:
    path, script = tmp_path / "lock", (
        "import sys, time; from pathlib import Path; from streamshard.io.lock import Lock;"
        "Lock(Path(sys.argv[1]), Path('out')).take(); print(flush=True); time.sleep(600)"
    )  # fmt: skip
    child = subprocess.Popen([sys.executable, "-c", script, path], stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        lock = Lock(path, Path("out"))
        with pytest.raises(TargetLockedError, match=f"process {child.pid} on .*wait for it"):
            lock.take()
        child.kill()
    lock.take()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_one_that_another_run_removed_meanwhile_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opened the file, and has it locked once its holder has released and removed it."""
    first, second, third = (Lock(tmp_path / "lock", Path("out")) for _ in range(3))
    first.take()
    real = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        first.release()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    second.take()
    with pytest.raises(TargetLockedError):
        third.take()
    second.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_where_files_cannot_be_locked_a_variable_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match=r"does not lock files.*set STREAMSHARD_NO_LOCK=1") as caught:
        lock_at(tmp_path / "lock", Path("out")).take()
    assert caught.value.filename == "out"
    monkeypatch.setenv("STREAMSHARD_NO_LOCK", "1")
    lock = lock_at(tmp_path / "lock", Path("out"))
    lock.take()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_says_nothing(tmp_path: Path) -> None:
    """It was cut off, by a power failure perhaps."""
    for content in (b"", bytes(200), b'{"ho', b'{"host": "a', b'{"host": "a"}', b'{"host": "\xff'):
        (tmp_path / "lock").write_bytes(content)
        lock = Lock(tmp_path / "lock", Path("out"))
        lock.take()
        lock.release()


@pytest.mark.parametrize("content", [b"4711\n", b"[1]", b'{"lr": 1}', b" " * 5000, b"\xff"])
def test_a_file_of_others_is_no_lock(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "lock"
    path.write_bytes(content)
    with pytest.raises(OSError, match=r"other content than a lock's.*move it away") as caught:
        Lock(path, Path("out")).take()
    assert caught.value.filename == str(path)
    assert path.read_bytes() == content


PLANTED: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "link": (lambda path, other: path.symlink_to(other), "a symbolic link"),
    "dangling": (lambda path, other: path.symlink_to("gone"), "a symbolic link"),
    "ring": (lambda path, other: path.symlink_to(path.name), "a symbolic link"),
    "hard link": (lambda path, other: path.hardlink_to(other), "a hard link"),
    "pipe": (lambda path, other: os.mkfifo(path), r"a pipe \(FIFO\)"),
    "directory": (lambda path, other: path.mkdir(), "a directory"),
    "socket": (lambda path, other: bind(path), "a socket"),
}
"""Kind → what puts it at a path, with another file for links; its name in messages."""


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


@pytest.mark.parametrize("is_empty", [True, False])
@pytest.mark.parametrize("kind", PLANTED)
def test_no_lock_is_taken_through_what_lies_there(
    tmp_path: Path, kind: str, is_empty: bool
) -> None:
    """Not even if the content would allow it."""
    plant, name = PLANTED[kind]
    path, other, before = tmp_path / "lock", tmp_path / "precious", open_files()
    content = b"" if is_empty else json.dumps(asdict(dead_process())).encode()
    other.write_bytes(content)
    plant(path, other)
    with pytest.raises(OSError, match=f"it is {name}, .* move it away") as caught:
        Lock(path, Path("out")).take()
    assert caught.value.filename == str(path)
    assert other.read_bytes() == content
    assert {one.name for one in tmp_path.iterdir()} == {"lock", "precious"}
    assert open_files() == before


@pytest.mark.parametrize("kind", PLANTED)
def test_no_file_is_written_through_what_lies_there(tmp_path: Path, kind: str) -> None:
    plant, name = PLANTED[kind]
    path, other = tmp_path / "file", tmp_path / "precious"
    other.write_bytes(b"precious")
    plant(path, other)
    for write in (
        lambda: write_new(path, b"x"),
        lambda: write_durably(tmp_path / "new", b"x", path),
        lambda: open_to_fill(path, is_direct=False),
        lambda: AppendedFile(path).open(),
        lambda: Reservation(path, 0),
    ):
        with pytest.raises(OSError, match=f"it is {name}, .* move it away"):
            write()
        assert other.read_bytes() == b"precious"
    assert not (tmp_path / "new").exists()


def _contend(path: Path, rounds: int) -> None:
    """Take a lock again and again, and see to it that nobody else has it."""
    taken = 0
    while taken < rounds:
        lock = Lock(path, Path("out"))
        try:
            lock.take()
        except TargetLockedError:
            continue
        os.close(os.open(path.with_name("inside"), os.O_CREAT | os.O_EXCL))
        path.with_name("inside").unlink()
        lock.release()
        taken += 1


def test_processes_that_all_want_it(tmp_path: Path) -> None:
    """Whoever has it makes a file that must not be there."""
    left_by(tmp_path / "lock", dead_process())
    context = multiprocessing.get_context("spawn")
    arguments = (tmp_path / "lock", 40)
    children = [context.Process(target=_contend, args=arguments) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert os.listdir(tmp_path) == []  # noqa: PTH208
