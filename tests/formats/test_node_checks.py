"""Containers that share their parts without end are told from those that share like any others."""

from typing import Any

import pytest

from streamshard.errors import CorruptFileError, UnsupportedError
from streamshard.formats.pickle.node_checks import name_of, require_unrolled


def doubled(times: int) -> list[Any]:
    node: list[Any] = []
    for _ in range(times):
        node = [node, node]
    return node


def in_itself() -> dict[str, Any]:
    node: dict[str, Any] = {}
    node["again"] = (node,)
    return node


def nested(depth: int) -> list[Any]:
    node: list[Any] = []
    for _ in range(depth):
        node = [node]
    return node


@pytest.mark.parametrize(
    "node",
    [
        pytest.param(doubled(40), id="twice and twice"),
        pytest.param(in_itself(), id="in itself"),
        pytest.param(nested(101), id="deep"),
        pytest.param([list(range(10_000))] * 10_000, id="one list many times"),
        pytest.param(
            {n: {"a": [0] * 1000} for n in range(3)} | {"x": [[0] * 9999] * 999}, id="in it"
        ),
    ],
)
def test_refused(node: object) -> None:
    with pytest.raises(UnsupportedError, match=r"holds containers"):
        require_unrolled([node])


@pytest.mark.parametrize(
    "node",
    [
        pytest.param(None, id="nothing"),
        pytest.param(list(range(1_000_000)), id="long"),
        pytest.param([[n] for n in range(100_000)], id="many"),
        pytest.param([(0.9, 0.95)] * 50_000, id="one pair many times"),
        pytest.param([list(range(1000))] * 90, id="one list some times"),
        pytest.param(nested(90), id="rather deep"),
        pytest.param(doubled(10), id="twice and twice, a few times"),
    ],
)
def test_accepted(node: object) -> None:
    require_unrolled([node])


@pytest.mark.parametrize("node", [7, None, ("a",), "x" * 5000, "\ud800"], ids=lambda n: repr(n)[:9])
def test_what_is_no_name(node: object) -> None:
    with pytest.raises(CorruptFileError, match=r"is not a name of a tensor"):
        name_of(node)
