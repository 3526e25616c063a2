"""Sources on a local disk are looked at where they are mapped, one bounded window at a time."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from streamshard.checksums import crc32
from streamshard.engine.run.source_reader import SourceReader
from streamshard.errors import CorruptFileError, IntegrityError
from streamshard.io import memory_map
from streamshard.io.entries import identify
from streamshard.io.memory_map import MOST_BYTES
from streamshard.layout.memory_plan import MAPPED_BYTES
from streamshard.model import BlockDigests, SourceFile

NBYTES = 8 * MOST_BYTES + 12345
AN_HOUR_NS = 3600 * 10**9


@pytest.fixture
def content() -> bytes:
    return np.random.default_rng(7).bytes(NBYTES)


@pytest.fixture
def path(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "shard.pt"
    path.write_bytes(content)
    date_back(path)
    return path


def date_back(path: Path) -> None:
    modified = path.stat().st_mtime_ns - AN_HOUR_NS
    os.utime(path, ns=(modified, modified))


def reader_of(*files: SourceFile) -> SourceReader:
    return SourceReader(files, maps=True)


def window_of(reader: SourceReader, offset: int, nbytes: int) -> bytes | memoryview | None:
    mapped = reader.window(0, offset, nbytes)
    return None if mapped is None else mapped[0]


def look_at(reader: SourceReader, files: Iterable[int]) -> None:
    for number in files:
        reader.window(number, 0, 1 << 16)


def resident_bytes(path: Path) -> int:
    """Return how much of the maps of a file is in this process's memory."""
    maps = Path("/proc/self/smaps").read_text()
    (blocks,) = [re.findall(rf"{re.escape(str(path))}\n(?:.*\n)*?Rss: +(\d+) kB", maps)]
    return sum(int(kib) for kib in blocks) << 10


def test_one_window_is_in_memory_and_none_after_the_job(path: Path) -> None:
    reader = reader_of(identify(path))
    view = memoryview(bytearray(MOST_BYTES))
    for offset in range(0, NBYTES - MOST_BYTES, 3 * MOST_BYTES // 4):
        assert window_of(reader, offset, MOST_BYTES) is not None
        assert 0 < resident_bytes(path) <= MAPPED_BYTES
    reader.read_into(0, 0, view)
    assert 0 < resident_bytes(path) <= MAPPED_BYTES
    reader.settle()
    assert resident_bytes(path) == 0
    reader.close()


def test_a_file_of_a_network_file_system_is_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nfs = 0x6969
    monkeypatch.setattr(memory_map, "file_system_of", lambda _: nfs)
    assert window_of(reader_of(identify(path)), 0, MOST_BYTES) is None


@pytest.mark.parametrize("copies", [False, True])
def test_zeros_behind_the_end_of_a_file_that_was_cut_off_are_refused(
    path: Path, *, copies: bool
) -> None:
    """Within the last page nothing else shows it: no signal, no error."""
    reader, end = reader_of(identify(path)), 2 * MOST_BYTES - 100
    if copies:
        reader.read_into(0, 0, memoryview(bytearray(MOST_BYTES)))
    window = window_of(reader, MOST_BYTES, MOST_BYTES)
    os.truncate(path, end)
    assert window is not None
    assert not any(window[-100:])
    with pytest.raises(CorruptFileError, match=f"{NBYTES} bytes.*{end} now"):
        reader.settle()
    reader.close()


def test_a_file_that_is_closed_to_open_others_is_asked_again(tmp_path: Path) -> None:
    files = []
    for number in range(65):
        files.append(tmp_path / f"{number}.pt")
        files[-1].write_bytes(bytes(1 << 16))
        date_back(files[-1])
    reader = reader_of(*map(identify, files))
    assert window_of(reader, 0, 1 << 16) is not None
    os.truncate(files[0], 5)
    with pytest.raises(CorruptFileError, match=r"0\.pt.* 5 now"):
        look_at(reader, range(1, 65))
    reader.close()


def test_blocks_are_compared_where_they_are_mapped(path: Path, content: bytes) -> None:
    step = 1 << 17
    sums = [crc32(content[at : at + step]) for at in range(0, NBYTES, step)]
    sums[3] ^= 1
    digests = BlockDigests(NBYTES, step, np.array(sums, dtype=np.uint32))
    known = identify(path)
    file = SourceFile(known.path, known.nbytes, known.version, known.file_id, digests)
    reader = reader_of(file)
    assert window_of(reader, 0, 2 * step) == content[: 2 * step]
    assert window_of(reader, 1, step) is None  # parts of two blocks
    last = NBYTES // step * step
    with pytest.raises(IntegrityError, match=f"bytes {3 * step} to {4 * step} are damaged"):
        window_of(reader, 2 * step, 2 * step)
    assert NBYTES - last < 1 << 16 or window_of(reader, last, NBYTES - last) == content[last:]
    reader.close()
