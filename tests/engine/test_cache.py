"""What a large run reads and writes does not stay in memory in the place of what others need."""

import os
from pathlib import Path

import numpy as np
import pytest

from streamshard.engine.run.runner import Engine
from streamshard.engine.run.source_reader import SourceReader
from streamshard.engine.run.span_writer import Resources
from streamshard.engine.run.work import Region, Span, TargetFile
from streamshard.io.page_cache import drop_cached
from tests.engine.fakes import Told, copies_of, is_cached, on_disk, opened

MIB = 1 << 20
NBYTES = 40 * MIB
"""More than the disk may be behind a worker."""


def test_what_was_written_is_dropped_from_memory(tmp_path: Path) -> None:
    path = tmp_path / "tag" / "file"
    path.parent.mkdir()
    path.write_bytes(bytes(1 << 20))
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
    if not is_cached(path):
        pytest.skip("what was just written is not in memory on this file system")
    drop_cached(tmp_path)
    assert not is_cached(path)


@pytest.mark.parametrize("drops_behind", [False, True])
def test_a_run_leaves_behind_what_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drops_behind: bool
) -> None:
    monkeypatch.setattr("streamshard.io.disk.open_direct", lambda path, descriptor: -1)
    data = np.arange(NBYTES // 8, dtype=np.int64).tobytes()
    sources = on_disk(tmp_path, [data])
    path = sources[0].path
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
    if not is_cached(path):
        pytest.skip("what was just written is not in memory on this file system")
    resources = Resources(1, MIB, MIB, drops_behind)
    region = Region(NBYTES, copies_of([(0, 0, 0, NBYTES)]))
    with opened(tmp_path / "out") as partial:
        engine = Engine(sources, resources, Told(), partial)
        engine.run([TargetFile("file", [Span(0, [region])])])
    assert [is_cached(path), is_cached(tmp_path / "out" / "file")] == [not drops_behind] * 2
    assert (tmp_path / "out" / "file").read_bytes() == data


def test_what_another_worker_is_yet_to_read_stays(tmp_path: Path) -> None:
    sources = on_disk(tmp_path, [os.urandom(NBYTES)])
    path = sources[0].path
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
    reader = SourceReader(sources, drops_behind=True)
    for offset in range(16 * MIB, 24 * MIB, MIB):
        reader.read_into(0, offset, memoryview(bytearray(MIB)))
    reader.close()
    if is_cached(path, 20 * MIB):
        pytest.skip("what was forgotten is still in memory on this file system")
    assert is_cached(path, 4 * MIB)
    assert is_cached(path, 32 * MIB)
