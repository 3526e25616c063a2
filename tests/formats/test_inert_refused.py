"""Pickles that no checkpoint needs, or made to take all memory: refused, or cheap."""

import pickletools
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from streamshard.errors import CorruptFileError, UnsupportedError
from streamshard.formats.pickle import inert_load
from tests.formats import bounded

HUGE = b"\xff" * 8


def load(data: bytes) -> object:
    return inert_load.load(data, lambda identifier: identifier)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x80\x02.", id="no value"),
        pytest.param(b"\x80\x02NN.", id="two values"),
        pytest.param(b"\x80\x06N.", id="protocol 6"),
        pytest.param(b"\x82\x01.", id="EXT1"),
        pytest.param(b"\x83\x01\x00.", id="EXT2"),
        pytest.param(b"\x84\x01\x00\x00\x00.", id="EXT4"),
        pytest.param(b"\x97.", id="NEXT_BUFFER"),
        pytest.param(b"N\x98.", id="READONLY_BUFFER"),
        pytest.param(b"\xff.", id="no opcode"),
        pytest.param(b"\x95" + HUGE + b"N.", id="huge frame"),
        pytest.param(b"X\xff\xff\xff\xffab.", id="huge text"),
        pytest.param(b"\x8d" + HUGE + b"ab.", id="huge text 8"),
        pytest.param(b"B\xff\xff\xff\xffab.", id="huge bytes"),
        pytest.param(b"\x8e" + HUGE + b"ab.", id="huge bytes 8"),
        pytest.param(b"\x96" + HUGE + b"ab.", id="huge bytearray"),
        pytest.param(b"T\xff\xff\xff\xffab.", id="huge string"),
        pytest.param(b"\x8b\xff\xff\xff\x7f\x01.", id="huge long"),
        pytest.param(b"\x8b\xff\xff\xff\xff\x01.", id="negative long"),
        pytest.param(b"L" + b"9" * 100_000 + b"L\n.", id="huge decimal"),
        pytest.param(b"t.", id="tuple without mark"),
        pytest.param(b"]Ne.", id="appends without mark"),
        pytest.param(b"}NNu.", id="setitems without mark"),
        pytest.param(b"1.", id="pop of no mark"),
        pytest.param(b"(.", id="a mark as result"),
        pytest.param(b"(\x85.", id="a mark in a tuple"),
        pytest.param(b"](a.", id="a mark in a list"),
        pytest.param(b"(q\x00.", id="a mark in the memo"),
        pytest.param(b"(2.", id="a mark twice"),
        pytest.param(b"h\x05.", id="memo that is not there"),
        pytest.param(b"Nq\x050h\x03.", id="memo that was passed over"),
        pytest.param(b"Nr\xff\xff\xff\xff.", id="the memo's last place"),
        pytest.param(b"Np99999999999999999999\n.", id="place in the memo that is written out"),
        pytest.param(b"Np0\n0g-1\n.", id="negative place in the memo"),
        pytest.param(b"}(NNNu.", id="key without value"),
        pytest.param(b"}]Ns.", id="key that is a list"),
        pytest.param(b"Na.", id="append to nothing"),
        pytest.param(b"NNa.", id="append to None"),
        pytest.param(b"NNNs.", id="item of None"),
        pytest.param(b"N(N\x90.", id="add to None"),
        pytest.param(b"cm\nC\n)\x81(N\x90.", id="add to an object"),
        pytest.param(b"]Nb.", id="state of a list"),
        pytest.param(b"cm\nC\n}b.", id="state of a class"),
        pytest.param(b"cm\nC\n)\x81}b}b.", id="state twice"),
        pytest.param(b"cposix\nsystem\nNR.", id="call without a tuple"),
        pytest.param(b"cposix\nsystem\nN\x81.", id="new without a tuple"),
        pytest.param(b"K\x01K\x02\x93.", id="names that are numbers"),
        pytest.param(b"\x8c\x01a\x8d\x03" + bytes(7) + b"\xed\xa0\x80\x93.", id="surrogate"),
        pytest.param(b"\x8c\x02a\n\x8c\x01b\x93.", id="module with a line in it"),
        pytest.param(b"\x8c\x01a\x8c\x02b\n\x93.", id="name with a line in it"),
        pytest.param(b"Sunquoted\n.", id="unquoted string"),
        pytest.param(b"S'\n.", id="half-quoted string"),
        pytest.param(b"S'\\x\n.", id="broken escape"),
        pytest.param(b"\x8c\x01\xff.", id="text that is not UTF-8"),
        pytest.param(b"Iabc\n.", id="integer that is none"),
        pytest.param(b"Fabc\n.", id="float that is none"),
        pytest.param(b"cposix\nsystem", id="name without an end"),
        pytest.param(b"0.", id="pop of nothing"),
        pytest.param(b"(o.", id="object of nothing"),
    ],
)
def test_refused(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((CorruptFileError, UnsupportedError)) as caught:
            load(data)
        assert len(str(caught.value)) < 200
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_every_opcode_of_the_standard_library_is_known_or_refused() -> None:
    known = set(inert_load._OPCODES)
    refused = {opcode.name for opcode in pickletools.opcodes if opcode.code not in known}
    assert refused == {"STOP", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"}


# In little time and memory ------------------------------------------------------------------------

MIB = 1 << 20
PER_BYTE = 100
"""Bytes of memory that a byte of pickle may take; an empty dict and its place take 72."""


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def get(index: int) -> bytes:
    return b"j" + struct.pack("<I", index)


def put(index: int) -> bytes:
    return b"r" + struct.pack("<I", index)


def doubled(times: int, make: bytes, start: bytes) -> bytes:
    """Make something of the last thing, twice, again and again."""
    return start + b"".join(put(n) + get(n) + make for n in range(times))


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
    "a huge integer": lambda: b"\x8b" + struct.pack("<I", 8 * MIB) + b"\x01" * 8 * MIB + b".",
    "a huge decimal": lambda: b"L" + b"7" * 8 * MIB + b"L\n.",
    "a huge decimal of protocol 0": lambda: b"I" + b"7" * 8 * MIB + b"\n.",
    "a name of a mebibyte": lambda: named_again(100_000),
    "dicts, and no end": lambda: b"}" * MIB,
    "marks, and no end": lambda: b"(" * MIB,
    "sets, and no end": lambda: b"\x8f" * (MIB // 4),
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
    "a huge float": lambda: b"F" + b"7" * 8 * MIB + b"\n.",
    "lists of lists twice": lambda: b"(]" + put(0) + b"".join(
        b"](" + get(n) + get(n) + b"e" + put(n + 1) for n in range(100)
    ) + b"l.",
    "dicts of dicts twice": lambda: b"(}" + put(0) + b"".join(
        b"}(K\x01" + get(n) + b"K\x02" + get(n) + b"u" + put(n + 1) for n in range(100)
    ) + b"l.",
    "objects of objects twice": lambda: b"(cm\nC\n" + put(0) + b"".join(
        get(0) + get(n) + get(n) + b"\x86\x81" + put(n + 1) for n in range(100)
    ) + b"l.",
    "one state for many": lambda: with_state_again(20_000),
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
    outcome = bounded.read(NESTED[name](200_000), tmp_path)
    assert (outcome.loaded, outcome.dumped) == ("loaded", "UnsupportedError")
    assert outcome.message == "training state is nested too deeply"
