"""Space that is held and given back."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamshard.io import preallocation
from streamshard.io.preallocation import Reservation
from tests.held import open_files

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
    monkeypatch.setattr(preallocation, "_fallocate", refuse)
    monkeypatch.setattr(preallocation, "file_system_of", lambda descriptor: 0)
    monkeypatch.setattr(preallocation, "last_error", lambda path: error)
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
