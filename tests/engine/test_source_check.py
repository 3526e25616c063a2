"""A record counts as checked if ranges were read that make all of it, in any order and number."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamshard.checksums import crc32
from streamshard.engine.run.source_check import Ranges, ReadLog, SourceCheck
from streamshard.errors import IntegrityError
from streamshard.model import RecordCrcs, SourceFile

RECORDS = ((10, 50), (60, 61), (64, 200))


def file_of(content: bytes, records: Sequence[tuple[int, int]] = RECORDS) -> SourceFile:
    starts, stops = np.array(records, dtype=np.int64).T
    crc32s = np.array([crc32(content[a:b]) for a, b in records], dtype=np.uint32)
    return SourceFile(Path("a"), len(content), "", "0", recorded=RecordCrcs(starts, stops, crc32s))


def ranges_of_all(file: SourceFile, content: bytes, pieces: Sequence[tuple[int, int]]) -> Ranges:
    log = ReadLog([file])
    for start, stop in pieces:
        log.add(0, start, memoryview(content)[start:stop])
    return log.take()


def ranges_of(content: bytes, pieces: Sequence[tuple[int, int]]) -> Ranges:
    return ranges_of_all(file_of(content), content, pieces)


@st.composite
def passes(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Draw pieces that cover every record once or more, each time cut elsewhere, in any order."""
    pieces = []
    for start, stop in RECORDS:
        for _ in range(draw(st.integers(1, 3))):
            inner = st.integers(start, stop)
            cuts = sorted({start, stop, *draw(st.lists(inner, max_size=5))})
            pieces += list(pairwise(cuts))
    return list(draw(st.permutations(pieces)))


@given(st.binary(min_size=200, max_size=200), passes(), st.integers(1, 9))
def test_whole_records_need_nothing_more(
    content: bytes, pieces: list[tuple[int, int]], jobs: int
) -> None:
    check = SourceCheck([file_of(content)])
    for some in np.array_split(np.array(pieces), jobs):
        check.add(ranges_of(content, [(a, b) for a, b in some.tolist()]))
    assert check.settle(lambda ranges: check.add(ranges_of(content, _pieces(ranges)))) == []


@given(st.binary(min_size=200, max_size=200), passes(), st.data())
def test_a_flipped_bit_of_any_record_is_noticed(
    content: bytes, pieces: list[tuple[int, int]], data: st.DataObject
) -> None:
    start, stop = data.draw(st.sampled_from(RECORDS))
    damaged = bytearray(content)
    damaged[data.draw(st.integers(start, stop - 1))] ^= 1 << data.draw(st.integers(0, 7))
    check = SourceCheck([file_of(content)])
    check.add(ranges_of(bytes(damaged), pieces))
    with pytest.raises(IntegrityError, match=f"{stop - start} bytes of record at byte {start}"):
        check.settle(lambda ranges: check.add(ranges_of(bytes(damaged), _pieces(ranges))))


def test_what_is_missing_is_read_if_it_is_little() -> None:
    """It is read where 100 times as much was; else its file is named."""
    content = bytes(300_000_000)
    file, step = file_of(content, [(0, 200_000_000), (200_000_000, 300_000_000)]), 100_000_000
    for start, read in ((2_000_000, 2), (30_000_000, 0)):
        check, wanted = SourceCheck([file]), list[tuple[int, int]]()

        def read_rest(ranges: Ranges, wanted: list[tuple[int, int]] = wanted) -> None:
            wanted += _pieces(ranges)

        check.add(
            ranges_of_all(
                file, content, [(start // 2, 2 * step), (2 * step + start // 2, 3 * step)]
            )
        )
        left = check.settle(read_rest)
        assert left == [file]  # nothing was read after all
        assert wanted == [(0, start // 2), (2 * step, 2 * step + start // 2)][:read]


def test_a_record_in_very_many_ranges_is_read_again() -> None:
    """Ranges of rows that never meet would take memory for each of them."""
    content = bytes(1 << 20)
    file = file_of(content, [(0, 1 << 20)])
    check, wanted = SourceCheck([file]), list[tuple[int, int]]()
    for at in range(0, 1 << 20, 1 << 12):
        rows = [(start, start + 8) for start in range(at, at + (1 << 12), 16)]
        check.add(ranges_of_all(file, content, rows))
    assert check._apart.nbytes < 1 << 20

    def read_rest(ranges: Ranges) -> None:
        wanted.extend(_pieces(ranges))
        check.add(ranges_of_all(file, content, _pieces(ranges)))

    assert check.settle(read_rest) == []
    assert wanted == [(0, 1 << 20)]


def _pieces(ranges: Ranges) -> list[tuple[int, int]]:
    return [(start, stop) for _, start, stop, _ in ranges.tolist()]
