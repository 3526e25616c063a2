"""Pickles read and written without running them, held against the standard library's own."""

import io
import pickle
import pickletools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamshard.errors import UnsupportedError
from streamshard.formats.pickle import inert_dump, inert_load
from streamshard.formats.pickle.inert_load import EndedTooEarlyError
from tests.formats.graphs import PLAIN, Point, Record, graphs, pickled, same

PROTOCOLS = range(6)


def no_storage(identifier: object) -> object:
    raise AssertionError(identifier)


def load(data: bytes) -> Any:  # noqa: ANN401
    return inert_load.load(data, no_storage)


def dump(node: object) -> bytes:
    return inert_dump.dump(node, lambda part: None)


@settings(max_examples=200)
@given(graphs(), st.sampled_from(PROTOCOLS))
def test_what_is_carried_unpickles_to_the_same(graph: object, protocol: int) -> None:
    data = pickled(graph, protocol)
    carried = dump(load(data))
    assert same(pickle.loads(carried), pickle.loads(data))
    # Written by protocol 2 alone, and the same when it is carried once more.
    assert all(opcode.proto <= 2 for opcode, _, _ in pickletools.genops(carried))
    assert dump(load(carried)) == carried


@settings(max_examples=150)
@given(graphs(), st.sampled_from(PROTOCOLS))
def test_a_copy_from_another_process_is_written_as_the_same_bytes(
    graph: object, protocol: int
) -> None:
    node = load(pickled(graph, protocol))
    assert dump(pickle.loads(pickle.dumps(node))) == dump(node)


@settings(max_examples=150)
@given(graphs(PLAIN))
def test_bytes_are_those_of_the_standard_pickler(graph: object) -> None:
    data = pickle.dumps(graph, protocol=2)
    ours = dump(load(data))
    if sys.version_info >= (3, 13):  # which numbers in the memo what nothing takes from there
        data, ours = pickletools.optimize(data), pickletools.optimize(ours)
    assert ours == data


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_random_generators_are_carried(protocol: int) -> None:
    made = np.random.default_rng(7), np.random.RandomState(3)
    found = pickle.loads(dump(load(pickle.dumps(made, protocol=protocol))))
    assert found[0].integers(1 << 60) == made[0].integers(1 << 60)
    assert found[1].randint(1 << 30) == made[1].randint(1 << 30)


def rings() -> dict[str, object]:
    record, pair = Record(None), Point([], 1)
    in_tuple = (record,)
    record.value, record.other = {"self": record, "tuple": in_tuple}, [in_tuple]
    pair.x.append(pair)
    return {"everything": in_tuple, "a list that a call is given": pair, "that list": pair.x}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("through", rings())
def test_a_ring_is_carried(through: str, protocol: int) -> None:
    if protocol < 2 and through != "everything":
        return  # the standard pickler gets lost in it
    data = pickle.dumps(rings()[through], protocol=protocol)
    carried = dump(load(data))
    assert same(pickle.loads(carried), pickle.loads(data))
    assert protocol != 2 or carried == data
    assert dump(load(carried)) == carried


class Hashed(Record):
    """A record that can be in a set."""

    def __hash__(self) -> int:
        return 7


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_ring_through_what_a_call_is_given(protocol: int) -> None:
    # Protocols below 4 make a set by a call with its members, one of which here holds the set.
    member = Hashed(None)
    member.value = {member}
    carried = pickle.loads(dump(load(pickle.dumps(member.value, protocol=protocol))))
    (found,) = carried
    assert found.value is carried


def test_a_state_of_none_is_not_no_state() -> None:
    head = b"\x80\x02ctests.formats.graphs\nRecord\n)\x81"
    assert dump(load(head + b"Nb.")).count(b"b") > dump(load(head + b".")).count(b"b")


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_nothing_is_imported_or_called(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "trap.py").write_text(
        "def note(word):\n"
        f"    with open({str(marker)!r}, 'a') as stream:\n"
        "        stream.write(word)\n"
        "note('imported ')\n"
        "class Trap:\n"
        "    def __init__(self): self.x = 1\n"
        "    def __setstate__(self, state): note('called')\n"
    )
    script = (
        f"import pickle, sys, trap\nopen('p', 'wb').write(pickle.dumps(trap.Trap(), {protocol}))"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    data = (tmp_path / "p").read_bytes()
    marker.unlink()
    sys.path.insert(0, str(tmp_path))
    try:
        carried = dump(load(data))
        assert "trap" not in sys.modules
        assert not marker.exists()
        pickle.loads(carried)  # it was importable all the time, and is what was meant
        assert marker.read_text() == "imported called"
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("trap", None)


@pytest.mark.parametrize("head", [b"]", b"("], ids=["lists", "tuples"])
def test_deep_nesting_is_carried_or_refused(head: bytes) -> None:
    def nested(depth: int) -> Any:  # noqa: ANN401
        tail = b"a" * (depth - 1) if head == b"]" else b"t" * depth
        return load(b"\x80\x02" + head * depth + tail + b".")

    assert same(pickle.loads(dump(nested(100))), nested(100))
    with pytest.raises(UnsupportedError, match=r"nested too deeply|200 tuples in each other"):
        dump(nested(100_000))


INTEGERS = st.one_of(st.integers(0, 255), st.integers(-2, 258), st.integers(), st.booleans())


@settings(max_examples=150)
@example([[0] * 2001])
@given(
    st.lists(
        st.one_of(
            st.tuples(st.integers(0, 255), st.integers(0, 2_500)).map(lambda p: [p[0]] * p[1]),
            st.lists(INTEGERS, max_size=20),
            st.binary(max_size=2_500).map(list),
        ),
        max_size=5,
    )
)
def test_lists_of_integers_are_those_of_the_standard_library(lists: list[list[int]]) -> None:
    """Long lists of small integers are read and written in one go."""
    data = pickle.dumps(lists, protocol=2)
    loaded = load(data)
    assert loaded == lists
    assert [[type(n) for n in inner] for inner in loaded] == [[type(n) for n in i] for i in lists]
    # The one in C puts even a single last element between MARK and APPENDS.
    buffer = io.BytesIO()
    pickle._Pickler(buffer, protocol=2).dump(lists)
    assert dump(loaded) == buffer.getvalue()


@pytest.mark.parametrize("count", [1, 2, 3, 1_000, 1_001, 2_001, 2_002])
def test_a_list_of_integers_that_is_cut_off(count: int) -> None:
    data = pickle.dumps([7] * count, protocol=2)
    for end in {*range(1, min(len(data), 40)), *range(len(data) - 20, len(data))}:
        if 0 < end < len(data):
            with pytest.raises(EndedTooEarlyError):
                load(data[:end])
