"""Sources that are changed, damaged or encoded, and more of them than a process may open."""

import os
import zlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest
from pathlib import Path

import numpy as np
import pytest

from streamshard.engine.run.source_reader import SourceReader
from streamshard.errors import CorruptFileError, IntegrityError
from streamshard.io.entries import identify
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


@pytest.mark.parametrize(("workers", "most"), [(1, 64), (16, 32)])
def test_more_sources_than_a_process_may_open_are_read(
    tmp_path: Path, workers: int, most: int
) -> None:
    before = open_files()
    contents = [bytes([number]) * 4 for number in range(150)]
    reader = SourceReader(on_disk(tmp_path, contents), workers=workers)
    for round_ in range(2):
        for number in range(150):
            assert read(reader, number, round_, round_ + 2) == bytes([number]) * 2
        assert len(open_files()) - len(before) <= most
    reader.close()
    assert open_files() == before


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
