"""Muon's momentum at stages 1 and 2: whole parameters, on every rank that owns a part of them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from streamshard.errors import (
    CorruptFileError,
    DisagreementError,
    SourceError,
    UnsupportedError,
    UsageError,
)
from tests.fabricated import load, optimizer_file, save, write
from tests.job import EXPERTS, MOMENTUM, TAG, Job
from tests.test_model_parts import compare

GROUPS = (
    (
        ("wide", (9, 8)),
        ("up.0", (5, 3)),
        ("up.1", (5, 3)),
        ("down", (3, 7)),
    ),
    (("pair", (1, 2)),),
    (("bias", (7,)),),
)
MUON = Job(world_size=4, groups=GROUPS, muon=(0, 1), tied={})
EXPERT = replace(MUON, experts=EXPERTS, expert_parallel=2, muon=(0, 1, 3))
JOBS = {
    "stage-1": replace(MUON, stage=1),
    "stage-2": MUON,
    "stage-3": replace(MUON, stage=3, sub_group_size=20),
    "offload": replace(MUON, offload=True),
    "round-robin": replace(MUON, round_robin=True),
    "round-robin-aligned": replace(MUON, round_robin=True, alignment=True),
    "elements-of-4-bytes": replace(MUON, dtype=torch.float32, alignment=True),
    "tensor": replace(MUON, parts=2),
    "experts": EXPERT,
    "experts-round-robin": replace(EXPERT, round_robin=True),
    "experts-data-first": replace(EXPERT, data_before_experts=True),
}


def edit(run_dir: Path, rank: int, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change the optimizer's state in a rank's file."""
    path = optimizer_file(run_dir, rank)
    content = load(path)
    change(content["optimizer_state_dict"])
    save(content, path)
    return path


@pytest.mark.parametrize("world_size", [2, 6])
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_both_roads_lead_to_the_files_of_the_other_world(
    tmp_path: Path, job: Job, world_size: int
) -> None:
    run = write(job, tmp_path / "run")
    wanted = write(replace(job, world_size=world_size, garbage=False), tmp_path / "wanted")
    streamshard.convert(run, tmp_path / "run.zarr", chunk_size=50)
    for source, out in ((run, "direct"), (tmp_path / "run.zarr", "of-store")):
        streamshard.repartition(source, tmp_path / out, world_size=world_size * job.parts)
        compare(tmp_path / out / TAG, wanted / TAG)


def test_a_rank_without_parameters_has_no_entry(tmp_path: Path) -> None:
    streamshard.repartition(write(MUON, tmp_path / "run"), tmp_path / "out", world_size=3)
    states = [
        load(optimizer_file(tmp_path / "out", rank))["optimizer_state_dict"]["base_optimizer_state"]
        for rank in range(3)
    ]
    assert [sorted(state["state"]) for state in states] == [[0, 1, 2], [0, 2], [0, 2]]


def momentum(state: dict[str, Any]) -> torch.Tensor:
    """The momentum of the first group in an optimizer's state."""
    found: torch.Tensor = state["base_optimizer_state"]["state"][0][MOMENTUM]
    return found


@pytest.mark.parametrize("element", [0, -1])
def test_copies_that_differ_are_an_error(tmp_path: Path, element: int) -> None:
    wide = ("wide", (9, 800))  # too large to be compared whole; all ranks hold it
    run = write(replace(MUON, groups=((wide, *GROUPS[0][1:]), *GROUPS[1:])), tmp_path / "run")

    def spoil(state: dict[str, Any]) -> None:
        momentum(state)[element] *= -1

    path = edit(run, 1, spoil)
    with pytest.raises(DisagreementError, match="momentum") as error:
        streamshard.repartition(run, tmp_path / "out", world_size=2)
    assert str(path) in str(error.value)
    assert str(optimizer_file(run, 0)) in str(error.value)


def test_the_lengths_must_be_those_on_all_ranks(tmp_path: Path) -> None:
    run = write(MUON, tmp_path / "run")

    def shorten(state: dict[str, Any]) -> None:
        state["base_optimizer_state"]["state"][0][MOMENTUM] = momentum(state)[:-1].clone()

    path = edit(run, 3, shorten)
    message = rf"{path}: momentum_buffer .* 35 elements on rank 3, 36 belong there"
    with pytest.raises(CorruptFileError, match=message):
        streamshard.convert(run, tmp_path / "out.zarr")


def test_a_rank_that_owns_parameters_must_have_momentum(tmp_path: Path) -> None:
    run = write(MUON, tmp_path / "run")
    path = edit(run, 2, lambda state: state["base_optimizer_state"]["state"].pop(0))
    with pytest.raises(CorruptFileError, match=rf"{path}: .* 0 elements on rank 2, 102 belong"):
        streamshard.repartition(run, tmp_path / "out", world_size=2)


@pytest.mark.parametrize("offload", [False, True])
def test_a_config_that_says_the_other_way(tmp_path: Path, offload: bool) -> None:
    run = write(replace(MUON, offload=offload), tmp_path / "run")
    for rank in range(MUON.world_size):
        path = optimizer_file(run, rank)
        content = load(path)
        device = "none" if offload else "cpu"
        content["ds_config"]["zero_optimization"]["offload_optimizer"]["device"] = device
        save(content, path)
    with pytest.raises(CorruptFileError, match="offload_optimizer"):
        streamshard.repartition(run, tmp_path / "out", world_size=2)


def dumped(job: Job, directory: Path) -> str:
    """Save what each rank's optimizer would dump; returns the template."""
    run = write(job, directory / "run")
    (directory / "dumps").mkdir()
    for rank in range(job.world_size):
        state = load(optimizer_file(run, rank))["optimizer_state_dict"]
        save(state, directory / "dumps" / f"{rank:02d}.pt")
    return str(directory / "dumps" / "{rank:02d}.pt")


def test_dumps_do_not_tell_which_way(tmp_path: Path) -> None:
    template = dumped(MUON, tmp_path)
    with pytest.raises(UnsupportedError, match=r"00\.pt: .*offload.*source_ds_config_file="):
        streamshard.convert(template, tmp_path / "out.zarr")


def test_dumps_with_the_config_of_their_job(tmp_path: Path) -> None:
    template = dumped(MUON, tmp_path)
    config = tmp_path / "ds.json"
    config.write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
    out = str(tmp_path / "out" / "{rank:02d}.pt")
    streamshard.repartition(template, out, world_size=2, source_ds_config_file=config)
    wanted = write(replace(MUON, world_size=2), tmp_path / "wanted")
    for rank in range(2):
        ours = load(Path(out.format(rank=rank)))
        theirs = load(optimizer_file(wanted, rank))["optimizer_state_dict"]
        assert torch.equal(momentum(ours), momentum(theirs))


def test_dumps_of_stage_3_need_their_order(tmp_path: Path) -> None:
    template = dumped(replace(MUON, stage=3), tmp_path)
    like = write(MUON, tmp_path / "like")
    with pytest.raises(UnsupportedError, match=r"00\.pt: .*Muon.*stage 3 with like="):
        streamshard.inspect(template, like=like)
    like = write(replace(MUON, stage=3, world_size=1), tmp_path / "like-3")
    assert streamshard.inspect(template, like=like).groups[0].parameters == len(GROUPS[0])


SCRIPT_ORDER = (tuple(GROUPS[0][index] for index in (3, 1, 0, 2)), *GROUPS[1:])
"""How the training script passes the parameters, before Muon sorts them."""
STAGE_3 = replace(MUON, stage=3, groups=SCRIPT_ORDER)


def order(run_dir: Path, stage: int) -> list[str]:
    """Names of the first group's parameters as a model file lists them."""
    name = "zero_pp_rank_0_mp_rank_00" if stage == 3 else "mp_rank_00"
    return list(load(run_dir / TAG / f"{name}_model_states.pt")["param_shapes"][0])


def test_stages_1_and_2_have_parameters_sorted_by_size(tmp_path: Path) -> None:
    run = write(STAGE_3, tmp_path / "run")
    streamshard.repartition(run, tmp_path / "out", world_size=2, zero_stage=2)
    assert order(tmp_path / "out", 2) == ["wide", "up.0", "up.1", "down"]
    wholes = [MUON.values(MOMENTUM, name).flatten() for name, _ in GROUPS[0]]
    state = load(optimizer_file(tmp_path / "out", 1))["optimizer_state_dict"]
    assert torch.equal(momentum(state), torch.cat(wholes).bfloat16())


def test_the_order_of_stage_3_is_never_guessed(tmp_path: Path) -> None:
    two_sizes = (GROUPS[0][:2], *GROUPS[1:])
    run = write(replace(MUON, groups=two_sizes), tmp_path / "run")
    streamshard.convert(run, tmp_path / "run.zarr")
    for source in (run, tmp_path / "run.zarr"):
        with pytest.raises(UnsupportedError, match=r"Muon.*zero\.Init.*like=") as error:
            streamshard.repartition(source, tmp_path / "out", world_size=2, zero_stage=3)
        assert error.value.exit_code == 3
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("road", ["run", "run.zarr"])
def test_a_checkpoint_of_stage_3_tells_its_order(tmp_path: Path, road: str) -> None:
    run = write(MUON, tmp_path / "run")
    streamshard.convert(run, tmp_path / "run.zarr")
    like = write(replace(STAGE_3, world_size=1), tmp_path / "like")
    out = tmp_path / "out"
    streamshard.repartition(tmp_path / road, out, world_size=2, zero_stage=3, like=like)
    assert order(out, 3) == [name for name, _ in SCRIPT_ORDER[0]]
    streamshard.repartition(out, tmp_path / "back", world_size=4, zero_stage=2)
    assert order(tmp_path / "back", 2) == order(run, 2)
    for rank in range(4):
        back, before = (load(optimizer_file(d, rank)) for d in (tmp_path / "back", run))
        states = back["optimizer_state_dict"], before["optimizer_state_dict"]
        assert torch.equal(*map(momentum, states))


def test_the_checkpoint_that_tells_must_be_of_stage_3_and_of_the_job(tmp_path: Path) -> None:
    run = write(MUON, tmp_path / "run")
    with pytest.raises(UnsupportedError, match="like="):
        streamshard.repartition(run, tmp_path / "out", world_size=2, zero_stage=3, like=run)
    other = replace(STAGE_3, groups=(GROUPS[0][:-1], *GROUPS[1:]))
    like = write(other, tmp_path / "like")
    with pytest.raises(DisagreementError, match="not of the same job"):
        streamshard.repartition(run, tmp_path / "out", world_size=2, zero_stage=3, like=like)


def test_one_size_of_parameters_has_one_order(tmp_path: Path) -> None:
    groups = ((("up.0", (5, 3)), ("up.1", (5, 3))), *GROUPS[1:])
    job = replace(MUON, groups=groups)
    run = write(job, tmp_path / "run")
    streamshard.repartition(run, tmp_path / "out", world_size=2, zero_stage=3)
    assert order(tmp_path / "out", 3) == ["up.0", "up.1"]
    with pytest.raises(UsageError, match="leave like= out"):
        streamshard.repartition(run, tmp_path / "again", world_size=2, zero_stage=3, like=run)


def test_what_elastic_checkpoint_cuts_off_is_missed(tmp_path: Path) -> None:
    run = write(replace(MUON, elastic=True), tmp_path / "run")
    like = write(MUON, tmp_path / "like")
    with pytest.raises(SourceError, match=r"rank_3_.*cuts the last 5 of 36 elements off Muon's"):
        streamshard.repartition(run, tmp_path / "out", world_size=2, like=like)
