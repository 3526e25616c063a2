"""Values side by side: alike however they were pickled, and different exactly where they differ."""

import argparse
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamshard.formats.pickle import inert
from streamshard.formats.pickle.inert import Node
from streamshard.formats.torch import torch_file
from streamshard.formats.torch.torch_tensor import storages_in
from streamshard.formats.torch.tree_comparison import BlobPair, Disparity, compare_nodes
from streamshard.model import Whole
from tests.formats.graphs import Bag, Colour, Outer, Point, Record, graphs, pickled
from tests.formats.test_inert import dump, load


def places(one: object, other: object) -> dict[str, str]:
    """Pickle two values, and return where they differ and how."""
    nodes = [load(pickle.dumps(value, protocol=2)) for value in (one, other)]
    found = list(compare_nodes(nodes[0], nodes[1], "top"))
    assert all(isinstance(place, Disparity) for place in found)
    return {place.name: place.message for place in found if isinstance(place, Disparity)}


@settings(max_examples=100)
@given(graphs(), st.integers(0, 5))
def test_a_value_is_what_it_was_when_it_is_carried(graph: object, protocol: int) -> None:
    data = pickled(graph, protocol)
    assert list(compare_nodes(load(data), load(dump(load(data))), "")) == []


NESTED: dict[str, Any] = {
    "lr": 0.1,
    "steps": [1, 2, 3],
    "nested": {"deep": ({"x": None},)},
    "args": argparse.Namespace(seed=3, path="a"),
    "record": Record(1, Point(2, 3)),
    "named": OrderedDict(a=1),
    "bag": Bag([1, 2]),
}


@pytest.mark.parametrize(
    ("change", "where", "how"),
    [
        (lambda v: v.update(lr=0.2), "top.lr", "0.1 here, 0.2 there"),
        (lambda v: v.update(lr=1), "top.lr", "0.1 here, 1 there"),
        (lambda v: v["steps"].append(4), "top.steps[3]", "nothing here, 4 there"),
        (lambda v: v["steps"].pop(), "top.steps[2]", "3 here, nothing there"),
        (lambda v: v["nested"].update(more=1), "top.nested.more", "nothing here, 1 there"),
        (lambda v: v.pop("lr"), "top.lr", "0.1 here, nothing there"),
        (
            lambda v: v["nested"]["deep"][0].update(x=0),
            "top.nested.deep[0].x",
            "None here, 0 there",
        ),
        (lambda v: setattr(v["args"], "seed", 4), "top.args.seed", "3 here, 4 there"),
        (lambda v: setattr(v["record"], "value", True), "top.record.value", "1 here, True there"),
        (lambda v: v["bag"].append(0), "top.bag[2]", "nothing here, 0 there"),
        (lambda v: v["named"].update(a=2), "top.named.a", "1 here, 2 there"),
    ],
)
def test_a_change_is_found_where_it_is(change: Any, where: str, how: str) -> None:  # noqa: ANN401
    changed = pickle.loads(pickle.dumps(NESTED))
    change(changed)
    assert places(NESTED, changed) == {where: how}
    assert list(places(changed, NESTED)) == [where]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        (1, True),
        (1, 1.0),
        ("a", b"a"),
        ([1], (1,)),
        ({1}, frozenset({1})),
        ({"a", "b"}, {"a"}),
        (Colour.RED, Colour.BLUE),
        (Record(1), Outer.Inner(1)),
        ({}, OrderedDict()),
        (torch.float32, torch.float16),
        (Record, Outer),
    ],
)
def test_what_is_nearly_the_same_is_not(one: object, other: object) -> None:
    assert len(places(one, other)) >= 1
    assert places(one, one) == places(other, other) == {}


def test_nan_is_nan_and_sets_have_no_order() -> None:
    assert places(float("nan"), float("nan")) == {}
    words = [f"word {number}" for number in range(50)]
    kept, turned = (
        inert.Call(inert.Global("builtins", "set"), (order,)) for order in (words, words[::-1])
    )
    assert list(compare_nodes(kept, turned, "")) == []
    assert list(compare_nodes(kept, load(pickle.dumps(set(words), protocol=4)), "")) == []


def opened(path: Path, value: object) -> Node:
    """Save a value with torch and read it, every storage a blob of its own number."""
    torch.save(value, path)
    root = torch_file.read(path, 0).root
    for number, storage in enumerate(storages_in(root)):
        storage.content = Whole(number)
    return root


def test_tensors_at_one_place_are_named_for_the_reading(tmp_path: Path) -> None:
    table = torch.arange(10, dtype=torch.int16)
    one = opened(tmp_path / "a", {"x": table[2:5], "y": [table], "t": table.reshape(2, 5).t()})
    other = opened(
        tmp_path / "b", {"x": table[2:5].clone(), "y": [table], "t": table.reshape(2, 5).t()}
    )
    assert list(compare_nodes(one, other, "top")) == [
        BlobPair("top.x", (0, 4), (0, 0), 6, 2),
        BlobPair("top.y[0]", (0, 0), (1, 0), 20, 2),
        # Not in the order of its elements: the storage is compared as a whole.
        BlobPair("top.t", (0, 0), (1, 0), 20, 2),
    ]


@pytest.mark.parametrize(
    ("one", "other", "how"),
    [
        (torch.zeros(3), torch.zeros(2), "float32[3] here, float32[2] there"),
        (torch.zeros(3), torch.zeros(3).half(), "float32[3] here, float16[3] there"),
        (torch.zeros(3), torch.zeros(3, requires_grad=True), "tensors with other attributes"),
        (torch.zeros(2, 3).t(), torch.zeros(3, 2), "tensors that are laid out in different ways"),
    ],
)
def test_tensors_that_differ_by_what_is_said_of_them(
    tmp_path: Path, one: torch.Tensor, other: torch.Tensor, how: str
) -> None:
    nodes = opened(tmp_path / "a", [one]), opened(tmp_path / "b", [other])
    assert list(compare_nodes(*nodes, "top")) == [Disparity("top[0]", how)]


# What is made to be compared for ever ---------------------------------------------------------


def test_parts_that_meet_in_every_pair_are_given_up() -> None:
    """What is known of each pair would take memory out of proportion."""
    parts = [[*range(200), number] for number in range(100)]
    rows = [part for part in parts for _ in parts]
    columns = [part for _ in parts for part in parts]
    (*_, last) = compare_nodes(rows, columns, "top")
    assert last == Disparity("top", "cannot be compared: parts are shared without end")
    assert list(compare_nodes(rows, rows, "top")) == []


def test_what_no_pickler_can_follow_is_not_known_to_be_the_same() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    (found,) = compare_nodes(deep, deep, "top")
    assert isinstance(found, Disparity)
    assert "nested too deeply" in found.message


def test_many_differences_are_counted_and_not_all_told() -> None:
    found = list(compare_nodes(list(range(5000)), list(range(1, 5001)), "top"))
    assert found[0] == Disparity("top[0]", "0 here, 1 there")
    assert found[-1] == Disparity("top", "4,000 more places in it differ")
    assert len(found) == 1001


def test_keys_of_tuples_have_no_order_and_keys_of_objects_have_places() -> None:
    one = {("a", 1): 1, ("b", 2): 2}
    assert places(one, {("b", 2): 2, ("a", 1): 1}) == {}
    assert places(one, {("b", 2): 2, ("a", 1): 3}) == {"top.['a', 1]": "1 here, 3 there"}
    coloured = {(Colour.RED, 1): 1, Colour.BLUE: 2}
    assert places(coloured, dict(coloured)) == {}
