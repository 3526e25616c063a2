"""Distributed checkpoints hold a fabricated job's optimizer as torch's own keeps it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import streamshard
from streamshard.errors import UnsupportedError
from tests.exported import in_fp32, read, same, states
from tests.fabricated import edit, optimizer_file, write
from tests.job import MUON, Job

ADAM = {"lr": 0.25, "betas": [0.5, 0.75], "eps": 1e-5, "weight_decay": 0.0}
"""What DeepSpeed's own Adam keeps in a param group, all of it unlike torch's defaults."""
ADDED = ("amsgrad", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused",
         "maximize")  # fmt: skip


def set_groups(run: Path, ranks: int, **values: object) -> None:
    """Give all param groups of a job below stage 3 the same hyper-parameters."""

    def change(state: dict[str, Any]) -> None:
        for group in state["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
            params = group["params"]
            group.clear()
            group |= {**values, "params": params}

    for rank in range(ranks):
        edit(optimizer_file(run, rank), change)


class Trained(nn.Module):
    """A module with the names and shapes of the fabricated job's trained parameters."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        for name, shape in job.shapes.items():
            *path, last = name.split(".")
            place: nn.Module = self
            for part in path:
                if not hasattr(place, part):
                    place.add_module(part, nn.Module())
                place = getattr(place, part)
            place.register_parameter(last, nn.Parameter(torch.zeros(shape)))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_an_optimizer_of_deepspeed_goes_on_as_torchs(
    kind: type[torch.optim.Optimizer], flat: bool, tmp_path: Path
) -> None:
    job = Job(stage=2, frozen=(), tied={})
    run = write(job, tmp_path / "run")
    set_groups(run, job.world_size, **ADAM, bias_correction=True)
    report = streamshard.export(run, tmp_path / "out", format="dcp")
    (note,) = [note for note in report.notes if "torch's defaults" in note]
    assert all(key in note for key in ADDED)
    model = Trained(job)
    params = dict(model.named_parameters())
    groups = [{"params": [params[name] for name, _ in group]} for group in job.groups]
    optimizer = kind(groups)  # type: ignore[call-arg]
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(model, optimizer, options=options)
    dcp_load({"model": weights, "optim": state}, checkpoint_id=tmp_path / "out", no_dist=True)
    set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options
    )
    same(dict(model.state_dict()), {name: in_fp32(job)[name] for name in job.shapes})
    for name, param in params.items():
        same(optimizer.state[param], states(job)[name])
    default = kind([torch.zeros(1)]).param_groups[0]  # type: ignore[call-arg]
    for group in optimizer.param_groups:
        assert {k: v for k, v in group.items() if k in ADAM} == ADAM
        assert {k: group[k] for k in ADDED} == {k: default[k] for k in ADDED}


def test_a_learning_rate_that_is_a_tensor_stays_one(tmp_path: Path) -> None:
    job = Job(stage=2)
    run = write(job, tmp_path / "run")
    set_groups(run, job.world_size, **{**ADAM, "lr": torch.tensor(0.125)})
    streamshard.export(run, tmp_path / "out", format="dcp", verify=True)
    (first, second) = read(tmp_path / "out")["optim"]["param_groups"]
    assert torch.equal(first["lr"], torch.tensor(0.125))
    assert torch.equal(second["lr"], torch.tensor(0.125))


@pytest.mark.parametrize("step", [7, torch.tensor(7), torch.tensor([7.0]), 7.0])
def test_steps_become_what_torch_counts_in(step: object, tmp_path: Path) -> None:
    run = with_step(tmp_path, step)
    streamshard.export(run, tmp_path / "out", format="dcp")
    for state in read(tmp_path / "out")["optim"]["state"].values():
        assert (state["step"].dtype, state["step"].shape) == (torch.float32, ())
        assert state["step"] == 7


@pytest.mark.parametrize("step", [(1 << 24) + 1, -1, 7.5, torch.tensor([7.0, 8.0]), "seven", True])
def test_steps_that_torch_cannot_count_are_refused(step: object, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="step"):
        streamshard.export(with_step(tmp_path, step), tmp_path / "out", format="dcp")


def with_step(place: Path, step: object) -> Path:
    """Write a job whose optimizer counts in some other way."""
    run = write(Job(stage=2), place / "run")

    def change(state: dict[str, Any]) -> None:
        for held_state in state["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            held_state["step"] = step

    for rank in range(2):
        edit(optimizer_file(run, rank), change)
    return run


def test_before_the_first_step_there_are_no_states_and_a_note_says_so(tmp_path: Path) -> None:
    job = Job(stage=2)
    run = write(job, tmp_path / "run")
    for rank in range(2):
        edit(
            optimizer_file(run, rank),
            lambda state: state["optimizer_state_dict"]["base_optimizer_state"]["state"].clear(),
        )
    report = streamshard.export(run, tmp_path / "out", format="dcp", verify=True)
    assert any("before the optimizer's first step" in note for note in report.notes)
    found = read(tmp_path / "out")
    assert "state" not in found["optim"]
    assert [group["lr"] for group in found["optim"]["param_groups"]] == [0.001, 0.002]
    same(found["model"], in_fp32(job))


@pytest.mark.parametrize("stage", [2, 3])
def test_the_momentum_of_muon_goes_by_its_name(stage: int, tmp_path: Path) -> None:
    job = replace(MUON, stage=stage)
    streamshard.export(write(job, tmp_path / "run"), tmp_path / "out", format="dcp", verify=True)
    found = read(tmp_path / "out")["optim"]["state"]
    for number, group in enumerate(job.groups):
        for name, _ in group:
            if number in job.muon:
                wanted = {"momentum_buffer": job.values("momentum_buffer", name).bfloat16()}
            else:
                wanted = states(job)[name]
            same(found[name], wanted)


def test_adam_without_bias_correction_is_refused(tmp_path: Path) -> None:
    run = write(Job(stage=2), tmp_path / "run")
    set_groups(run, 2, **ADAM, bias_correction=False)
    with pytest.raises(UnsupportedError, match="bias correction"):
        streamshard.export(run, tmp_path / "out", format="dcp")
