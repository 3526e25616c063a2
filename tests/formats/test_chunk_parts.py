"""A part of a compressed chunk is decoded without the rest of it."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from isal import isal_zlib

from streamshard.engine.numeric.checksums import crc32c
from streamshard.errors import IntegrityError
from streamshard.formats.zarr.chunks import (
    BloscChunk,
    EncodedChunk,
    serialize_checksum,
)

BLOCK = 512 << 10
"""Bytes in a block of a chunk with zstd."""
NUMELS = [1, 1000, BLOCK // 4, 3 * BLOCK // 4, 3 * BLOCK // 4 + 5, 5 * BLOCK // 4 - 1]


class InMemory:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def read_into(self, view: memoryview, offset: int) -> int:
        found = self.data[offset : offset + len(view)]
        view[: len(found)] = found
        return len(found)


def floats(numel: int, *, is_noise: bool) -> bytes:
    """Return floats, or bytes that no codec makes smaller."""
    generator = np.random.default_rng(numel)
    if is_noise:
        return generator.bytes(4 * numel)
    return generator.normal(size=numel).astype("<f4").tobytes()


def chunk(content: bytes, codec: str, encoded: bytes | None = None) -> tuple[EncodedChunk, bytes]:
    blosc = BloscChunk(codec, 4)
    encoded = encoded or blosc.encode(memoryview(content))
    data = encoded + serialize_checksum(crc32c(encoded))
    made = EncodedChunk(
        Path("chunk"), blosc, stored_bytes=len(data), stored_crc32=isal_zlib.crc32(data),
        content_bytes=len(content),
    )  # fmt: skip
    return made, data


def decode(made: EncodedChunk, data: bytes, part: tuple[int, int] | None) -> tuple[int, memoryview]:
    memory = memoryview(bytearray(len(data) + 1))
    return made.decode(
        InMemory(data), lambda n: memory[:n], lambda n: memoryview(bytearray(n)), part
    )


@pytest.mark.parametrize("is_noise", [False, True])
@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@given(st.sampled_from(NUMELS), st.data())
def test_any_part(codec: str, is_noise: bool, numel: int, data: st.DataObject) -> None:
    content = floats(numel, is_noise=is_noise)
    start = data.draw(st.integers(0, len(content) - 1))
    stop = data.draw(st.integers(start + 1, len(content)))
    made, stored = chunk(content, codec)
    first, found = decode(made, stored, (start, stop))
    assert first <= start < stop <= first + len(found)
    assert found == content[first : first + len(found)]
    first, found = decode(made, stored, None)
    assert (first, bytes(found)) == (0, content)


def test_no_more_than_the_blocks_that_hold_it() -> None:
    content = floats(5 * BLOCK // 4 - 1, is_noise=False)
    made, stored = chunk(content, "zstd")
    for start, stop, blocks in ((0, 1, 1), (BLOCK - 1, BLOCK + 1, 2), (BLOCK, 2 * BLOCK, 1)):
        first, found = decode(made, stored, (start, stop))
        assert (first, len(found)) == (start // BLOCK * BLOCK, blocks * BLOCK)
    _, last = decode(made, stored, (len(content) - 1, len(content)))
    assert len(last) == 2 * BLOCK - 4


@pytest.mark.parametrize("block", [1, 16, 4096])
def test_blocks_that_are_not_listed(block: int) -> None:
    content = floats(3 * BLOCK // 4, is_noise=False)
    encoded = bytearray(BloscChunk("zstd", 4).encode(memoryview(content)))
    encoded[8:12] = block.to_bytes(4, "little")
    made, stored = chunk(content, "zstd", bytes(encoded[:64]))
    with pytest.raises(IntegrityError, match="chunk: lists fewer than"):
        decode(made, stored, (len(content) - 10, len(content)))
