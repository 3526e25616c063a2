"""What a run reads and writes, and the page cache: the same bytes, and room left for others."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamshard.engine.run.runner import Engine
from streamshard.engine.run.source_reader import SourceReader
from streamshard.engine.run.span_writer import Resources
from streamshard.engine.run.work import Ending, Fixed, Region, Span, TargetFile
from streamshard.io import sink, writable
from streamshard.io.file_system import EXT4, TMPFS, XFS, file_system_of
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


def test_few_blocks_go_through_the_cache(target: Path) -> None:
    with both(target) as place:
        write_blocks(*place, content(LEAST_BYTES - 1), 0)
    assert is_cached(target)


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


def test_a_window_with_its_scratch_may_be_one_huge_page() -> None:
    window = aligned(2 * MIB)
    address = np.frombuffer(window, dtype=np.uint8).ctypes.data
    assert address % (2 * MIB) == 0
    if not Path("/sys/kernel/mm/transparent_hugepage").is_dir():
        pytest.skip("this kernel has no huge pages")
    start, flags = 0, dict[int, list[str]]()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-[0-9a-f]+ ", line):
            start = int(found[1], 16)
        elif line.startswith("VmFlags:"):
            flags[start] = line.split()
    assert "hg" in flags[address]


def test_other_errors_are_errors(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, view: memoryview, offset: int) -> int:
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr("streamshard.io.sink.os.pwrite", fail)
    with both(target) as place, pytest.raises(OSError, match="the disk is gone"):
        write_blocks(*place, content(MIB), 0)


def test_not_on_a_file_system_in_memory() -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or kind_of(memory) != TMPFS:
        pytest.skip("/dev/shm is not a file system in memory here")
    before = open_files()
    descriptor = os.open(memory, os.O_TMPFILE | os.O_RDWR)
    try:
        assert open_direct(memory / "none", descriptor) == -1
    finally:
        os.close(descriptor)
    assert open_files() == before


def test_not_where_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writable, "file_system_of", lambda descriptor: EXT4)
    with (tmp_path / "file").open("wb") as stream:
        assert open_direct(tmp_path / "another", stream.fileno()) == -1


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


NBYTES = 40 * MIB
"""More than the disk may be behind a worker."""


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


@pytest.mark.parametrize("drops_behind", [False, True])
def test_a_run_leaves_behind_what_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drops_behind: bool
) -> None:
    monkeypatch.setattr("streamshard.io.place.open_direct", lambda path, descriptor: -1)
    data = np.arange(NBYTES // 8, dtype=np.int64).tobytes()
    sources = on_disk(tmp_path, [data])
    path = sources[0].path
    require_cached(path)
    resources = Resources(1, MIB, MIB, drops_behind)
    region = Region(NBYTES, copies_of([(0, 0, 0, NBYTES)]))
    with opened(tmp_path / "out") as partial:
        engine = Engine(sources, resources, Told(), partial)
        engine.run([TargetFile("file", [Span(0, [region])])])
    files = path, tmp_path / "out" / "file"
    assert [is_mostly_cached(file) for file in files] == [not drops_behind] * 2
    assert (tmp_path / "out" / "file").read_bytes() == data


def test_what_another_worker_is_yet_to_read_stays(tmp_path: Path) -> None:
    sources = on_disk(tmp_path, [os.urandom(NBYTES)])
    path = sources[0].path
    require_cached(path)
    reader = SourceReader(sources, drops_behind=True)
    for offset in range(16 * MIB, 24 * MIB, MIB):
        reader.read_into(0, offset, memoryview(bytearray(MIB)))
    reader.close()
    if is_cached(path, 20 * MIB):
        pytest.skip("what was forgotten is still in memory on this file system")
    assert is_cached(path, 4 * MIB)
    assert is_cached(path, 32 * MIB)
