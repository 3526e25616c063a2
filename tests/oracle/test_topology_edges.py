"""Topologies: world sizes they do not allow, their batch sizes, damage that must not go unseen."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from streamshard.errors import UsageError
from tests.oracle.cases import Resharding
from tests.oracle.compare import differences
from tests.oracle.conftest import Places
from tests.oracle.files import Content
from tests.oracle.jobs import Resume, Train
from tests.oracle.models import GLOBAL_BATCH
from tests.oracle.ranks import run_jobs
from tests.oracle.topology.cases import TOPOLOGIES
from tests.oracle.truth import Truth

FROM_4 = {one.case.name: one for one in TOPOLOGIES if one.source == 4}


def _source(name: str, topologies: Places) -> Path:
    return topologies.source(FROM_4[name].case, 4)


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
    name: str, ranks: int, message: str, topologies: Places, tmp_path: Path
) -> None:
    for source in (_source(name, topologies), topologies.store(FROM_4[name])):
        with pytest.raises(UsageError, match=f"{ranks}: .*{message}") as refusal:
            streamshard.repartition(source, tmp_path / "out", world_size=ranks)
        assert refusal.value.exit_code == 2
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


@dataclass(frozen=True)
class Engines:
    """What became of engines of 2 ranks, by the name of the case or the damage."""

    root: Path
    errors: dict[str, str | None]

    def truth_path(self, name: str) -> Path:
        return self.root / f"{name}.pt"


@pytest.fixture(scope="module")
def engines(topologies: Places, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Engines that start with the advised batch sizes, and those that load what was damaged."""
    root = tmp_path_factory.mktemp("edges")
    jobs: dict[str, Train | Resume] = {}
    for name in ADVISED:
        case = FROM_4[name].case
        sizes = _advised(_source(name, topologies), root / "planned")
        case = replace(case, ds_overrides={**case.ds_overrides, **sizes})
        jobs[name] = Train(case, root / name, None, steps=0)
    for name, (of, damage, _) in DAMAGES.items():
        one = _resharding(of)
        shutil.copytree(topologies.out(one), root / name)
        damage(root / name / (root / name / "latest").read_text())
        jobs[name] = Resume(one.case, root / name, root / f"{name}.pt")
    finished = run_jobs(2, list(jobs.values()), root / "ranks")
    return Engines(root, {name: end.error for name, end in zip(jobs, finished, strict=True)})


def _resharding(name: str) -> Resharding:
    [one] = (one for one in TOPOLOGIES if one.name == name)
    return one


def _advised(source: Path, target: Path) -> dict[str, Any]:
    """The part of a DeepSpeed configuration that the note on a repartitioning gives."""
    plan = streamshard.plan_repartition(source, target, world_size=2)
    [lines] = re.findall(r'((?:\n  "\w+": \d+,?)+)', "\n".join(plan.report.notes))
    sizes: dict[str, Any] = json.loads(f"{{{lines}}}")
    return sizes


@pytest.mark.parametrize("name", ADVISED)
def test_deepspeed_takes_the_advised_batch_sizes(
    name: str, engines: Engines, topologies: Places, tmp_path: Path
) -> None:
    sizes = _advised(_source(name, topologies), tmp_path / "planned")
    assert sizes["train_batch_size"] == GLOBAL_BATCH
    assert engines.errors[name] is None


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_reported(name: str, engines: Engines, topologies: Places) -> None:
    # DeepSpeed loads it and says nothing.
    assert engines.errors[name] is None
    of, _, expected = DAMAGES[name]
    good = Truth.load(topologies.truth_path(topologies.out(_resharding(of))))
    found = differences(good, Truth.load(engines.truth_path(name)))
    assert any(re.search(expected, line) for line in found), found
