"""Regions and windows, against filling a region byte by byte."""

import os
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamshard.engine.numeric.cast import cast_between
from streamshard.engine.run.region import RegionFiller
from streamshard.engine.run.source_reader import SourceReader
from streamshard.engine.run.window import Window
from streamshard.engine.run.work import Fixed, Region, RegionResult, Span, Trailer, Written
from streamshard.io.entries import identify
from streamshard.io.readable import ReadableFile
from streamshard.io.sink import LocalSink
from streamshard.model import Digest, SourceFile
from tests.engine.fakes import FakeReader, Row, copies_of, expected, regions

Drawn = tuple[list[bytes], list[Row], int]


def buffer(nbytes: int) -> memoryview:
    """Make a buffer full of what must not be seen in any file."""
    return memoryview(bytearray(b"\xdd" * nbytes))


@contextmanager
def file_of(content: bytes = b"") -> Iterator[LocalSink]:
    with tempfile.TemporaryFile() as stream:
        stream.write(content)
        stream.flush()
        yield LocalSink(stream.fileno())


def held(sink: LocalSink) -> bytes:
    return os.pread(sink.descriptor, 1 << 24, 0)


def written(span: Span, reader: FakeReader, window: int, scratch: int = 8) -> bytes:
    """Write a span into an empty file and return what the file holds then."""
    with file_of() as sink:
        found = Window(buffer(window), buffer(scratch), reader).write(span, sink)
        data = held(sink)
    assert found.written == Written(len(data), zlib.crc32(data))
    return data


@given(regions(), st.integers(1, 50))
def test_a_region_is_streamed_through_any_window(drawn: Drawn, window: int) -> None:
    contents, rows, nbytes = drawn
    reader = FakeReader(contents)
    region = Region(nbytes, copies_of(rows), trailer=Trailer((b"<", b"|", b">")))
    data = written(Span(0, [region]), reader, window)
    content = expected(contents, rows, nbytes)
    checksum = zlib.crc32(content).to_bytes(4, "little")
    assert data == content + b"<" + checksum + b"|" + checksum + b">"
    assert len(data) == region.nbytes
    # Every source byte is read once, and none that is not wanted.
    read = [(file, at + i) for file, at, count in reader.calls for i in range(count)]
    assert read == [(file, at + i) for file, at, _, count in rows for i in range(count)]
    assert all(count <= window for _, _, count in reader.calls)


class Backwards:
    """A codec that turns pieces around, behind a byte of each, and remembers what it encoded."""

    piece_bytes = 4

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def encode(self, content: memoryview) -> bytes:
        made = self.encoder(len(content))
        at, turned = 0, b""
        for nbytes in self.sizes(len(content)):
            turned += made.add(content[at : at + nbytes])
            at += nbytes
        return made.head + turned

    def encoder(self, nbytes: int) -> "TurnsAround":
        return TurnsAround(self.seen, len(self.sizes(nbytes)))

    def sizes(self, nbytes: int) -> list[int]:
        count = max(1, nbytes // 4)
        return [4] * (count - 1) + [nbytes - 4 * (count - 1)]


class TurnsAround:
    def __init__(self, seen: list[bytes], count: int) -> None:
        self.seen, self.count, self.sums = seen, count, b""

    def add(self, piece: memoryview) -> memoryview:
        self.seen.append(bytes(piece))
        self.sums += bytes([1 + sum(piece) % 255])
        return memoryview(bytes(piece[::-1]))

    @property
    def head(self) -> bytes:
        return self.sums.ljust(self.count, b"?")


class OnlyGrows(LocalSink):
    """A file that is written as objects are."""

    only_grows = True

    def write(self, view: memoryview, offset: int) -> None:
        assert offset == os.fstat(self.descriptor).st_size
        super().write(view, offset)


def checked(found: RegionResult, content: bytes, overflowed: int = 0) -> None:
    assert found.content == Digest(len(content), zlib.crc32(content), google_crc32c.value(content))
    blocks = [content[at : at + 7] for at in range(0, len(content), 7)]
    assert found.blocks == tuple(map(zlib.crc32, blocks))
    assert found.overflowed == overflowed


@given(regions(), st.integers(1, 30), st.booleans(), st.booleans(), st.booleans())
def test_what_is_written_is_known_and_recognized(
    drawn: Drawn, window: int, is_encoded: bool, is_crc32c: bool, only_grows: bool
) -> None:
    contents, rows, nbytes = drawn
    region = Region(
        nbytes,
        copies_of(rows),
        trailer=Trailer(is_crc32c=is_crc32c),
        codec=Backwards() if is_encoded else None,
        takes_crc32c=True,
        block_bytes=7,
    )
    # A region that is encoded is alone in its file.
    span = Span(0, [region] if is_encoded else [Fixed(b"#"), region, Fixed(b"!"), region])
    content = expected(contents, rows, nbytes)
    stored = Backwards().encode(memoryview(content)) if is_encoded else content
    crc32 = google_crc32c.value(stored) if is_crc32c else zlib.crc32(stored)
    one = stored + crc32.to_bytes(4, "little")
    whole = one if is_encoded else b"#" + one + b"!" + one
    writer = Window(buffer(window), buffer(8), FakeReader(contents))
    with file_of() as sink:
        found = writer.write(span, OnlyGrows(sink.descriptor) if only_grows else sink)
        assert held(sink) == whole
        assert found.written == Written(len(whole), zlib.crc32(whole))
        offsets = [0] if is_encoded else [1, 2 + len(one)]
        assert [part.offset for part in found.regions] == offsets
        for part in found.regions:
            checked(part, content)
        assert writer.is_so(ReadableFile(sink.descriptor), found.written)
        for place in (0, len(whole) // 2, len(whole) - 1):
            os.pwrite(sink.descriptor, bytes([whole[place] ^ 1]), place)
            assert not writer.is_so(ReadableFile(sink.descriptor), found.written)
            os.pwrite(sink.descriptor, whole[place : place + 1], place)
        for nbytes in (len(whole) - 1, len(whole) + 1):
            os.truncate(sink.descriptor, nbytes)
            assert not writer.is_so(ReadableFile(sink.descriptor), found.written)


def test_of_what_was_encoded_before_nothing_is_left() -> None:
    """Neither where a later region is shorter nor where no copy writes."""
    codec = Backwards()
    reader = FakeReader([b"abcdefgh"])
    window = Window(buffer(4), buffer(8), reader)
    for nbytes, rows in ((8, [(0, 0, 0, 8)]), (6, [(0, 1, 2, 2)]), (9, [(0, 0, 0, 3)])):
        region = Region(nbytes, copies_of(rows), trailer=Trailer(), codec=codec)
        with file_of() as sink:
            head_bytes = nbytes // 4
            assert window.write(Span(0, [region]), sink).written.nbytes == head_bytes + nbytes + 4
    assert codec.seen == [b"abcd", b"efgh", b"\0\0bc\0\0", b"abc\0", bytes(5)]


@given(regions(4), st.integers(2, 40), st.integers(4, 40))
def test_a_cast_goes_through_any_window_and_scratch(
    drawn: Drawn, window: int, scratch: int
) -> None:
    contents, rows, nbytes = drawn
    halved = [(file, at, to // 2, count) for file, at, to, count in rows]
    reader = FakeReader(contents)
    region = Region(
        nbytes // 2,
        copies_of(halved),
        source_itemsize=4,
        target_itemsize=2,
        cast=cast_between("float32", "bfloat16"),
    )
    data = written(Span(0, [region]), reader, window, scratch)
    assert data == cast_whole(expected(contents, rows, nbytes))
    assert all(count <= scratch and count % 4 == 0 for _, _, count in reader.calls)


def cast_whole(source: bytes) -> bytes:
    cast = cast_between("float32", "bfloat16")
    assert cast is not None
    target = bytearray(len(source) // 2)
    cast(memoryview(source), memoryview(target))
    return bytes(target)


@pytest.mark.parametrize("around", [b"", b"x"])
def test_windows_of_zeros_become_holes_that_read_as_zeros(around: bytes) -> None:
    nbytes, window = 8 << 20, 1 << 20
    reader = FakeReader([around])
    copies = copies_of([(0, 0, at, len(around)) for at in (0, nbytes - 1) if around])
    region = Region(nbytes, copies)
    with file_of() as sink:
        found = Window(buffer(window), buffer(8), reader).write(Span(0, [region]), sink)
        data, allocated = held(sink), os.fstat(sink.descriptor).st_blocks * 512
    assert found.written == Written(nbytes, zlib.crc32(data))
    assert data == around + bytes(nbytes - 2 * len(around)) + around
    assert found.regions[0].content.crc32 == zlib.crc32(data)
    assert allocated <= 2 * window


# Regions of many short copies, read together -----------------------------------------------------


FILE_BYTES = 1 << 15


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[SourceFile, ...]:
    place = tmp_path_factory.mktemp("files")
    found = []
    for number in range(2):
        path: Path = place / str(number)
        path.write_bytes(np.random.default_rng(number).bytes(FILE_BYTES))
        found.append(identify(path))
    return tuple(found)


@st.composite
def boxes(draw: st.DrawFn) -> list[Row]:
    """Draw copies in order of target: boxes, gaps, odd ones."""
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


def wanted(rows: list[Row], files: tuple[SourceFile, ...]) -> bytes:
    """Make the copies one by one."""
    return expected([file.path.read_bytes() for file in files], rows, rows[-1][2] + rows[-1][3])


def filled(region: Region, files: tuple[SourceFile, ...], step: int, scratch: int) -> bytes:
    """Fill a region in portions of equal size; every buffer is full of other bytes at first."""
    reader, made = SourceReader(files), b""
    filler = RegionFiller(region, reader, memoryview(bytearray(scratch)))
    for start in range(0, region.content_bytes, step):
        view = memoryview(bytearray(b"\xee" * min(step, region.content_bytes - start)))
        filler.fill(view)
        made += bytes(view)
    reader.close()
    return made


@given(boxes(), st.integers(1, 5000).map(lambda n: 4 * n), st.sampled_from([0, 64, 4096]))
def test_portions_of_any_size_hold_the_right_bytes(
    files: tuple[SourceFile, ...], rows: list[Row], step: int, scratch: int
) -> None:
    content = wanted(rows, files)
    region = Region(len(content), copies_of(rows))
    assert filled(region, files, step, scratch) == content


@given(boxes(), st.integers(1, 5000).map(lambda n: 8 * n))
def test_casts_are_made_of_what_was_put_together(
    files: tuple[SourceFile, ...], rows: list[Row], step: int
) -> None:
    narrow = wanted(rows, files)
    wide = np.frombuffer(narrow, "<u2").astype("<u4") << 16  # bf16 is the front of a float32
    region = Region(
        2 * len(narrow),
        copies_of([(file, source, 2 * target, nbytes) for file, source, target, nbytes in rows]),
        source_itemsize=2,
        target_itemsize=4,
        cast=cast_between("bfloat16", "float32"),
    )
    assert filled(region, files, step, 4096) == wide.tobytes()
