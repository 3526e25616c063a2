"""Running checksums over any split against one call over all bytes."""

import zlib
from itertools import pairwise

import google_crc32c
from hypothesis import given
from hypothesis import strategies as st

from streamshard.engine.numeric.checksums import BlockCrc32, ChunkChecksums, Crc32, Crc32c, crc32

DATA = st.binary(max_size=200)
CUTS = st.lists(st.integers(0, 200), max_size=8).map(sorted)


def split(data: bytes, cuts: list[int]) -> list[memoryview]:
    """Cut bytes into parts, empty ones among them."""
    ends = [0, *(min(cut, len(data)) for cut in cuts), len(data)]
    return [memoryview(data)[a:b] for a, b in pairwise(ends)]


@given(DATA, CUTS)
def test_crc32_and_crc32c_of_any_split(data: bytes, cuts: list[int]) -> None:
    plain, castagnoli = Crc32(), Crc32c()
    for part in split(data, cuts):
        plain.update(part)
        castagnoli.update(part)
    assert plain.value == zlib.crc32(data) == crc32(data)
    assert castagnoli.value == google_crc32c.value(data)


@given(DATA, CUTS, st.integers(1, 70))
def test_blocks_of_any_split(data: bytes, cuts: list[int], block_bytes: int) -> None:
    blocks, both = BlockCrc32(block_bytes), ChunkChecksums(block_bytes)
    for part in split(data, cuts):
        blocks.update(part)
        both.update(part)
    starts = range(0, len(data), block_bytes)
    wanted = [zlib.crc32(data[start : start + block_bytes]) for start in starts]
    assert blocks.values().tolist() == wanted
    assert both.blocks.values().tolist() == wanted
    assert both.crc32c.value == google_crc32c.value(data)


def test_known_answers() -> None:
    digits = memoryview(b"123456789")
    plain, castagnoli = Crc32(), Crc32c()
    plain.update(digits)
    castagnoli.update(digits)
    assert plain.value == 0xCBF43926
    assert castagnoli.value == 0xE3069283
