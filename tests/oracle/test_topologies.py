"""Jobs with other parallelism than that of data: what engines then hold, and what is refused.

World sizes that topologies do not allow, their batch sizes, and damage that must not go unseen.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import streamshard
from streamshard.errors import UnsupportedError, UsageError
from tests.oracle.files import padding_found
from tests.oracle.jobs import Train
from tests.oracle.laws import *  # noqa: F403
from tests.oracle.models import GLOBAL_BATCH
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.reshardings import Places, Resharding
from tests.oracle.topology.cases import EXPERTS_Z0, TOPOLOGIES
from tests.oracle.values import value_differences

RESHARDINGS = TOPOLOGIES
NAMED = {one.name: one for one in TOPOLOGIES}
FROM_4 = {one.case.name: one for one in TOPOLOGIES if one.source == 4}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def test_the_truth_is_about_something(one: Resharding, places: Places) -> None:
    truth = places.saved(one)
    assert truth.states.keys() == {"fp32", "exp_avg", "exp_avg_sq"}
    assert truth.weights.keys() == truth.states["fp32"].keys()
    for name, master in truth.states["fp32"].items():
        # Gathered apart from each other: a wrong expert, part or offset would show.
        assert torch.equal(master.to(DTYPES[one.case.dtype]), truth.weights[name]), name
        assert truth.states["exp_avg_sq"][name].count_nonzero(), name
    # Without ZeRO in 16 bits DeepSpeed takes a step of zeros when it makes the optimizer.
    is_unfused = (one.case.zero_stage, one.case.dtype) == (0, "bf16")
    assert {float(group["scalars"]["step"]) for group in truth.groups} == {3.0 + is_unfused}


def test_padding_below_stage_3_is_one_value(places: Places) -> None:
    flat = {places.source(one) for one in TOPOLOGIES if one.case.zero_stage < 3}
    assert sum(map(padding_found, flat)) > 0


@pytest.mark.parametrize("name", ["experts-z2-bf16-4to2", "data-first-z2-fp32-4to6"])
def test_exported_experts_are_those_of_all_ranks(name: str, places: Places, tmp_path: Path) -> None:
    truth = places.saved(NAMED[name])
    streamshard.export(places.source(NAMED[name]), tmp_path / "out")
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    wanted = {**truth.states["fp32"], **truth.frozen, **truth.buffers}
    assert list(value_differences(found, {k: v.float() for k, v in wanted.items()}, "")) == []


def test_experts_without_zero_stay_on_as_many_ranks(places: Places, tmp_path: Path) -> None:
    run, out = places.source(FROM_4[EXPERTS_Z0.name]), tmp_path / "out"
    assert streamshard.inspect(run).expert_parallel == 2
    for degree in (1, 4):
        with pytest.raises(UnsupportedError, match="saved at ZeRO stage 0, and not at 1 or 2"):
            streamshard.repartition(run, out, world_size=4, expert_parallel=degree)
    with pytest.raises(UsageError, match=r"experts spread over 2 ranks: give a multiple of 2"):
        streamshard.repartition(run, out, world_size=3)
    assert list(tmp_path.iterdir()) == []


ADVISED = ["tensor-z2-fp32", "pipeline-z1-fp32", "experts-z1-fp32", "sequence-z2-bf16"]


def test_deepspeed_takes_the_advised_batch_sizes(places: Places, tmp_path: Path) -> None:
    jobs = []
    for name in ADVISED:
        case = FROM_4[name].case
        sizes = advised(places.source(FROM_4[name]), tmp_path / "planned")
        assert sizes["train_batch_size"] == GLOBAL_BATCH
        case = replace(case, ds_overrides={**case.ds_overrides, **sizes})
        jobs.append(Train(case, tmp_path / name, None, steps=0))
    require_success(run_jobs(2, jobs, tmp_path / "ranks"))


def advised(source: Path, target: Path) -> dict[str, Any]:
    """The part of a DeepSpeed configuration that the note on a repartitioning gives."""
    plan = streamshard.plan_repartition(source, target, world_size=2)
    [lines] = re.findall(r'((?:\n  "\w+": \d+,?)+)', "\n".join(plan.report.notes))
    sizes: dict[str, Any] = json.loads(f"{{{lines}}}")
    return sizes
