"""What a few bytes could make large: refused, or read in time in proportion to the file."""

import json
import pickle
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamshard.errors import CorruptFileError, StreamshardError, UnsupportedError, UsageError
from streamshard.formats import safetensors_file
from streamshard.formats.deepspeed.model_parallel.cuts_in_files import AffineMaps, Categories
from streamshard.formats.deepspeed.model_parallel.stated_cuts import CutRules
from streamshard.formats.pickle.inert import Global, show
from streamshard.formats.pickle.inert_load import load
from streamshard.formats.pickle.node_checks import LIMIT_NUMEL, name_of, require_unrolled
from streamshard.formats.torch.torch_tensor import storage_from_id

# Containers that share their parts without end, and those that share like any others -------------


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
def test_containers_without_end_are_refused(node: object) -> None:
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
def test_containers_like_any_others_are_accepted(node: object) -> None:
    require_unrolled([node])


@pytest.mark.parametrize("node", [7, None, ("a",), "x" * 5000, "\ud800"], ids=lambda n: repr(n)[:9])
def test_what_is_no_name(node: object) -> None:
    with pytest.raises(CorruptFileError, match=r"is not a name of a tensor"):
        name_of(node)


def test_tuples_are_weighed_with_what_is_in_them() -> None:
    flat = tuple(range(1000))
    load(pickle.dumps({flat: 1}, 2), lambda identifier: identifier)
    with pytest.raises(UnsupportedError, match=r"a key of 1,002 parts"):
        load(pickle.dumps({(flat, 1): 1}, 2), lambda identifier: identifier)


# Shapes, sizes and patterns that are long: read in time in proportion to the file ----------------

LARGE = 1 << 43
DIGITS = 10**4000
"""Fewer digits than Python refuses to read."""


def cpu_seconds(function: Callable[[], object]) -> float:
    """Call what ends with an error of our own, and return the CPU time that it took."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(StreamshardError):
        function()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def safetensors(path: Path, shape: list[int], stop: int) -> Path:
    header = {"w": {"dtype": "U8", "shape": shape, "data_offsets": [0, stop]}}
    data = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(data)) + data)
    return path


@pytest.mark.parametrize(
    "shape", [[LARGE] * 60_000, [1] * 400_000, [DIGITS] * 200, [-1], [True], [LIMIT_NUMEL, 2]]
)
def test_a_header_of_safetensors(tmp_path: Path, shape: list[int]) -> None:
    path = safetensors(tmp_path / "x.safetensors", shape, 4)
    assert cpu_seconds(lambda: safetensors_file.read(path)) < 1 + path.stat().st_size / 1e6


@pytest.mark.parametrize("stop", [DIGITS, -1, True])
def test_places_in_a_header_of_safetensors(tmp_path: Path, stop: int) -> None:
    path = safetensors(tmp_path / "x.safetensors", [4], stop)
    assert cpu_seconds(lambda: safetensors_file.read(path)) < 1


PIECE = {"shape": [4], "source": [0, [1]], "dest": [0, [1]]}


def cut_by_map(shape: Any, piece: dict[str, Any] = PIECE) -> object:  # noqa: ANN401
    one = {"logical_shape": shape, "ranks": {0: {"shard_shape": shape, "pieces": [piece]}}}
    maps = AffineMaps({"affine_map": {"version": 1, "params": {"^w$": one}}})
    return maps.cut("w", {0: (4, 4)}, 1)


def cut_by_subs(shape: list[Any]) -> object:
    subs = [{"patterns": ["^w$"], "shape": shape, "partition_dim": 0}]
    info = {"universal_checkpoint_version": 0.2, "parameter_with_sub_params": subs}
    return Categories(info).cut("w", {0: (4, 4)}, 1)


LONG: dict[str, Callable[[], object]] = {
    "dimensions of a map": lambda: cut_by_map([LARGE] * 200_000),
    "sizes of a piece": lambda: cut_by_map([4], {**PIECE, "shape": [LARGE] * 200_000}),
    "strides": lambda: cut_by_map([4], {**PIECE, "source": [0, [LARGE] * 200_000]}),
    "digits of a map": lambda: cut_by_map([1 << 1_000_000] * 60),
    "an offset": lambda: cut_by_map([4], {**PIECE, "source": [1 << 4_000_000, [1]]}),
    "dimensions of sub-parameters": lambda: cut_by_subs([4, *[LARGE] * 200_000]),
    "digits of sub-parameters": lambda: cut_by_subs([4, *[1 << 1_000_000] * 60]),
    "sub-parameters": lambda: cut_by_subs([[1] * 500_000, 4]),
    "digits in sub-parameters": lambda: cut_by_subs([[1 << 1_000_000] * 60, 4]),
    "a count of sub-parameters": lambda: cut_by_subs([1 << 4_000_000, 4]),
    "a storage": lambda: storage_from_id(
        ("storage", Global("torch", "FloatStorage"), "0", "cpu", 1 << 40_000)
    ),
}


@pytest.mark.parametrize("what", LONG)
def test_what_is_long_is_refused_soon(what: str) -> None:
    assert cpu_seconds(LONG[what]) < 1


@pytest.mark.parametrize(
    "rule",
    [
        "w: sub 0 [" + "1" * 5_000 + "]",
        "w: sub 0 [" + "9" * 100_000 + "]",
        "w: split ²",
        "w: sub 0 [²]",
    ],
)
def test_cut_rules(rule: str) -> None:
    with pytest.raises(UsageError, match=r"rules, line 1: "):
        CutRules(rule, "rules")
    assert cpu_seconds(lambda: CutRules(rule, "rules")) < 1


def test_numbers_of_many_digits_are_shown_by_their_length() -> None:
    assert show(1 << 40_000) == "a number of 40,001 bits"
    assert show([1, 1 << 200]) == "[1, a number of 201 bits]"
