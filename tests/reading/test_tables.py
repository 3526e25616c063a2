"""Tables of an opened checkpoint, for pandas."""

import re
from pathlib import Path

import numpy as np
import pandas
import pytest

import streamshard
from tests.fabricated import write
from tests.job import EXPERTS, STATES, TAG, Job
from tests.reading.conftest import KINDS, Made

COLUMNS = ["name", "shape", "dtype", "group", "numel", "states", "ranks"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_is_what_pandas_takes(made: Made, kind: str) -> None:
    with streamshard.open(made(kind)) as ckpt:
        frame = pandas.DataFrame(ckpt.table())
        assert list(frame.columns) == COLUMNS
        assert list(frame.name) == list(ckpt)
        assert list(frame.numel) == [np.prod(parameter.shape) for parameter in ckpt.values()]
        rows = {row["name"]: row for row in ckpt.table()}
        states = ("fp32", *STATES)
        assert (rows["v"]["group"], rows["v"]["dtype"], rows["v"]["states"]) == (
            1, "float32", states
        )  # fmt: skip
        trained = frame[frame.states.map(len) > 0]
        groups = trained[~trained.name.isin(["t"])].groupby("group").numel.sum()
        assert list(groups) == [group.numel for group in ckpt.groups]
        if not kind.startswith("dumps"):
            assert rows["f"] == {
                "name": "f", "shape": (3,), "dtype": "bfloat16", "group": None, "numel": 3,
                "states": (), "ranks": None,
            }  # fmt: skip
            assert {**rows["t"], "name": "w"} == rows["w"]


@pytest.mark.parametrize("kind", ["native-1", "native-3", "chunks-none"])
def test_the_ranks_of_a_table_are_those_that_hold_the_pieces(made: Made, kind: str) -> None:
    names = ("w", "cube", "v", "one")
    found = streamshard.inspect(made(kind), params=names)
    with streamshard.open(made(kind)) as ckpt:
        rows = {row["name"]: row["ranks"] for row in ckpt.table()}
    for detail in found.details:
        held = {piece.rank: None for piece in detail.pieces if piece.state == "fp32"}
        assert rows[detail.name] == (None if kind == "chunks-none" else tuple(held))


def test_the_ranks_of_experts_need_not_be_neighbours(tmp_path: Path) -> None:
    job = Job(world_size=4, experts=EXPERTS, expert_parallel=2)
    with streamshard.open(write(job, tmp_path / "run")) as ckpt:
        held = {row["name"]: row["ranks"] for row in ckpt.table()}
        expert = EXPERTS[0][0]
        for name, sharing in ((expert, {0, 2}), (expert.replace(".0.", ".2."), {1, 3})):
            ranks = held[name]
            assert ranks
            assert set(ranks) <= sharing


def test_an_inspection_is_said_in_a_line(tmp_path: Path) -> None:
    groups = ((("w", (50, 8)), ("cube", (4, 5, 6))), (("v", (7,)),))
    run = write(Job(world_size=3, stage=2, groups=groups, tied={}), tmp_path / "run")
    assert re.fullmatch(
        rf"<Inspection '{run}': {TAG}, ZeRO stage 2, world size 3, 3 parameters, 6 files, .* KiB>",
        repr(streamshard.inspect(run)),
    )
