"""A second's look at a disk: how much is read and written for it, and that nothing is left."""

import os
from pathlib import Path

import pytest

from streamshard.io import disk_speed
from streamshard.io.entries import identify
from streamshard.io.page_cache import drop_file
from tests.engine.fakes import is_cached, on_disk
from tests.held import open_files

MIB = 1 << 20


class Clock:
    """A clock that goes on by so much whenever somebody looks."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_all_of_a_little_is_read_and_pieces_of_much(tmp_path: Path) -> None:
    little = on_disk(tmp_path, [bytes(10), b"", bytes(3 * MIB + 7)])
    assert disk_speed.measure_reading(little, workers=2, clock=Clock(0)).nbytes == 10 + 3 * MIB + 7
    sparse = tmp_path / "much"
    with sparse.open("wb") as stream:
        stream.truncate(1000 * MIB)
    much = (*on_disk(tmp_path, [bytes(5)]), identify(sparse))
    pieces = [(path.name, offset) for path, offset, _ in disk_speed._pieces(much)]
    assert len(pieces) == disk_speed.MOST_BYTES // disk_speed.PIECE_BYTES + 1
    assert {path for path, _ in pieces} == {"source-0", "much"}
    assert max(offset for _, offset in pieces) > 980 * MIB


def test_it_ends_in_time(tmp_path: Path) -> None:
    files = on_disk(tmp_path, [bytes(40 * MIB)])
    before = open_files()
    slow = disk_speed.measure_reading(files, workers=1, clock=Clock(disk_speed.SECONDS / 3))
    assert 0 < slow.nbytes <= 4 * MIB
    written = disk_speed.measure_writing(
        tmp_path, most_bytes=1 << 40, clock=Clock(disk_speed.SECONDS)
    )
    assert written.nbytes == 8 * MIB
    assert written.bytes_per_second > 0
    assert open_files() == before


def test_nothing_is_left_and_nothing_can_be_seen_of_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    real = os.fsync

    def look(descriptor: int) -> None:
        seen.append(os.listdir(tmp_path))  # noqa: PTH208
        real(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    assert disk_speed.measure_writing(tmp_path, most_bytes=1).nbytes == 8 * MIB
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    assert disk_speed.measure_writing(tmp_path, most_bytes=9 * MIB).nbytes == 16 * MIB
    assert seen == [[]] * 3
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with pytest.raises(FileNotFoundError, match="gone"):
        disk_speed.measure_writing(gone, most_bytes=1)


def test_what_was_not_in_memory_is_not_there_afterwards(tmp_path: Path) -> None:
    (file,) = on_disk(tmp_path, [bytes(range(256)) * 8192])
    with file.path.open("rb") as stream:
        os.fsync(stream.fileno())
    drop_file(file.path)
    if is_cached(file.path):
        pytest.skip("what was forgotten is still in memory on this file system")
    disk_speed.measure_reading([file], workers=1)
    assert not is_cached(file.path)
    file.path.read_bytes()
    assert is_cached(file.path)
    disk_speed.measure_reading([file], workers=1)
    assert is_cached(file.path)
