"""Streaming through small windows against filling a region byte by byte."""

import os
import tempfile
import zlib
from collections.abc import Sequence

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamshard.engine.journals.journal import Written
from streamshard.engine.numeric.cast import cast_between
from streamshard.engine.run.region import RegionFiller
from streamshard.engine.run.window import Window, unwritten_bytes
from streamshard.engine.run.work import Fixed, Region, RegionResult, Span, Trailer
from streamshard.io.sink import LocalSink
from streamshard.model import Digest
from tests.engine.fakes import FakeReader, Row, copies_of, expected, regions

Drawn = tuple[list[bytes], list[Row], int]


def buffer(nbytes: int) -> memoryview:
    """Make a buffer full of what must not be seen in any file."""
    return memoryview(bytearray(b"\xdd" * nbytes))


def written(span: Span, reader: FakeReader, window: int, scratch: int = 8) -> bytes:
    """Write a span into an empty file and return what the file holds then."""
    with tempfile.TemporaryFile() as stream:
        found = Window(buffer(window), buffer(scratch), reader).write(
            span, LocalSink(stream.fileno())
        )
        data = os.pread(stream.fileno(), 1 << 20, 0)
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


@given(st.sampled_from([2, 4, 8]), st.integers(0, 30), st.data())
def test_windows_never_split_an_element(itemsize: int, extra: int, data: st.DataObject) -> None:
    contents, rows, nbytes = data.draw(regions(itemsize))
    reader = FakeReader(contents)
    region = Region(
        nbytes, copies_of(rows), source_itemsize=itemsize, target_itemsize=itemsize
    )  # fmt: skip
    # The odd byte in front leaves a room that no whole element fills.
    span = Span(0, [Fixed(b"#"), region])
    assert written(span, reader, itemsize + extra) == b"#" + expected(contents, rows, nbytes)
    assert all(count % itemsize == 0 for _, _, count in reader.calls)


@given(st.lists(st.one_of(st.binary(max_size=40), regions()), max_size=5), st.integers(1, 30))
def test_parts_follow_each_other_at_the_offset(drawn: Sequence[bytes | Drawn], window: int) -> None:
    parts: list[Fixed | Region] = []
    contents: list[bytes] = []
    wanted = b""
    for part in drawn:
        if isinstance(part, bytes):
            parts.append(Fixed(part))
            wanted += part
            continue
        sources, rows, nbytes = part
        shifted = [(file + len(contents), *rest) for file, *rest in rows]
        contents += sources
        rows = [(a, b, c, d) for a, b, c, d in shifted]
        parts.append(Region(nbytes, copies_of(rows)))
        wanted += expected(contents, rows, nbytes)
    with tempfile.TemporaryFile() as stream:
        stream.write(b"?" * (17 + len(wanted) + 3))
        stream.flush()
        writer = Window(buffer(window), buffer(8), FakeReader(contents))
        assert writer.write(Span(17, parts), LocalSink(stream.fileno())).written.nbytes == len(
            wanted
        )
        stream.seek(0)
        assert stream.read() == b"?" * 17 + wanted + b"?" * 3
    assert sum(part.nbytes for part in parts) == len(wanted)


class Backwards:
    """A codec that remembers what it encoded."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def encode(self, content: memoryview) -> bytes:
        """Turn the content round."""
        self.seen.append(bytes(content))
        return b"<" + bytes(content[::-1]) + b">"

    def decode(self, encoded: memoryview, content: memoryview) -> None:
        """Turn it round again."""
        for at in range(len(content)):
            content[at] = encoded[-2 - at]


def checked(found: RegionResult, content: bytes, overflowed: int = 0) -> None:
    """Compare a result with checksums of the whole content."""
    assert found.content == Digest(len(content), zlib.crc32(content), google_crc32c.value(content))
    blocks = [content[at : at + 7] for at in range(0, len(content), 7)]
    assert found.blocks == tuple(map(zlib.crc32, blocks))
    assert found.overflowed == overflowed


@given(regions(), st.integers(1, 30), st.booleans(), st.booleans())
def test_what_is_recalled_is_known_as_if_it_were_written(
    drawn: Drawn, window: int, is_encoded: bool, is_crc32c: bool
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
    stored = b"<" + content[::-1] + b">" if is_encoded else content
    crc32 = google_crc32c.value(stored) if is_crc32c else zlib.crc32(stored)
    one = stored + crc32.to_bytes(4, "little")
    whole = one if is_encoded else b"#" + one + b"!" + one
    writer = Window(buffer(window), buffer(8), FakeReader(contents))
    with tempfile.TemporaryFile() as stream:
        found = writer.write(span, LocalSink(stream.fileno()))
        assert os.pread(stream.fileno(), 1 << 20, 0) == whole
        assert found.written == Written(len(whole), zlib.crc32(whole))
        offsets = [0] if is_encoded else [1, 2 + len(one)]
        assert [part.offset for part in found.regions] == offsets
        for part in found.regions:
            checked(part, content)
        assert writer.recall(span, LocalSink(stream.fileno()), found.written) == found
        for place in (0, len(whole) // 2, len(whole) - 1):
            os.pwrite(stream.fileno(), bytes([whole[place] ^ 1]), place)
            assert writer.recall(span, LocalSink(stream.fileno()), found.written) is None
            os.pwrite(stream.fileno(), whole[place : place + 1], place)
        os.truncate(stream.fileno(), len(whole) - 1)
        assert writer.recall(span, LocalSink(stream.fileno()), found.written) is None


@pytest.mark.parametrize("number", [1.0, 1e30, float("inf")])
def test_overflow_is_counted_or_the_span_is_written_again(number: float) -> None:
    numbers = np.array([0.5, number, -3.0, number], dtype=np.float32)
    region = Region(
        8,
        copies_of([(0, 0, 0, 16)]),
        source_itemsize=4,
        target_itemsize=2,
        cast=cast_between("float32", "float16"),
        counts_overflow=True,
    )
    writer = Window(buffer(16), buffer(8), FakeReader([numbers.tobytes()]))
    with tempfile.TemporaryFile() as stream:
        found = writer.write(Span(0, [region]), LocalSink(stream.fileno()))
        assert found.regions[0].overflowed == (2 if number == 1e30 else 0)
        # Of an infinite element, the file does not tell whether it was finite in the source.
        again = writer.recall(Span(0, [region]), LocalSink(stream.fileno()), found.written)
        assert again == (found if number == 1.0 else None)
        os.truncate(stream.fileno(), 5)
        assert writer.recall(Span(0, [region]), LocalSink(stream.fileno()), found.written) is None


@given(regions(), st.integers(1, 30))
def test_an_encoded_region_is_handed_over_whole(drawn: Drawn, window: int) -> None:
    contents, rows, nbytes = drawn
    codec = Backwards()
    region = Region(nbytes, copies_of(rows), codec=codec)
    content = expected(contents, rows, nbytes)
    data = written(Span(0, [region]), FakeReader(contents), window)
    assert data == b"<" + content[::-1] + b">"
    assert codec.seen == [content]


def test_of_what_was_encoded_before_nothing_is_left() -> None:
    """Neither where a later region is shorter nor where no copy writes."""
    codec = Backwards()
    reader = FakeReader([b"abcdefgh"])
    window = Window(buffer(4), buffer(8), reader)
    for nbytes, rows in ((8, [(0, 0, 0, 8)]), (6, [(0, 1, 2, 2)]), (9, [(0, 0, 0, 3)])):
        region = Region(nbytes, copies_of(rows), trailer=Trailer(), codec=codec)
        with tempfile.TemporaryFile() as stream:
            found = window.write(Span(0, [region]), LocalSink(stream.fileno()))
            assert found.written.nbytes == nbytes + 2 + 4
    assert codec.seen == [b"abcdefgh", b"\0\0bc\0\0", b"abc" + bytes(6)]


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
    """Cast in one go."""
    cast = cast_between("float32", "bfloat16")
    assert cast is not None
    target = bytearray(len(source) // 2)
    cast(memoryview(source), memoryview(target))
    return bytes(target)


@given(regions(), st.lists(st.integers(1, 40), min_size=1))
def test_portions_of_any_size_make_the_region(drawn: Drawn, portions: list[int]) -> None:
    contents, rows, nbytes = drawn
    filler = RegionFiller(Region(nbytes, copies_of(rows)), FakeReader(contents), buffer(8))
    found = b""
    while len(found) < nbytes:
        view = buffer(min(portions[len(found) % len(portions)], nbytes - len(found)))
        filler.fill(view)
        found += bytes(view)
    assert found == expected(contents, rows, nbytes)


def test_the_disk_may_be_further_behind_where_there_is_memory() -> None:
    allowed = [unwritten_bytes(mib << 20) >> 20 for mib in (96, 512, 4096, 1 << 20)]
    assert allowed == sorted(allowed)
    assert allowed[0] < 96 / 4
    assert allowed[-1] <= 256


@pytest.mark.parametrize("window", [1, 7, 100])
def test_a_region_without_copies_is_zeros(window: int) -> None:
    region = Region(33, copies_of([]))
    assert written(Span(0, [region]), FakeReader([]), window) == bytes(33)
    assert written(Span(0, []), FakeReader([]), window) == b""


@pytest.mark.parametrize("around", [b"", b"x"])
def test_windows_of_zeros_become_holes_that_read_as_zeros(around: bytes) -> None:
    nbytes, window = 8 << 20, 1 << 20
    reader = FakeReader([around])
    copies = copies_of([(0, 0, at, len(around)) for at in (0, nbytes - 1) if around])
    region = Region(nbytes, copies)
    with tempfile.TemporaryFile() as stream:
        found = Window(buffer(window), buffer(8), reader).write(
            Span(0, [region]), LocalSink(stream.fileno())
        )
        data = os.pread(stream.fileno(), nbytes + 1, 0)
        allocated = os.fstat(stream.fileno()).st_blocks * 512
    assert found.written == Written(nbytes, zlib.crc32(data))
    assert data == around + bytes(nbytes - 2 * len(around)) + around
    assert found.regions[0].content.crc32 == zlib.crc32(data)
    assert allocated <= 2 * window


def test_zeros_are_written_over_what_was_there() -> None:
    nbytes, window = 20_000, 5000
    with tempfile.TemporaryFile() as stream:
        stream.write(b"?" * nbytes)
        stream.flush()
        writer = Window(buffer(window), buffer(8), FakeReader([]))
        span = Span(0, [Region(nbytes, copies_of([]))])
        writer.write(span, LocalSink(stream.fileno()), is_new=False)
        assert os.pread(stream.fileno(), nbytes + 1, 0) == bytes(nbytes)


def test_a_window_is_used_again_for_the_next_span() -> None:
    reader = FakeReader([bytes(range(1, 65))])
    window = Window(buffer(16), buffer(8), reader)
    for offset in (0, 5):
        with tempfile.TemporaryFile() as stream:
            region = Region(20, copies_of([(0, 3, 1, 10)]))
            assert (
                window.write(Span(offset, [region]), LocalSink(stream.fileno())).written.nbytes
                == 20
            )
            data = os.pread(stream.fileno(), 100, 0)
        assert data == bytes(offset) + b"\0" + bytes(range(4, 14)) + bytes(9)
        assert np.frombuffer(data, np.uint8).sum() == sum(range(4, 14))
