"""Pickles that no checkpoint needs: refused quickly, by one error, in little memory."""

import pickletools
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streamshard.errors import CorruptFileError, UnsupportedError
from streamshard.formats.pickle import inert_dump, inert_load
from streamshard.formats.pickle.opcode_arguments import EndedTooEarlyError
from tests.formats.graphs import graphs, pickled

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
        pytest.param(b"}(NNNu.", id="key without value"),
        pytest.param(b"}]Ns.", id="key that is a list"),
        pytest.param(b"Na.", id="append to nothing"),
        pytest.param(b"NNa.", id="append to None"),
        pytest.param(b"NNNs.", id="item of None"),
        pytest.param(b"N(N\x90.", id="add to None"),
        pytest.param(b"]Nb.", id="state of a list"),
        pytest.param(b"cposix\nsystem\nNR.", id="call without a tuple"),
        pytest.param(b"cposix\nsystem\nN\x81.", id="new without a tuple"),
        pytest.param(b"K\x01K\x02\x93.", id="names that are numbers"),
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
        with pytest.raises((CorruptFileError, UnsupportedError)):
            load(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(graphs(), st.sampled_from(range(6)), st.data())
def test_truncated_anywhere(graph: object, protocol: int, data: st.DataObject) -> None:
    whole = pickled(graph, protocol)
    with pytest.raises(EndedTooEarlyError):
        load(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(st.binary(max_size=60))
@example(b"(ip\nq\n.")
def test_any_bytes_load_or_are_refused(data: bytes) -> None:
    try:
        node = load(data)
    except (CorruptFileError, UnsupportedError):
        return
    inert_dump.dump(node, lambda part: None)


@given(graphs(), st.data())
def test_any_changed_byte_loads_or_is_refused(graph: object, data: st.DataObject) -> None:
    changed = bytearray(pickled(graph, 2))
    changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        load(bytes(changed))
    except (CorruptFileError, UnsupportedError):
        return


def test_every_opcode_of_the_standard_library_is_known_or_refused() -> None:
    known = set(inert_load._OPCODES)
    refused = {opcode.name for opcode in pickletools.opcodes if opcode.code not in known}
    assert refused == {"STOP", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"}


@pytest.mark.parametrize(
    ("data", "value"),
    [
        pytest.param(b"V\xe9\\u0041\n.", "\xe9A", id="text of protocol 0"),
        pytest.param(b"S'a\\n'\n.", "a\n", id="string of Python 2"),
        pytest.param(b"Pkey\n.", "key", id="persistent id of protocol 0"),
        pytest.param(b"NK\x050.", None, id="pop"),
        pytest.param(b"N((K\x01K\x0211.", None, id="pop to mark"),
        pytest.param(b"I01\n.", True, id="truth of protocol 0"),
        pytest.param(b"I1\n.", 1, id="integer of protocol 0"),
        pytest.param(b"\x8a\x00.", 0, id="long of no bytes"),
        pytest.param(b"\x8a\x01\xff.", -1, id="negative long"),
    ],
)
def test_odd_but_whole_pickles_are_read(data: bytes, value: object) -> None:
    found = load(data)
    assert found == value
    assert type(found) is type(value)
