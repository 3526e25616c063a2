"""Pickles made to take forever, or all there is: refused, or read in proportion to their size."""

import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from streamshard.errors import UnsupportedError
from streamshard.formats.pickle import inert_load
from tests.formats import bounded

MIB = 1 << 20
PER_BYTE = 100
"""Bytes of memory that a byte of pickle may take; an empty dict and its place take 72."""


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def get(index: int) -> bytes:
    return b"j" + struct.pack("<I", index)


def put(index: int) -> bytes:
    return b"r" + struct.pack("<I", index)


def doubled(times: int, make: bytes, start: bytes) -> bytes:
    """Make something of the last thing, twice, again and again."""
    return start + b"".join(put(n) + get(n) + make for n in range(times))


def colliding(count: int) -> bytes:
    """Spell a dict whose keys all have one hash."""
    modulus = (1 << 61) - 1
    return b"}(" + b"".join(number(n * modulus) + b"N" for n in range(count)) + b"u."


def colliding_one_by_one(count: int) -> bytes:
    modulus = (1 << 61) - 1
    return b"}" + b"".join(number(n * modulus) + b"Ns" for n in range(count)) + b"."


def with_state_again(count: int) -> bytes:
    """Give one large state to many objects."""
    state = b"}(" + b"".join(text(f"k{n}") + b"N" for n in range(count)) + b"u" + put(0) + b"0"
    name = b"ccollections\nOrderedDict\n" + put(1) + b"0"
    return state + name + b"(" + (get(1) + b")R" + get(0) + b"b") * count + b"l."


def named_again(count: int) -> bytes:
    """Look up one long name again and again."""
    return text("a" * MIB) + put(0) + b"0(" + (get(0) * 2 + b"\x93") * count + b"l."


def states_dropped(count: int) -> bytes:
    """Call something with many arguments again and again for what it may do to another object."""
    args = b"(" + b"]" * 10_000 + b"t" + put(0) + b"0"
    return args + b"cm\nf\n" + put(1) + (get(1) + get(0) + b"R0") * count + b"."


REFUSED: dict[str, Callable[[], bytes]] = {
    "tuples of tuples twice": lambda: doubled(200, b"\x86", b")") + b".",
    "as a key": lambda: b"}" + doubled(60, b"\x86", b"K\x01\x85") + b"Ns.",
    "as a key, of a few hundred parts": lambda: b"}" + doubled(10, b"\x86", b"K\x01\x85") + b"Ns.",
    "as a member": lambda: b"(" + doubled(60, b"\x86", b"K\x01\x85") + b"\x91.",
    "tuples in each other": lambda: b")" + b"\x85" * 4_000_000 + b".",
    "tuples in each other as a key": lambda: b"})" + b"\x85" * 4_000_000 + b"Ns.",
    "keys of one hash": lambda: colliding(300_000),
    "keys of one hash, one by one": lambda: colliding_one_by_one(300_000),
    "a huge integer": lambda: b"\x8b" + struct.pack("<I", 8 * MIB) + b"\x01" * 8 * MIB + b".",
    "a huge decimal": lambda: b"L" + b"7" * 8 * MIB + b"L\n.",
    "a huge decimal of protocol 0": lambda: b"I" + b"7" * 8 * MIB + b"\n.",
    "a huge float": lambda: b"F" + b"7" * 8 * MIB + b"\n.",
    "the memo's last place": lambda: b"Nr\xff\xff\xff\xff.",
    "a place in the memo that is written out": lambda: b"Np99999999999999999999\n.",
    "a negative place in the memo": lambda: b"Np0\n0g-1\n.",
    "a name of a mebibyte": lambda: named_again(100_000),
    "a name that is not text": lambda: (
        b"\x8c\x01a\x8d" + struct.pack("<Q", 3) + b"\xed\xa0\x80\x93."
    ),
    "a state twice": lambda: b"cm\nC\n)\x81}b}b.",
    "a class's state": lambda: b"cm\nC\n}b.",
    "members of what is not a set": lambda: b"cm\nC\n)\x81(N\x90.",
    "a frame past the end": lambda: b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",
    "text past the end": lambda: b"\x8d" + struct.pack("<Q", 1 << 62) + b"a.",
    "bytes past the end": lambda: b"\x8e" + struct.pack("<Q", 1 << 40) + b"a.",
    "an extension": lambda: b"\x82\x01.",
    "a buffer from elsewhere": lambda: b"\x97.",
    "dicts, and no end": lambda: b"}" * 8 * MIB,
    "marks, and no end": lambda: b"(" * 8 * MIB,
    "sets, and no end": lambda: b"\x8f" * 2 * MIB,
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_little_time_and_memory(name: str, tmp_path: Path) -> None:
    data = REFUSED[name]()
    outcome = bounded.read(data, tmp_path)
    assert outcome.loaded in ("CorruptFileError", "EndedTooEarlyError", "UnsupportedError")
    assert len(outcome.message) < 200
    per_byte = 3 * PER_BYTE if "sets" in name else PER_BYTE
    assert outcome.peak_bytes < per_byte * len(data) + 16 * MIB


CARRIED: dict[str, Callable[[], bytes]] = {
    "lists of lists twice": lambda: b"(]" + put(0) + b"".join(
        b"](" + get(n) + get(n) + b"e" + put(n + 1) for n in range(100)
    ) + b"l.",
    "dicts of dicts twice": lambda: b"(}" + put(0) + b"".join(
        b"}(K\x01" + get(n) + b"K\x02" + get(n) + b"u" + put(n + 1) for n in range(100)
    ) + b"l.",
    "objects of objects twice": lambda: b"(cm\nC\n" + put(0) + b"".join(
        get(0) + get(n) + get(n) + b"\x86\x81" + put(n + 1) for n in range(100)
    ) + b"l.",
    "a list in itself": lambda: b"]" + put(0) + get(0) + b"a.",
    "a dict in itself": lambda: b"}" + put(0) + b"K\x01" + get(0) + b"s.",
    "an object in itself": lambda: b"cm\nC\n)\x81" + put(0) + get(0) + b"b.",
    "one state for many": lambda: with_state_again(20_000),
    "many keys that nobody chose": lambda: pickle.dumps({n * 1000: n for n in range(200_000)}),
    "many keys of several kinds": lambda: pickle.dumps(
        {kind(n): n for n in range(30_000) for kind in (int, str, float, lambda n: (n, n))}
    ),
    "calls that are dropped": lambda: states_dropped(300_000),
    "gaps in the memo": lambda: b"(" + b"".join(
        b"N" + put(7 * n) + get(7 * n) for n in range(100_000)
    ) + b"l.",
}  # fmt: skip


@pytest.mark.parametrize("name", CARRIED)
def test_carried_in_little_time_and_memory(name: str, tmp_path: Path) -> None:
    data = CARRIED[name]()
    outcome = bounded.read(data, tmp_path)
    assert outcome.loaded == "loaded", outcome.message
    assert outcome.dumped == "dumped", outcome.message
    assert outcome.peak_bytes < PER_BYTE * len(data) + 16 * MIB


NESTED = {
    "lists": lambda depth: b"]" * depth + b"a" * (depth - 1) + b".",
    "dicts": lambda depth: b"}K\x01" * depth + b"N" + b"s" * depth + b".",
    "states": lambda depth: b"cm\nC\n" + put(0) + b"0" + (get(0) + b")\x81") * depth
    + b"N" + b"b" * depth + b".",
    "arguments": lambda depth: b"cm\nC\n" + put(0) + b"0" + get(0) * depth + b")"
    + b"R\x85" * depth + b".",
}  # fmt: skip


@pytest.mark.parametrize("name", NESTED)
def test_nested_as_deeply_as_can_be_it_is_let_go_of_without_a_crash(
    name: str, tmp_path: Path
) -> None:
    outcome = bounded.read(NESTED[name](500_000), tmp_path)
    assert (outcome.loaded, outcome.dumped) == ("loaded", "UnsupportedError")
    assert outcome.message == "training state is nested too deeply"


def test_the_count_of_opcodes_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inert_load, "LIMIT_OPCODES", 1000)
    inert_load.load(b"N" + b"N0" * 499 + b".", lambda identifier: identifier)
    with pytest.raises(UnsupportedError, match="more than 1,000 opcodes"):
        inert_load.load(b"N" + b"N0" * 500 + b".", lambda identifier: identifier)
