"""Many short copies, read together, against the same copies made one by one."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamshard.engine.numeric.cast import cast_between
from streamshard.engine.run.region import RegionFiller
from streamshard.engine.run.source_reader import SourceReader
from streamshard.engine.run.work import Region
from streamshard.io.entries import identify
from streamshard.model import Copies, SourceFile

FILE_BYTES = 1 << 15


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[SourceFile, ...]:
    """Two files of bytes that do not repeat soon."""
    place = tmp_path_factory.mktemp("files")
    found = []
    for number in range(2):
        path: Path = place / str(number)
        path.write_bytes(np.random.default_rng(number).bytes(FILE_BYTES))
        found.append(identify(path))
    return tuple(found)


@st.composite
def boxes(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    """Make copies (file, source, target, nbytes) in order of target: boxes, gaps, odd ones."""
    found, at = [], 0
    for _ in range(draw(st.integers(1, 4))):
        width = 4 * draw(st.integers(1, 12))
        columns, rows = draw(st.integers(1, 4)), draw(st.integers(1, 40))
        starts = [4 * draw(st.integers(0, 1000)) for _ in range(columns)]
        owners = [draw(st.integers(0, 1)) for _ in range(columns)]
        for row in range(rows):
            for column in range(columns):
                source = (starts[column] + row * width) % (FILE_BYTES - width)
                found.append((owners[column], source // 4 * 4, at, width))
                at += width
        at += 4 * draw(st.integers(0, 3))
    return found


def wanted(copies: list[tuple[int, int, int, int]], files: tuple[SourceFile, ...]) -> bytes:
    held = [file.path.read_bytes() for file in files]
    end = copies[-1][2] + copies[-1][3]
    made = bytearray(end)
    for file, source, target, nbytes in copies:
        made[target : target + nbytes] = held[file][source : source + nbytes]
    return bytes(made)


def portions(nbytes: int, step: int) -> Iterator[int]:
    for start in range(0, nbytes, step):
        yield min(step, nbytes - start)


@settings(deadline=None)
@given(boxes(), st.integers(1, 5000).map(lambda n: 4 * n), st.sampled_from([0, 64, 4096]))
def test_portions_of_any_size_hold_the_right_bytes(
    files: tuple[SourceFile, ...],
    copies: list[tuple[int, int, int, int]],
    step: int,
    scratch: int,
) -> None:
    expected = wanted(copies, files)
    region = Region(len(expected), Copies(*np.array(copies, dtype=np.int64).T))
    reader = SourceReader(files)
    filler = RegionFiller(region, reader, memoryview(bytearray(scratch)))
    made = b""
    for count in portions(len(expected), step):
        view = memoryview(bytearray(b"\xee" * count))
        filler.fill(view)
        made += bytes(view)
    reader.close()
    assert made == expected


@settings(deadline=None)
@given(boxes(), st.integers(1, 5000).map(lambda n: 8 * n))
def test_casts_are_made_of_what_was_put_together(
    files: tuple[SourceFile, ...], copies: list[tuple[int, int, int, int]], step: int
) -> None:
    narrow = wanted(copies, files)
    expected = np.frombuffer(narrow, "<u2").astype("<u4") << 16  # bf16 is the front of a float32
    wide = [(file, source, 2 * target, nbytes) for file, source, target, nbytes in copies]
    region = Region(
        2 * len(narrow),
        Copies(*np.array(wide, dtype=np.int64).T),
        source_itemsize=2,
        target_itemsize=4,
        cast=cast_between("bfloat16", "float32"),
    )
    reader = SourceReader(files)
    filler = RegionFiller(region, reader, memoryview(bytearray(4096)))
    made = b""
    for count in portions(2 * len(narrow), step):
        view = memoryview(bytearray(b"\xee" * count))
        filler.fill(view)
        made += bytes(view)
    reader.close()
    assert made == expected.tobytes()


def test_few_reads_are_made_for_many_runs(
    files: tuple[SourceFile, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = [(row % 2, row // 2 * 16, row * 16, 16) for row in range(1000)]
    region = Region(16_000, Copies(*np.array(copies, dtype=np.int64).T))
    reader, reads = SourceReader(files), []
    read_into = reader.read_into

    def counted(file: int, offset: int, view: memoryview) -> None:
        reads.append(len(view))
        read_into(file, offset, view)

    monkeypatch.setattr(reader, "read_into", counted)
    view = memoryview(bytearray(16_000))
    RegionFiller(region, reader, memoryview(bytearray(1 << 20))).fill(view)
    reader.close()
    assert reads == [8000, 8000]
    assert bytes(view) == wanted(copies, files)
