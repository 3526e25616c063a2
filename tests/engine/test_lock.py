"""Who may have a lock, with flock and without."""

import errno
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
from streamshard.io import lock as module
from streamshard.io.changes import write_durably, write_new
from streamshard.io.lock import Holder, Lock
from streamshard.io.preallocation import Reservation
from streamshard.io.sink import AppendedFile, open_target
from tests.held import open_files

NO_FLOCK = OSError(errno.ENOSYS, "Function not implemented")


@pytest.fixture(params=["flock", "no flock"])
def has_flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the file system knows flock(2); where it does not, the call says so."""

    def refuse(descriptor: int, operation: int) -> None:
        raise NO_FLOCK

    known: bool = request.param == "flock"
    if not known:
        monkeypatch.setattr("streamshard.io.lock.fcntl.flock", refuse)
    return known


def dead_process() -> Holder:
    child = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    return replace(Holder.this_process(), process=int(child.stdout), started="1")


HOLDERS: dict[str, Callable[[], Holder]] = {
    "alive": Holder.this_process,
    "dead": dead_process,
    "number used again": lambda: replace(Holder.this_process(), started="1"),
    "before a restart": lambda: replace(Holder.this_process(), boot="before"),
    "another host": lambda: replace(Holder.this_process(), host="elsewhere", boot="other"),
    "another container": lambda: replace(dead_process(), namespace="pid:[1]"),
}


def left_by(path: Path, holder: Holder) -> None:
    """Leave a lock as a process does that was killed, or whose lock is not seen here."""
    path.write_text(json.dumps(asdict(holder)))


@pytest.mark.parametrize(
    ("name", "local", "gone_with_flock", "gone_without"),
    [
        ("alive", True, True, False),  # a lock of its own that it has not: let go of, or copied
        ("dead", False, True, True),
        ("number used again", False, True, True),
        ("before a restart", False, True, True),
        ("another host", True, True, False),
        ("another host", False, False, False),
        ("another container", False, True, False),
    ],
)
def test_whose_lock_is_taken_over(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_flock: bool,
    name: str,
    local: bool,
    gone_with_flock: bool,
    gone_without: bool,
) -> None:
    path, before = tmp_path / "lock", open_files()
    left_by(path, HOLDERS[name]())
    monkeypatch.setattr(module, "LOCAL", {0x1234} if local else set())
    monkeypatch.setattr(module, "file_system_of", lambda descriptor: 0x1234)
    lock = Lock(path, Path("out"))
    if gone_with_flock if has_flock else gone_without:
        lock.take()
        found = Holder(**json.loads(path.read_text()))
        assert found == replace(Holder.this_process(), since=found.since)
        lock.release()
        assert os.listdir(tmp_path) == []  # noqa: PTH208
    else:
        left = path.read_text()
        with pytest.raises(TargetLockedError, match=f"on {HOLDERS[name]().host}.*remove .*lock"):
            lock.take()
        assert path.read_text() == left
    assert open_files() == before


def test_only_one_has_it(tmp_path: Path, has_flock: bool) -> None:
    one, other = (Lock(tmp_path / "lock", Path("out")) for _ in range(2))
    one.take()
    with pytest.raises(TargetLockedError, match=f"process {os.getpid()} on .*wait for it"):
        other.take()
    one.release()
    other.take()
    other.release()
    other.release()
    assert os.listdir(tmp_path) == []  # noqa: PTH208


def test_what_a_killed_run_left_on_the_way_is_removed(tmp_path: Path) -> None:
    """It had given the lock its name, and the temporary one was there too."""
    left_by(tmp_path / "lock", dead_process())
    (tmp_path / "lock.new.1.ab").hardlink_to(tmp_path / "lock")
    for name in ("lock.new.2.ab", "lock.new", "locket"):
        (tmp_path / name).touch()
    lock = Lock(tmp_path / "lock", Path("out"))
    lock.take()
    assert {path.name for path in tmp_path.iterdir()} == {"lock", "lock.new", "locket"}
    lock.release()


@pytest.mark.parametrize("call", ["os.link", "os.fsync", "os.pwrite", "fcntl.flock"])
def test_one_that_cannot_be_taken_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    before = open_files()
    monkeypatch.setattr(call, refuse)
    with pytest.raises(OSError, match="Input/output error"):
        Lock(tmp_path / "lock", Path("out")).take()
    assert list(tmp_path.iterdir()) == []
    assert open_files() == before


def test_a_lock_that_says_nothing(tmp_path: Path, has_flock: bool) -> None:
    """It was cut off, by a power failure perhaps."""
    for content in (b"", bytes(200), b'{"ho', b'{"host": "a', b'{"host": "a"}', b'{"host": "\xff'):
        (tmp_path / "lock").write_bytes(content)
        lock = Lock(tmp_path / "lock", Path("out"))
        if has_flock:
            lock.take()
            lock.release()
        else:
            with pytest.raises(TargetLockedError, match=r"does not say who.*remove"):
                lock.take()


@pytest.mark.parametrize("content", [b"4711\n", b"[1]", b'{"lr": 1}', b" " * 5000, b"\xff"])
def test_a_file_of_others_is_no_lock(tmp_path: Path, has_flock: bool, content: bytes) -> None:
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
        lambda: open_target(path, is_new=False),
        lambda: AppendedFile(path).open(),
        lambda: Reservation(path, 0),
    ):
        with pytest.raises(OSError, match=f"it is {name}, .* move it away"):
            write()
        assert other.read_bytes() == b"precious"
    assert not (tmp_path / "new").exists()


def test_a_take_over_that_was_cut_off_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_flock", lambda descriptor: None)
    left_by(tmp_path / "lock", dead_process())
    (tmp_path / "lock.turn").mkdir()
    with pytest.raises(TargetLockedError, match=r"taking it over.*remove .*lock\.turn"):
        Lock(tmp_path / "lock", Path("out")).take()


def no_links(*paths: Path) -> None:
    """Refuse as a file system does that has no hard links."""
    raise OSError(errno.EPERM, "Operation not permitted")


def _contend(path: Path, without: str, rounds: int) -> None:
    """Take a lock again and again, and see to it that nobody else has it."""
    if "flock" in without:
        module._flock = lambda descriptor: None
    if "links" in without:
        os.link = no_links  # type: ignore[assignment]
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


@pytest.mark.parametrize("without", ["", "flock", "links", "flock, links"])
def test_processes_that_all_want_it(tmp_path: Path, without: str) -> None:
    """Whoever has it makes a file that must not be there."""
    left_by(tmp_path / "lock", dead_process())
    context = multiprocessing.get_context("spawn")
    arguments = (tmp_path / "lock", without, 40)
    children = [context.Process(target=_contend, args=arguments) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert os.listdir(tmp_path) == []  # noqa: PTH208


def test_a_lock_that_cannot_be_made_names_what_is_to_be_locked(tmp_path: Path) -> None:
    target = tmp_path / "gone" / "target"
    with pytest.raises(FileNotFoundError) as caught:
        Lock(target / "lock", target).take()
    assert caught.value.filename == str(target)
