"""Files: what lies at a path, sources that are short, changed or damaged, targets that refuse."""

import os
import socket
import zlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest
from pathlib import Path

import numpy as np
import pytest

from streamshard.engine.run.source_reader import SourceReader
from streamshard.errors import CorruptFileError, IntegrityError, SourceError
from streamshard.io.entries import (
    entries_below,
    exists,
    files_below,
    identify,
    is_denied,
    is_directory,
    is_file,
    is_link,
    is_real_directory,
    is_same_file,
    lexists,
    open_readable,
    paths_below,
    paths_like,
    read_all,
)
from streamshard.io.files import require_all_unchanged
from streamshard.model import BlockDigests, Decoder, Memory, SourceFile, StoredBytes
from tests.engine.fakes import on_disk
from tests.held import open_files

DATA = bytes(1 + i * 37 % 255 for i in range(1000))


def reader_of(files: Sequence[SourceFile], *decoders: Decoder) -> SourceReader:
    return SourceReader([replace(f, decoder=d) for f, d in zip_longest(files, decoders)])


def read(reader: SourceReader, file: int, start: int, stop: int) -> bytes:
    view = memoryview(bytearray(stop - start))
    reader.read_into(file, start, view)
    return bytes(view)


def digests(data: bytes, block_bytes: int) -> BlockDigests:
    starts = range(0, len(data), block_bytes)
    crcs = [zlib.crc32(data[at : at + block_bytes]) for at in starts]
    return BlockDigests(len(data), block_bytes, np.array(crcs, np.uint32))


def flip(path: Path, at: int) -> None:
    """Flip one bit, leaving size and time as they were."""
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("most", [1, 3, 64])
def test_short_reads_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    real = os.preadv

    def few(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return real(descriptor, [buffers[0][:most]], offset)

    monkeypatch.setattr("streamshard.io.readable.os.preadv", few)
    reader = reader_of(on_disk(tmp_path, [DATA, DATA[::-1]]))
    assert read(reader, 0, 17, 300) == DATA[17:300]
    assert read(reader, 1, 0, 1000) == DATA[::-1]
    reader.close()


@pytest.mark.parametrize("stop", [1001, 2000])
def test_a_plan_that_reaches_past_the_end_is_refused(tmp_path: Path, stop: int) -> None:
    reader = reader_of(on_disk(tmp_path, [DATA]))
    with pytest.raises(CorruptFileError, match="source-0: ends at byte 1000") as caught:
        read(reader, 0, 990, stop)
    assert "1000 bytes" in str(caught.value)
    reader.close()


def test_asking_ahead_reads_nothing_wrong_and_never_fails_where_reading_might(
    tmp_path: Path,
) -> None:
    sources = on_disk(tmp_path, [DATA, DATA])
    reader = reader_of(sources)
    reader.will_need(0, 100, 10**9)
    assert read(reader, 0, 0, 10) == DATA[:10]
    sources[1].path.unlink()
    reader.will_need(1, 0, 10)
    with pytest.raises(SourceError, match="source-1: cannot be read"):
        read(reader, 1, 0, 10)
    reader.close()


@pytest.mark.parametrize("change", ["shorter", "longer", "touched", "rewritten"])
def test_a_source_changed_after_planning_is_refused(tmp_path: Path, change: str) -> None:
    (source,) = on_disk(tmp_path, [DATA])
    if change == "touched":
        os.utime(source.path, ns=(0, int(source.version) + 1))
    elif change == "rewritten":
        source.path.write_bytes(DATA[::-1])
        os.utime(source.path, ns=(0, int(source.version) + 1_000_000))
    else:
        os.truncate(source.path, 999 if change == "shorter" else 1001)
        os.utime(source.path, ns=(0, int(source.version)))
    reader = reader_of([source])
    before = open_files()
    for _ in range(2):  # being refused once does not make it good
        with pytest.raises(CorruptFileError, match="source-0: changed while it was being read"):
            read(reader, 0, 0, 10)
    assert open_files() == before


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 999, 1000, 5000])
def test_checked_ranges_are_those_of_the_file(tmp_path: Path, block_bytes: int) -> None:
    contents = DATA, DATA[::-1]
    files = on_disk(tmp_path, [content + b"tail" for content in contents])
    reader = reader_of(files, *(digests(content, block_bytes) for content in contents))
    for start, stop in [(0, 1000), (0, 1), (999, 1000), (63, 65), (64, 128), (13, 777), (5, 5)]:
        for file, content in enumerate(contents):
            assert read(reader, file, start, stop) == content[start:stop]
    reader.close()


@pytest.mark.parametrize("at", [0, 63, 64, 500, 540, 999])
def test_a_damaged_block_is_reported_by_every_range_that_touches_it(
    tmp_path: Path, at: int
) -> None:
    files = on_disk(tmp_path, [DATA])
    flip(files[0].path, at)
    reader = reader_of(files, digests(DATA, 64))
    edges = [0, 10, 63, 64, 65, 128, 450, 512, 576, 960, 990, 1000]
    for start, stop in pairwise(edges):
        blocks = range(start // 64, (stop - 1) // 64 + 1)
        if at // 64 in blocks:
            with pytest.raises(IntegrityError, match=r"source-0: bytes \d+ to \d+ are damaged"):
                read(reader, 0, start, stop)
        else:
            assert read(reader, 0, start, stop) == DATA[start:stop]
    reader.close()


class Reversed:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log

    def decode(
        self, file: StoredBytes, stored: Memory, content: Memory, part: tuple[int, int] | None
    ) -> tuple[int, memoryview]:
        self.log.append(self.name)
        data = bytearray(10_000)
        return 0, memoryview(data[: file.read_into(memoryview(data), 0)][::-1])


def test_an_encoded_file_is_decoded_once_while_it_is_wanted(tmp_path: Path) -> None:
    files = on_disk(tmp_path, [DATA[::-1], DATA, DATA])
    log: list[str] = []
    reader = reader_of(files, Reversed("a", log), Reversed("b", log))
    assert read(reader, 0, 3, 50) == DATA[3:50]
    assert read(reader, 0, 900, 1000) == DATA[900:]
    assert log == ["a"]
    assert read(reader, 1, 0, 5) == DATA[::-1][:5]
    assert read(reader, 2, 0, 5) == DATA[:5]  # a plain file between leaves the decoded one alone
    assert read(reader, 1, 5, 9) == DATA[::-1][5:9]
    assert log == ["a", "b"]
    assert read(reader, 0, 0, 1) == DATA[:1]
    assert log == ["a", "b", "a"]
    reader.close()


class Partial:
    """Decodes a multiple of 100 bytes, and notes which."""

    def __init__(self) -> None:
        self.log: list[tuple[int, int]] = []

    def decode(
        self, file: StoredBytes, stored: Memory, content: Memory, part: tuple[int, int] | None
    ) -> tuple[int, memoryview]:
        start, stop = part or (0, len(DATA))
        start, stop = start // 100 * 100, -(-stop // 100) * 100
        view = content(stop - start)
        view[:] = DATA[start:stop]
        self.log.append((start, stop))
        return start, view


def test_what_is_read_once_is_decoded_in_part(tmp_path: Path) -> None:
    (file,) = on_disk(tmp_path, [DATA])
    partial = Partial()
    reader = SourceReader([replace(file, decoder=partial)], reads_once=True)
    for start, stop in ((250, 260), (210, 300), (300, 500), (0, 1000), (250, 990)):
        assert read(reader, 0, start, stop) == DATA[start:stop]
    assert partial.log == [(200, 300), (300, 500), (0, 1000), (200, 1000)]
    reader.close()


@pytest.mark.parametrize("reads_once", [False, True])
def test_all_that_is_read_at_once_is_decoded_in_its_place(tmp_path: Path, reads_once: bool) -> None:
    (file,) = on_disk(tmp_path, [DATA])
    partial, places = Partial(), list[memoryview]()
    plain = partial.decode

    def decode(
        file: StoredBytes, stored: Memory, content: Memory, part: tuple[int, int] | None
    ) -> tuple[int, memoryview]:
        start, view = plain(file, stored, content, part)
        places.append(view)
        return start, view

    partial.decode = decode  # type: ignore[method-assign]
    reader = SourceReader([replace(file, decoder=partial)], reads_once=reads_once)
    whole = memoryview(bytearray(2000))
    for start in (0, 1000):
        reader.read_into(0, 0, whole[start : start + 1000])
    assert whole == DATA * 2
    assert [place.obj is whole.obj for place in places] == [True, True]
    reader.close()


def test_more_sources_than_a_process_may_open_are_read(tmp_path: Path) -> None:
    before = open_files()
    contents = [bytes([number]) * 4 for number in range(150)]
    reader = reader_of(on_disk(tmp_path, contents))
    for round_ in range(2):
        for number in range(150):
            assert read(reader, number, round_, round_ + 2) == bytes([number]) * 2
        assert len(open_files()) - len(before) <= 64
    reader.close()
    assert open_files() == before


# Paths and directories ---------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a file, a directory, and links to both, to itself and to nothing."""
    (tmp_path / "file").write_bytes(DATA)
    (tmp_path / "directory" / "deep").mkdir(parents=True)
    (tmp_path / "directory" / "deep" / "inner").write_bytes(b"")
    for name, target in (("to-file", "file"), ("to-directory", "directory"), ("to-nothing", "?")):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


NAMES = [
    "file", "directory", "to-file", "to-directory", "to-nothing", "loop", "pipe", "absent",
    "file/below", "nul\0", "directory/deep/inner",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_path_leads_where_pathlib_says(place: Path, name: str) -> None:
    path = place / name
    assert exists(path) == path.exists()
    assert is_file(path) == path.is_file()
    assert is_directory(path) == path.is_dir()
    assert is_link(path) == path.is_symlink()
    assert lexists(path) == (path.exists() or path.is_symlink())
    assert is_real_directory(path) == (path.is_dir() and not path.is_symlink())


def test_what_cannot_be_known_is_an_error(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *, follow_symlinks: bool) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", refuse)
    for ask in (exists, is_file, is_directory, is_link, lexists, is_real_directory):
        with pytest.raises(PermissionError):
            ask(place / "file")


def test_a_walk_lists_all_but_what_it_may_leave_out(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = {*place.rglob("*")}
    assert {*paths_below(place)} == everything
    assert {*files_below(place)} == everything - {place / "directory", place / "directory/deep"}
    outside = {entry.path for entry in entries_below(place, enters=lambda e: e.name != "deep")}
    assert outside == everything - {place / "directory/deep/inner"}
    scan = os.scandir

    def refuse(path: Path) -> object:
        if path.name == "deep":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError):
        list(paths_below(place))
    assert {entry.path for entry in entries_below(place, skips=is_denied)} == outside


def test_names_are_found_by_a_pattern_if_there_is_a_directory(place: Path) -> None:
    assert {path.name for path in paths_like(place, "to-*i*")} == {
        "to-file", "to-directory", "to-nothing"
    }  # fmt: skip
    assert paths_like(place / "file", "*") == paths_like(place / "absent", "*") == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("directory", "a directory"),
        ("pipe", "a pipe"),
        ("socket", "a socket|address"),
        ("zero", "a device"),
    ],
)
def test_a_small_file_is_read_up_to_a_limit_and_nothing_else_is(
    place: Path, name: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (read_all(place / "file"), read_all(place / "to-file", 7)) == (DATA, DATA[:7])
    (place / "zero").symlink_to("/dev/zero")
    monkeypatch.chdir(place)  # the path of a socket has to be short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        for read in (read_all, open_readable):
            with pytest.raises(OSError, match=f"{says}.*/{name}'"):
                read(place / name)


def test_the_same_file_is_known_by_any_of_its_names(place: Path) -> None:
    os.link(place / "file", place / "other")
    assert is_same_file(place / "other", place / "to-file")
    assert not is_same_file(place / "other", place / "directory/deep/inner")


def test_an_identity_is_that_of_the_content_and_of_the_file(tmp_path: Path) -> None:
    one, other = on_disk(tmp_path, [DATA, DATA])
    stat = one.path.stat()
    os.utime(other.path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other = identify(other.path)
    assert (one.nbytes, one.version) == (other.nbytes, other.version)
    assert one.file_id != other.file_id
    os.utime(other.path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert identify(other.path).version != other.version


def test_files_of_two_relative_directories_are_each_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = []
    for name in ("run", "reference"):
        Path(name).mkdir()
        Path(name, "weights").write_bytes(b"1234")
        files.append(identify(Path(name, "weights")))
    require_all_unchanged(files)
    Path("reference/weights").write_bytes(b"12345")
    with pytest.raises(CorruptFileError, match="4 bytes when the run began, 5 now"):
        require_all_unchanged(files)
