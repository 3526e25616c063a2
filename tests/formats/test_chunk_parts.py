"""Chunks are compressed and decompressed in pieces, and a part without the rest of it."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numcodecs.blosc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isal import isal_zlib

from streamshard.checksums import crc32c
from streamshard.errors import IntegrityError
from streamshard.formats.zarr.blosc_frame import PIECE_BYTES
from streamshard.formats.zarr.chunks import (
    BloscCodec,
    EncodedChunk,
    most_encoded_bytes,
    serialize_checksum,
)

BLOCK = 512 << 10
"""Bytes in a block of a chunk with zstd."""
NUMELS = [1, 1000, BLOCK // 4, 3 * BLOCK // 4, 3 * BLOCK // 4 + 5, 5 * BLOCK // 4 - 1]


class InMemory:
    takes_requests = False

    def __init__(self, data: bytes) -> None:
        self.data = data

    def will_need(self, offset: int, nbytes: int) -> None:
        pass

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


def chunk(content: bytes, encoded: bytes | None = None) -> tuple[EncodedChunk, bytes]:
    blosc = BloscCodec(4)
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
@settings(max_examples=30)
@given(st.sampled_from(NUMELS), st.data())
def test_any_part(is_noise: bool, numel: int, data: st.DataObject) -> None:
    content = floats(numel, is_noise=is_noise)
    start = data.draw(st.integers(0, len(content) - 1))
    stop = data.draw(st.integers(start + 1, len(content)))
    made, stored = chunk(content)
    for part in ((start, stop), None):
        first, found = decode(made, stored, part)
        wanted = part or (0, len(content))
        assert (first, bytes(found)) == (wanted[0], content[wanted[0] : wanted[1]])


def mixed(numel: int, noise: Sequence[int]) -> bytes:
    """Return floats of which some stretches, of a piece in length, do not become smaller."""
    content = bytearray(floats(numel, is_noise=False))
    for number in noise:
        there = slice(number * PIECE_BYTES + 12, (number + 1) * PIECE_BYTES + 12)
        content[there] = np.random.default_rng(number).bytes(len(content[there]))
    return bytes(content)


def encoded_in_pieces(content: bytes, itemsize: int = 4) -> bytes:
    blosc, pieces, at = BloscCodec(itemsize), list[bytes](), 0
    encoder = blosc.encoder(len(content))
    while at < len(content):
        left = len(content) - at
        nbytes = left if left < 2 * PIECE_BYTES else PIECE_BYTES
        pieces.append(bytes(encoder.add(memoryview(content)[at : at + nbytes])))
        assert len(encoder.head) + sum(map(len, pieces)) <= most_encoded_bytes(len(content))
        at += nbytes
    return encoder.head + b"".join(pieces)


@pytest.mark.parametrize(
    ("itemsize", "nbytes", "noise"),
    [
        (4, 8, ()),
        (1, 1 << 20, range(5)),
        (8, (2 << 20) - 8, (1,)),
        (2, (3 << 20) + 4096, (0, 2)),
        (4, (3 << 20) + 4096, range(5)),
        (4, (4 << 20) + 8, ()),
        (2, (4 << 20) + 8, (1,)),
    ],
)
def test_pieces_make_the_same_bytes(itemsize: int, nbytes: int, noise: Sequence[int]) -> None:
    content = mixed(nbytes // 4, noise)
    # Blosc's own threads, which it takes in the main thread alone, put blocks in any order.
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(encoded_in_pieces, content, itemsize).result()
        blosc = BloscCodec(itemsize)
        whole = pool.submit(blosc.encode, memoryview(content)).result()
    out = bytearray(len(content))
    blosc.decode(memoryview(made), memoryview(out))
    assert out == content
    is_raw = whole[2] & 2 and nbytes >= 2 * PIECE_BYTES  # then pieces hold raw blocks
    assert made == whole or is_raw


@pytest.mark.parametrize(
    ("noise", "in_pieces"), [((), False), ((0, 2), True), (range(5), True)], ids=str
)
def test_blocks_may_lie_in_any_order(noise: Sequence[int], in_pieces: bool) -> None:
    content = mixed((9 << 20) // 8 + 1, noise)
    blosc, threads = BloscCodec(4), numcodecs.blosc.set_nthreads(4)
    try:
        whole = blosc.encode(memoryview(content))
        encoded = encoded_in_pieces(content) if in_pieces else whole
    finally:
        numcodecs.blosc.set_nthreads(threads)
    made, stored = chunk(content, encoded)
    assert bytes(decode(made, stored, None)[1]) == content
    assert bytes(decode(made, stored, (7, 3 << 20))[1]) == content[7 : 3 << 20]


@pytest.mark.parametrize(
    ("place", "part"),
    [(0, None), (9, (0, 8)), (40, ((3 << 20) - 8, 3 << 20)), (1 << 19, (0, 8)), (-1, None)],
)
def test_damage_anywhere_is_told_whatever_is_wanted(
    place: int, part: tuple[int, int] | None
) -> None:
    made, stored = chunk(floats(3 << 18, is_noise=False))
    damaged = bytearray(stored)
    damaged[place] ^= 0x40
    with pytest.raises(IntegrityError, match="chunk: damaged: its bytes are not those in the"):
        decode(made, bytes(damaged), part)
    for other in (stored[:-1], stored + b"!", stored[: len(stored) // 2], b""):
        with pytest.raises(IntegrityError, match=f"{len(other)} bytes where {len(stored)} were"):
            decode(made, other, part)


def test_another_checksum_at_the_end() -> None:
    content = floats(1000, is_noise=False)
    stored = chunk(content)[1][:-4] + b"\1\2\3\4"
    made = EncodedChunk(
        Path("chunk"), BloscCodec(4), stored_bytes=len(stored),
        stored_crc32=isal_zlib.crc32(stored), content_bytes=len(content),
    )  # fmt: skip
    with pytest.raises(IntegrityError, match="do not match the checksum at its end"):
        decode(made, stored, None)


@pytest.mark.parametrize("block", [1, 16, 4096])
def test_blocks_that_are_not_listed(block: int) -> None:
    content = floats(3 * BLOCK // 4, is_noise=False)
    encoded = bytearray(BloscCodec(4).encode(memoryview(content)))
    encoded[8:12] = block.to_bytes(4, "little")
    made, stored = chunk(content, bytes(encoded[:64]))
    with pytest.raises(IntegrityError, match="chunk: lists fewer than"):
        decode(made, stored, (len(content) - 10, len(content)))


@pytest.mark.parametrize("nbytes", [0, 3, 15, 16, 100])
def test_blosc_gets_no_frame_that_ends_before_it_says(nbytes: int) -> None:
    """It would read past the end."""
    content, codec = floats(1000, is_noise=True), BloscCodec(4)
    frame = memoryview(codec.encode(memoryview(content)))[:nbytes]
    with pytest.raises(IntegrityError, match=r"says it decodes to|ends after"):
        codec.decode(frame, memoryview(bytearray(len(content))))
