"""What a large run reads and writes does not stay in memory in the place of what others need."""

import os
from pathlib import Path

import numpy as np
import pytest

from streamshard.engine.cache import drop_cached
from streamshard.engine.run import Engine, Resources
from streamshard.engine.work import Region, Span, TargetFile
from tests.engine.fakes import Told, copies_of, on_disk, opened

MIB = 1 << 20
NBYTES = 40 * MIB
"""More than the disk may be behind a worker."""


def is_cached(path: Path) -> bool:
    """Tell whether the first bytes of a file are in memory: then they can be read at once."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.preadv(descriptor, [bytearray(16)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError as error:
        pytest.skip(f"this file system does not tell what it has in memory: {error}")
    finally:
        os.close(descriptor)
    return True


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
def test_a_run_leaves_behind_what_it_is_told_to(tmp_path: Path, drops_behind: bool) -> None:
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
        engine = Engine(sources, {}, resources, Told(), partial)
        engine.run([TargetFile("file", [Span(0, [region])])])
    assert [is_cached(path), is_cached(tmp_path / "out" / "file")] == [not drops_behind] * 2
    assert (tmp_path / "out" / "file").read_bytes() == data
