"""Shapes, sizes and patterns that are long: refused, or read in time in proportion to the file."""

import json
import random
import re
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamshard.errors import StreamshardError, UsageError
from streamshard.formats import safetensors_file
from streamshard.formats.deepspeed.model_parallel import name_patterns
from streamshard.formats.deepspeed.model_parallel.affine_maps import AffineMaps
from streamshard.formats.deepspeed.model_parallel.categories import Categories
from streamshard.formats.deepspeed.model_parallel.cut_rules import CutRules
from streamshard.formats.pickle.inert import Global, show
from streamshard.formats.shapes import LIMIT_NUMEL, require_shape
from streamshard.formats.torch.torch_tensor import storage_from_id

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


def maps(shape: Any, piece: dict[str, Any], count: int = 1) -> AffineMaps:  # noqa: ANN401
    one = {"logical_shape": shape, "ranks": {0: {"shard_shape": shape, "pieces": [piece] * count}}}
    return AffineMaps({"affine_map": {"version": 1, "params": {"^w$": one}}}, 1)


PIECE = {"shape": [4], "source": [0, [1]], "dest": [0, [1]]}
MAPS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "dimensions": ([LARGE] * 200_000, PIECE, 1),
    "sizes of a piece": ([4], {**PIECE, "shape": [LARGE] * 200_000}, 1),
    "strides": ([4], {**PIECE, "source": [0, [LARGE] * 200_000]}, 1),
    "digits": ([1 << 1_000_000] * 60, PIECE, 1),
    "an offset": ([4], {**PIECE, "source": [1 << 4_000_000, [1]]}, 1),
    "pieces": ([4], PIECE, 100_000),
}


@pytest.mark.parametrize("what", MAPS)
def test_affine_maps(what: str) -> None:
    held = maps(*MAPS[what])
    assert cpu_seconds(lambda: held.cut("w")) < 1


SUBS: dict[str, tuple[list[Any], float]] = {
    "dimensions": ([4, *[LARGE] * 200_000], 0.2),
    "digits": ([4, *[1 << 1_000_000] * 60], 0.2),
    "sub-parameters": ([[1] * 500_000, 4], 0.2),
    "their digits": ([[1 << 1_000_000] * 60, 4], 0.2),
    "their count": ([1 << 4_000_000, 4], 0.2),
}


@pytest.mark.parametrize("what", SUBS)
def test_sub_parameters(what: str) -> None:
    shape, version = SUBS[what]
    subs = [{"patterns": ["^w$"], "shape": shape, "partition_dim": 0}]
    info = {"universal_checkpoint_version": version, "parameter_with_sub_params": subs}
    assert cpu_seconds(lambda: Categories(info).cut("w", {0: (4, 4)}, 1)) < 1


@pytest.mark.parametrize(
    "rule",
    [
        "w: sub 0 [" + "1" * 5_000 + "]",
        "w: sub 0 [" + "9" * 100_000 + "]",
        "w: sub 0 [" + "1, " * 100_000 + "1]",
        "w: split ²",
        "w: sub 0 [²]",
    ],
)
def test_cut_rules(rule: str) -> None:
    with pytest.raises(UsageError, match=r"rules, line 1: "):
        CutRules(rule, "rules")
    assert cpu_seconds(lambda: CutRules(rule, "rules")) < 1


def test_patterns_with_repetitions_take_one_pass() -> None:
    """`re` takes seconds for a handful of these, each of nine letters."""
    patterns = [f"a*a*a*b{number}" for number in range(1000)]
    categories = Categories({"tp_replicated_parameter_patterns": patterns})

    def run() -> None:
        assert not categories.is_averaged("a" * 500)
        categories.cut("a" * 500, {0: (), 1: (4,)}, 2)

    assert cpu_seconds(run) < 2


def test_patterns_match_as_re_does() -> None:
    chance, seen = random.Random(1), set()
    letters = ["a", "b", ".", "[ab]", "[^a]", r"\.", r"\d", "1"]
    for _ in range(6_000):
        steps = (chance.choice(letters) + chance.choice(["", "", *"*+?"]) for _ in range(5))
        pattern = chance.choice(["", "^"]) + "".join(steps) + chance.choice(["", "$"])
        for _ in range(4):
            name = "".join(chance.choice("ab.1\n") for _ in range(chance.randrange(8)))
            try:
                found = name_patterns.NamePatterns([(pattern, 1)]).find(name)
            except StreamshardError:
                continue
            assert bool(found) == bool(re.match(pattern, name)), (pattern, name)
            seen.add(bool(found))
    assert seen == {True, False}


def test_numbers_of_many_digits_are_shown_by_their_length() -> None:
    assert show(1 << 40_000) == "a number of 40,001 bits"
    assert show([1, 1 << 200]) == "[1, a number of 201 bits]"
    identifier = ("storage", Global("torch", "FloatStorage"), "0", "cpu", 1 << 40_000)
    assert cpu_seconds(lambda: storage_from_id(identifier)) < 1


def test_a_shape_is_returned() -> None:
    assert require_shape([2, 3]) == require_shape((2, 3)) == (2, 3)
    assert require_shape([]) == ()
