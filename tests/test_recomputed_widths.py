"""Without a reference, a job's cut at another degree is AutoTP's own, or the change is refused."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deepspeed.module_inject.tp_shard import AutoTPMeta, get_shard_size_list
from hypothesis import given
from hypothesis import strategies as st

import streamshard
from streamshard.errors import UsageError
from streamshard.formats.deepspeed.model_parallel.recomputed_widths import WidthRule
from tests.comparing import compare
from tests.fabricated import write
from tests.fabricated_parts import TensorJob
from tests.job import TAG
from tests.test_degrees import edit_parts, maps_of, with_degree

DEGREES = st.integers(2, 9)


@given(
    size=st.integers(1, 200),
    heads=st.none() | st.integers(1, 16),
    grain=st.sampled_from([1, 1, 2, 8]),
    name=st.sampled_from(["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"]),
    degrees=st.tuples(DEGREES, DEGREES),
    is_multiple=st.booleans(),
    is_known=st.booleans(),
)
def test_widths_are_those_of_deepspeed_if_they_are_any(
    size: int,
    heads: int | None,
    grain: int,
    name: str,
    degrees: tuple[int, int],
    is_multiple: bool,
    is_known: bool,
) -> None:
    before, at = degrees
    before *= at if is_multiple else 1
    meta = AutoTPMeta(num_kv_heads=heads, tp_grain_size=grain)
    given = get_shard_size_list(size, before, meta, name)
    found = WidthRule(at, heads if is_known else None, grain).widths(given)
    assert found is None or list(found) == get_shard_size_list(size, at, meta, name)


@pytest.mark.parametrize(
    ("given", "degree", "heads", "wanted"),
    [
        ([4, 4, 4, 4], 2, None, [8, 8]),
        ([8, 8], 4, None, None),
        ([8, 8], 4, 8, [4, 4, 4, 4]),
        ([8, 8], 4, 2, None),  # by heads two ranks would have none
        ([6, 6], 3, 4, None),  # by heads 6, 3, 3; else 4, 4, 4
        ([6, 3, 3], 2, 4, [6, 6]),
        ([5, 3], 4, 4, None),  # by no rule
    ],
)
def test_some_widths_are_known_and_others_are_not(
    given: list[int], degree: int, heads: int | None, wanted: list[int] | None
) -> None:
    assert WidthRule(degree, heads).widths(given) == wanted


EVEN = TensorJob(
    parts=4,
    world_size=2,
    groups=(
        (("embed.weight", (16, 4)), ("block.0.attn.weight", (6, 8)), ("block.0.mlp", (3, 2, 12))),
        (("embed.bias", (1,)), ("block.0.bias", (8,)), ("block.1.bias", (2,))),
    ),
    cuts={
        "embed.weight": (0, (16,)),
        "block.0.attn.weight": (1, (8,)),
        "block.0.mlp": (2, (4, 8)),
        "block.0.bias": (0, (8,)),
    },
).told()


def test_equal_parts_are_put_together_without_a_reference(tmp_path: Path) -> None:
    run, wanted = write(EVEN, tmp_path / "run"), tmp_path / "wanted"
    write(with_degree(EVEN, 2, 3), wanted)
    streamshard.repartition(run, tmp_path / "out", world_size=6, tensor_parallel=2, verify=True)
    compare(tmp_path / "out" / TAG, wanted / TAG)
    # What it tells of its own cut leads on.
    streamshard.repartition(tmp_path / "out", tmp_path / "one", world_size=2, tensor_parallel=1)
    compare(tmp_path / "one" / TAG, write(with_degree(EVEN, 1, 2), tmp_path / "whole") / TAG)


@pytest.mark.parametrize("inner", [False, True])
def test_the_model_s_config_tells_the_heads(tmp_path: Path, inner: bool) -> None:
    run = write(with_degree(EVEN, 2, 2), tmp_path / "run")
    wanted = write(EVEN, tmp_path / "wanted")
    heads: dict[str, Any] = {"num_key_value_heads": 4, "time_step_limit": [0.0, math.inf]}
    for place in (run, wanted):
        (place / "config.json").write_text(json.dumps({"text_config": heads} if inner else heads))
    streamshard.convert(run, tmp_path / "store")
    for source in (run, tmp_path / "store"):
        out = tmp_path / f"of-{source.name}"
        streamshard.repartition(source, out, world_size=8, tensor_parallel=4)
        compare(out / TAG, wanted / TAG)


def told_twice(content: dict[str, Any]) -> None:
    """Say that a rank holds its part in two blocks next to each other."""
    held = maps_of(content)["params"]["^block\\.0\\.bias$"]["ranks"]
    for rank in held:
        piece = held[rank]["pieces"][0]
        at = piece["source"][0]
        held[rank]["pieces"] = [
            {"shape": [1], "source": [at + n, [1]], "dest": [n, [1]], "locations": [rank]}
            for n in range(2)
        ]


@pytest.mark.parametrize("name", ["no config", "no heads", "no json", "blocks"])
def test_what_is_not_known_is_asked_for(tmp_path: Path, name: str) -> None:
    degree = 2 if name == "blocks" else 8
    run = write(EVEN, tmp_path / "run")
    if name == "blocks":
        edit_parts(run, told_twice)
    elif name != "no config":
        (run / "config.json").write_text({"no heads": "{}", "no json": "{"}[name])
    with pytest.raises(UsageError, match=f"tensor_parallel={degree} .* like=RUN as well"):
        streamshard.repartition(run, tmp_path / "out", world_size=8, tensor_parallel=degree)


def test_lists_alone_do_not_tell_of_other_degrees(tmp_path: Path) -> None:
    run = write(replace(EVEN, in_lists=True, client_state={}).told(), tmp_path / "run")
    with pytest.raises(UsageError, match="say here like=RUN as well"):
        streamshard.repartition(run, tmp_path / "out", world_size=6, tensor_parallel=2)
