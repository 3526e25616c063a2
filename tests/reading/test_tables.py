"""Tables of an opened checkpoint, for pandas."""

from pathlib import Path

import numpy as np
import pytest

import streamshard
from tests.fabricated import write
from tests.job import EXPERTS, STATES, Job
from tests.reading.conftest import KINDS, Made

COLUMNS = ["name", "shape", "dtype", "group", "numel", "states", "ranks"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_is_what_pandas_takes(made: Made, kind: str) -> None:
    import pandas  # slow

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


def test_the_ranks_of_experts_need_not_be_neighbours(tmp_path: Path) -> None:
    job = Job(world_size=4, experts=EXPERTS, expert_parallel=2)
    with streamshard.open(write(job, tmp_path / "run")) as ckpt:
        held = {row["name"]: row["ranks"] for row in ckpt.table()}
        expert = EXPERTS[0][0]
        for name, sharing in ((expert, {0, 2}), (expert.replace(".0.", ".2."), {1, 3})):
            ranks = held[name]
            assert ranks
            assert set(ranks) <= sharing
