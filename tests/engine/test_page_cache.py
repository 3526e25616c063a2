"""What a run reads and writes, and the page cache: the same bytes, and room left for others."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamshard.engine.run.runner import Engine
from streamshard.engine.run.span_writer import Resources
from streamshard.engine.run.work import Ending, Fixed, Region, Span, TargetFile
from streamshard.io import sink
from streamshard.io.file_system import EXT4, XFS, file_system_of
from streamshard.io.page_cache import drop_cached
from streamshard.io.sink import write_blocks
from streamshard.io.writable import BLOCK_BYTES, LEAST_BYTES, aligned, open_direct
from tests.engine.fakes import Told, copies_of, is_cached, is_mostly_cached, on_disk, opened
from tests.held import open_files

# Written past the cache --------------------------------------------------------------------------


MIB = 1 << 20


def kind_of(directory: Path) -> int:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        return file_system_of(descriptor)
    finally:
        os.close(descriptor)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A place on a file system that is written past the cache."""
    kind = kind_of(tmp_path)
    if kind not in (EXT4, XFS):
        pytest.skip(f"temporary files lie on a file system of kind {kind:#x}, not on ext4 or XFS")
    return tmp_path / "file"


@contextmanager
def both(path: Path) -> Iterator[tuple[int, int]]:
    """Open a new file twice, the second time to write it past the cache."""
    with path.open("w+b") as stream:
        past = open_direct(path, stream.fileno())
        assert past >= 0
        try:
            yield stream.fileno(), past
        finally:
            os.close(past)


def content(nbytes: int, offset: int = 0) -> memoryview:
    """Bytes of which no block is like another, as far behind a block's beginning as an offset."""
    lead = offset % BLOCK_BYTES
    view = aligned(lead + nbytes)[lead:]
    view[:] = np.arange(-(-nbytes // 4), dtype=np.uint32).tobytes()[:nbytes]
    return view


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(offset=st.integers(0, 3 * BLOCK_BYTES), nbytes=st.integers(1, 5 * BLOCK_BYTES))
def test_every_byte_is_written_where_it_belongs(target: Path, offset: int, nbytes: int) -> None:
    wanted = content(nbytes, offset)
    with pytest.MonkeyPatch.context() as patch, both(target) as place:
        patch.setattr(sink, "LEAST_BYTES", 1)
        write_blocks(*place, wanted, offset)
    assert target.read_bytes() == bytes(offset) + bytes(wanted)


def test_whole_blocks_are_not_in_the_cache(target: Path) -> None:
    wanted = content(MIB, 100)
    with both(target) as place:
        write_blocks(*place, wanted, 100)
    assert [is_cached(target, at) for at in (0, 100 + MIB - 16, MIB // 2)] == [True, True, False]
    assert target.read_bytes()[100:] == wanted


@pytest.mark.parametrize("taken_at_first", [None, 5000], ids=["refused", "cut short"])
def test_what_the_disk_does_not_take_goes_through_the_cache(
    target: Path, monkeypatch: pytest.MonkeyPatch, taken_at_first: int | None
) -> None:
    """As where its blocks are larger, or space ran out for a moment."""
    wanted, real, calls = content(MIB), os.pwrite, list[tuple[int, int]]()

    def choosy(descriptor: int, view: memoryview, offset: int) -> int:
        calls.append((descriptor, offset))
        if descriptor == place[1] and taken_at_first is None:
            raise OSError(errno.EINVAL, "larger blocks, please")
        if len(calls) == 1 and taken_at_first is not None:
            return real(place[0], view[:taken_at_first], offset)
        return real(descriptor, view, offset)

    monkeypatch.setattr("streamshard.io.sink.os.pwrite", choosy)
    with both(target) as place:
        write_blocks(*place, wanted, 0)
    through, past = place
    rest = [] if taken_at_first is None else [(past, taken_at_first)]
    assert calls == [(past, 0), *rest, (through, 0)]
    assert target.read_bytes() == wanted


def file_of(lengths: list[int]) -> TargetFile:
    """Cut the front of source 0 into spans at odd places, each behind a byte of its own."""
    spans, source, at = [], 0, 0
    for nbytes in lengths:
        region = Region(nbytes, copies_of([(0, source, 0, nbytes)]))
        spans.append(Span(at, [Fixed(b"#"), region]))
        source, at = source + nbytes, at + 1 + nbytes
    return TargetFile("file", spans, [Ending(at, b"the end")])


def test_workers_that_share_a_file_share_blocks_of_it(target: Path) -> None:
    """What two spans meet in goes through the cache; a second run finds all of it as it was."""
    lengths = [3 * MIB + 1, LEAST_BYTES + 77, 5, 2 * MIB + 4095, MIB]
    data = bytes(content(sum(lengths)))
    sources = on_disk(target.parent, [data])
    wanted, source = b"", 0
    for nbytes in lengths:
        wanted, source = wanted + b"#" + data[source : source + nbytes], source + nbytes
    found = target.parent / "out" / "file"
    for run in range(2):
        before = open_files()
        with opened(target.parent / "out") as partial:
            told = Told()
            Engine(sources, Resources(3, MIB, MIB), told, partial).run([file_of(lengths)])
        assert open_files() == before
        assert told.kept == run * found.stat().st_size
        assert run or not is_cached(found, MIB // 2)
        assert found.read_bytes() == wanted + b"the end"


# Dropped from the cache --------------------------------------------------------------------------


def require_cached(path: Path) -> None:
    """Flush a file, and skip the test where it is not in memory all the same."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
    if not is_cached(path):
        pytest.skip("what was just written is not in memory on this file system")


def test_what_was_written_is_dropped_from_memory(tmp_path: Path) -> None:
    path = tmp_path / "tag" / "file"
    path.parent.mkdir()
    path.write_bytes(bytes(1 << 20))
    require_cached(path)
    drop_cached(tmp_path)
    assert not is_mostly_cached(path)
