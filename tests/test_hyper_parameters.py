"""Hyper-parameters that are tensors, as torch keeps a learning rate that is given as one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from streamshard.errors import DisagreementError
from tests.fabricated import load, optimizer_file, save, write
from tests.job import Job

ROADS = ("run", "run.zarr")


def groups_of(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The param groups in an optimizer file, whatever its stage."""
    state = content["optimizer_state_dict"]
    wrapped = state.get("base_optimizer_state") or state["optimizer_state_dict"]
    groups: list[dict[str, Any]] = wrapped["param_groups"]
    return groups


def made(job: Job, run_dir: Path, lr: Callable[[int], list[torch.Tensor]]) -> Path:
    """Save a job whose param groups have the learning rates that `lr` makes for a rank."""
    write(job, run_dir)
    for rank in range(job.world_size):
        content = load(optimizer_file(run_dir, rank))
        for group, value in zip(groups_of(content), lr(rank), strict=True):
            group["lr"] = value
        save(content, optimizer_file(run_dir, rank))
    return run_dir


def resharded(run: Path, zero_stage: int) -> list[list[torch.Tensor]]:
    """The learning rates of every rank's param groups after either road to 3 ranks."""
    streamshard.convert(run, run.with_suffix(".zarr"))
    found = []
    for road in ROADS:
        out = run.with_name(f"{road}-out")
        streamshard.repartition(run.with_name(road), out, world_size=3, zero_stage=zero_stage)
        contents = [load(optimizer_file(out, rank)) for rank in range(3)]
        found += [[group["lr"] for group in groups_of(content)] for content in contents]
    return found


@pytest.mark.parametrize(("stage", "target"), [(2, 2), (2, 3), (3, 2), (3, 3)])
def test_each_group_has_a_tensor_of_its_own(tmp_path: Path, stage: int, target: int) -> None:
    job = Job(stage=stage, sub_group_size=20)
    run = made(job, tmp_path / "run", lambda _: [torch.tensor(0.1), torch.tensor(0.2)])
    for first, second in resharded(run, target):
        assert torch.equal(first, torch.tensor(0.1))
        assert torch.equal(second, torch.tensor(0.2))
        first.fill_(7)
        assert second.item() != 7


def test_one_tensor_of_all_groups_stays_one(tmp_path: Path) -> None:
    """As where a default is a tensor: a scheduler that fills one of them fills all."""
    run = made(Job(), tmp_path / "run", lambda _: [torch.tensor(0.1)] * 2)
    for first, second in resharded(run, 2):
        first.fill_(7)
        assert second.item() == 7


def test_ranks_must_agree_about_them(tmp_path: Path) -> None:
    run = made(Job(), tmp_path / "run", lambda rank: [torch.tensor(0.1 + rank), torch.tensor(0.2)])
    with pytest.raises(DisagreementError, match=r"rank_1_.*param groups"):
        streamshard.inspect(run)


def test_a_step_that_one_sub_group_has_alone(tmp_path: Path) -> None:
    """A param group has one step, however many sub-groups stage 3 makes of it."""
    job = Job(stage=3, sub_group_size=20)
    run = write(job, tmp_path / "run")
    for rank in range(job.world_size):
        content = load(optimizer_file(run, rank))
        content["optimizer_state_dict"]["optimizer_state_dict"]["state"][1]["step"] += 1
        save(content, optimizer_file(run, rank))
    with pytest.raises(DisagreementError, match="sub-groups of a param group differ in state"):
        streamshard.repartition(run, tmp_path / "out", world_size=3)
