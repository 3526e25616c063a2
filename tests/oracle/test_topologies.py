"""Jobs with other parallelism than that of data: what engines then hold, and what is refused.

World sizes that topologies do not allow, their batch sizes, and damage that must not go unseen.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import streamshard
from streamshard.errors import UnsupportedError, UsageError
from tests.oracle.compare import differences
from tests.oracle.files import Content, padding_found
from tests.oracle.jobs import Job, Resume, Train
from tests.oracle.laws import *  # noqa: F403
from tests.oracle.models import GLOBAL_BATCH, Case
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.reshardings import Places, Resharding
from tests.oracle.topology.cases import EXPERTS_Z0, TOPOLOGIES
from tests.oracle.truth import Truth
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


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("tensor-z2-fp32", 3, r"2 tensor or pipeline .*multiple of 2 \(2, 4, 6"),
        ("pipeline-z1-fp32", 5, r"2 tensor or pipeline .*multiple of 2 \(2, 4, 6"),
        ("pipeline-tensor-z1-bf16", 6, r"4 tensor or pipeline .*multiple of 4 \(4, 8, 12"),
        ("experts-z1-fp32", 3, r"experts .*2 ranks.*multiple of 2 \(2, 4, 6"),
        ("two-degrees-z1-bf16", 1, r"experts .*2 ranks.*multiple of 2 \(2, 4, 6"),
        ("experts-on-4-z2-fp32", 6, r"experts .*4 ranks.*multiple of 4 \(4, 8, 12"),
    ],
)
def test_a_world_size_that_does_not_fit_is_refused(
    name: str, ranks: int, message: str, places: Places, tmp_path: Path
) -> None:
    for source in (places.source(FROM_4[name]), places.store(FROM_4[name])):
        with pytest.raises(UsageError, match=f"{ranks}: .*{message}") as refusal:
            streamshard.repartition(source, tmp_path / "out", world_size=ranks)
        assert refusal.value.exit_code == 2
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", EXPERTS_Z0, ids=lambda case: case.name)
def test_experts_without_zero_stay_on_as_many_ranks(
    case: Case, places: Places, tmp_path: Path
) -> None:
    run, out = places.source(FROM_4[case.name]), tmp_path / "out"
    assert streamshard.inspect(run).expert_parallel == 2
    for degree in (1, 4):
        with pytest.raises(UnsupportedError, match="saved at ZeRO stage 0, and not at 1 or 2"):
            streamshard.repartition(run, out, world_size=4, expert_parallel=degree)
    with pytest.raises(UsageError, match=r"experts spread over 2 ranks: give a multiple of 2"):
        streamshard.repartition(run, out, world_size=3)
    assert list(tmp_path.iterdir()) == []


ADVISED = ["tensor-z2-fp32", "pipeline-z1-fp32", "experts-z1-fp32", "sequence-z2-bf16"]


def _swap_experts(tag: Path) -> None:
    """Exchange what ranks 0 and 1 hold of their experts, as if the ranks had another order."""
    paths = [tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
    files: list[Content] = [torch.load(path, weights_only=False) for path in paths]
    halves = [file["optimizer_state_dict"] for file in files]
    states = [half["base_optimizer_state"]["state"] for half in halves]
    masters = [half["single_partition_of_fp32_groups"] for half in halves]
    for g, group in enumerate(halves[0]["base_optimizer_state"]["param_groups"]):
        if group.get("moe"):
            for left, right in (states, masters):
                left[g], right[g] = right[g], left[g]
    for path, file in zip(paths, files, strict=True):
        torch.save(file, path)


def _flip_one_bit(tag: Path) -> None:
    """In the last model-parallel rank's second moments."""
    path = tag / "zero_pp_rank_0_mp_rank_01_optim_states.pt"
    content: Content = torch.load(path, weights_only=False)
    state = content["optimizer_state_dict"]["base_optimizer_state"]["state"][1]
    state["exp_avg_sq"].view(torch.int32)[5] ^= 1
    torch.save(content, path)


DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "swapped-experts": (
        "experts-z1-fp32-4to2",
        _swap_experts,
        r"\['exp_avg'\]\['mixtures.0.*experts.3.down.bias'\]: 13 of 13 elements",
    ),
    "one-bit": (
        "pipeline-z1-fp32-4to2",
        _flip_one_bit,
        r"\['exp_avg_sq'\]\['mp_rank_01.4.norm.weight'\]: 1 of 13 elements",
    ),
}
"""The name of a resharding, what is done to its result, and what must be found."""


@pytest.fixture(scope="module")
def edges(places: Places, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines that start with the advised batch sizes, and those that load what was damaged.

    DeepSpeed loads damage and says nothing.
    """
    root = tmp_path_factory.mktemp("edges")
    jobs: list[Job] = []
    for name in ADVISED:
        case = FROM_4[name].case
        sizes = advised(places.source(FROM_4[name]), root / "planned")
        assert sizes["train_batch_size"] == GLOBAL_BATCH
        case = replace(case, ds_overrides={**case.ds_overrides, **sizes})
        jobs.append(Train(case, root / f"advised-{name}", None, steps=0))
    for name, (of, damage, _) in DAMAGES.items():
        shutil.copytree(places.out(NAMED[of]), root / name)
        damage(root / name / (root / name / "latest").read_text())
        jobs.append(Resume(NAMED[of].case, root / name, root / f"{name}.pt"))
    require_success(run_jobs(2, jobs, root / "ranks"))
    return root


def advised(source: Path, target: Path) -> dict[str, Any]:
    """The part of a DeepSpeed configuration that the note on a repartitioning gives."""
    plan = streamshard.plan_repartition(source, target, world_size=2)
    [lines] = re.findall(r'((?:\n  "\w+": \d+,?)+)', "\n".join(plan.report.notes))
    sizes: dict[str, Any] = json.loads(f"{{{lines}}}")
    return sizes


@pytest.mark.parametrize("name", ADVISED)
def test_deepspeed_takes_the_advised_batch_sizes(name: str, edges: Path) -> None:
    assert (edges / f"advised-{name}" / "latest").is_file()


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_reported(name: str, edges: Path, places: Places) -> None:
    of, _, expected = DAMAGES[name]
    found = differences(places.resumed(NAMED[of]), Truth.load(edges / f"{name}.pt"))
    assert any(re.search(expected, line) for line in found), found
