"""Digests put together from pieces, against digests of the whole."""

import zlib

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamshard.engine.numeric import digests
from streamshard.engine.numeric.digests import CRC32, CRC32C, EMPTY
from streamshard.model import Digest
from tests.engine.test_checksums import CUTS, DATA, split

LONG = st.sampled_from([0, 1, 7, 8, 1 << 20, (1 << 20) + 1, 5_000_003])


def direct(data: bytes) -> Digest:
    """Take a digest with nothing of ours."""
    return Digest(len(data), zlib.crc32(data), google_crc32c.value(data))


@given(DATA, CUTS)
def test_any_pieces_make_the_digest_of_the_whole(data: bytes, cuts: list[int]) -> None:
    parts = split(data, cuts)
    assert digests.joined(direct(bytes(part)) for part in parts) == direct(data)


@given(DATA, DATA, LONG)
def test_far_apart(before: bytes, after: bytes, gap: int) -> None:
    zeros = bytes(gap)
    pieces = direct(before), direct(zeros), direct(after)
    assert digests.joined(pieces) == direct(before + zeros + after)


@given(st.lists(DATA, min_size=3, max_size=3))
def test_how_pieces_are_joined_first_does_not_matter(parts: list[bytes]) -> None:
    one, two, three = map(direct, parts)
    left = digests.joined([digests.joined([one, two]), three])
    right = digests.joined([one, digests.joined([two, three])])
    assert left == right


@given(DATA, LONG)
def test_zeros_at_the_end_can_be_taken_away(data: bytes, zeros: int) -> None:
    assert digests.without_zeros(direct(data + bytes(zeros)), zeros) == direct(data)


@pytest.mark.parametrize(("crc", "known"), [(CRC32, 0xCBF43926), (CRC32C, 0xE3069283)])
def test_known_answers(crc: digests.Crc, known: int) -> None:
    function = zlib.crc32 if crc is CRC32 else google_crc32c.value
    assert crc.joined(function(b"1234"), function(b"56789"), 5) == known


def test_a_digest_of_nothing_and_how_it_is_written() -> None:
    assert digests.joined([]) == EMPTY == direct(b"")
    assert EMPTY.text == "0" * 16
    assert direct(b"123456789").text == "cbf43926e3069283"
