"""Checksums, digests and hashes of pieces, against one call of the library's over all bytes."""

import hashlib
import zlib
from itertools import pairwise
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamshard import checksums
from streamshard.checksums import RunningChecksums, crc32c
from streamshard.engine.numeric import digests
from streamshard.engine.scan.probe import FileHashes
from streamshard.model import Digest, SourceFile

DATA = st.binary(max_size=200)
CUTS = st.lists(st.integers(0, 30), max_size=8).map(sorted)


def split(data: bytes, cuts: list[int]) -> list[memoryview]:
    """Cut bytes into parts, empty ones among them."""
    ends = [0, *(min(cut, len(data)) for cut in cuts), len(data)]
    return [memoryview(data)[a:b] for a, b in pairwise(ends)]


@given(DATA, CUTS, st.integers(0, 9), st.booleans())
def test_any_split(data: bytes, cuts: list[int], block_bytes: int, takes_crc32c: bool) -> None:
    running = RunningChecksums(takes_crc32c=takes_crc32c, block_bytes=block_bytes)
    for part in split(data, cuts):
        running.update(part)
    wanted = google_crc32c.value(data) if takes_crc32c else 0
    assert running.digest == Digest(len(data), zlib.crc32(data), wanted)
    starts = range(0, len(data) if block_bytes else 0, block_bytes or 1)
    assert running.blocks == [zlib.crc32(data[at : at + block_bytes]) for at in starts]


@pytest.mark.parametrize("most_bytes", [1 << 16, 100_001, 1 << 30])
def test_more_than_the_library_takes_at_once(
    monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    monkeypatch.setattr(checksums, "_MOST_BYTES", most_bytes)
    data = np.random.default_rng(0).bytes(300_000)
    assert crc32c(data, 0xDEADBEEF) == google_crc32c.extend(0xDEADBEEF, data)


def test_the_fast_library_is_there() -> None:
    assert checksums._extend is not None


def test_without_the_fast_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "_extend", None)
    data = np.random.default_rng(0).bytes(100_000)
    assert crc32c(data, 7) == google_crc32c.extend(7, data)


LONG = st.sampled_from([0, 1, 7, 8, 1 << 20, (1 << 20) + 1, 5_000_003])


def direct(data: bytes) -> Digest:
    return Digest(len(data), zlib.crc32(data), google_crc32c.value(data))


@given(DATA, DATA, LONG)
def test_far_apart(before: bytes, after: bytes, gap: int) -> None:
    zeros = bytes(gap)
    pieces = direct(before), direct(zeros), direct(after)
    assert digests.joined(pieces) == direct(before + zeros + after)


@given(DATA, LONG)
def test_zeros_at_the_end_can_be_taken_away(data: bytes, zeros: int) -> None:
    assert digests.without_zeros(direct(data + bytes(zeros)), zeros) == direct(data)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=12))
def test_ranges_in_any_order_have_the_file_s_hash_or_none(ranges: list[tuple[int, int]]) -> None:
    data = memoryview(b"abcdef")
    hashes = FileHashes([SourceFile(Path("file"), len(data), "", "")])
    for start, count in [*ranges, (0, 2), (2, 3), (5, 1)]:
        assert set(hashes.take().values()) <= {hashlib.sha256(data).hexdigest()}
        hashes.add(0, start, data[start : start + count])
    assert hashes.take() == {0: hashlib.sha256(data).hexdigest()}
