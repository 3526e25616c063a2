"""Running checksums over any split against one call over all bytes."""

import zlib
from itertools import pairwise

import google_crc32c
from hypothesis import given
from hypothesis import strategies as st

from streamshard.engine.numeric.checksums import RunningChecksums, crc32, crc32c, join_crc32
from streamshard.model import Digest

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


@given(DATA, DATA)
def test_of_bytes_that_follow_others(before: bytes, after: bytes) -> None:
    assert crc32(after, crc32(before)) == zlib.crc32(before + after)
    assert crc32c(after, crc32c(before)) == google_crc32c.value(before + after)
    assert join_crc32(crc32(before), crc32(after), len(after)) == zlib.crc32(before + after)


def test_known_answers() -> None:
    assert crc32(b"123456789") == 0xCBF43926
    assert crc32c(b"123456789") == 0xE3069283
