"""Tensor parallel parts and experts: each is a data-parallel model part or group of its own."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zarr

import streamshard
from streamshard.cli.main import main
from streamshard.errors import (
    DisagreementError,
    IncompleteError,
    SourceError,
    UnsupportedError,
    UsageError,
)
from tests.fabricated import load, save, write
from tests.job import EXPERTS, TAG, Job
from tests.test_repartition_fabricated import differences

TENSOR = Job(world_size=3, parts=2)
EXPERT = Job(world_size=4, experts=EXPERTS, expert_parallel=2)
JOBS = {
    "tensor-1": replace(TENSOR, stage=1),
    "tensor-2": TENSOR,
    "tensor-3": replace(TENSOR, stage=3, sub_group_size=20),
    "tensor-round-robin": replace(TENSOR, round_robin=True),
    "expert-1": replace(EXPERT, stage=1),
    "expert-2": EXPERT,
    "expert-3-ranks": replace(EXPERT, world_size=6, expert_parallel=3),
    "expert-everywhere": replace(EXPERT, expert_parallel=4),
    "expert-data-first": replace(EXPERT, data_before_experts=True),
    "expert-round-robin": replace(EXPERT, round_robin=True, alignment=True),
    "expert-tensor": replace(EXPERT, parts=2),
}


def compare(found: Path, wanted: Path) -> None:
    """Require two tag directories to hold the same files with the same values."""
    names = sorted(path.name for path in wanted.iterdir())
    assert sorted(path.name for path in found.iterdir()) == names
    for name in names:
        assert differences(load(found / name), load(wanted / name), name) == []


def unit(job: Job) -> int:
    """Ranks that one whole copy of the model takes."""
    return job.parts * job.expert_parallel


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_both_roads_lead_to_the_files_of_the_other_world(
    tmp_path: Path, job: Job, copies: int
) -> None:
    run = write(job, tmp_path / "run")
    other = replace(job, world_size=copies * job.expert_parallel, garbage=False)
    wanted = write(other, tmp_path / "wanted")
    streamshard.convert(run, tmp_path / "run.zarr", chunk_size=50)
    for source, out in ((run, "direct"), (tmp_path / "run.zarr", "of-store")):
        report = streamshard.repartition(source, tmp_path / out, world_size=copies * unit(job))
        assert report.source_world_size == job.world_size * job.parts
        compare(tmp_path / out / TAG, wanted / TAG)


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_there_and_back_is_where_it_began(tmp_path: Path, job: Job) -> None:
    run = write(replace(job, garbage=False), tmp_path / "run")
    ranks = job.world_size * job.parts
    streamshard.repartition(run, tmp_path / "there", world_size=5 * unit(job))
    streamshard.repartition(tmp_path / "there", tmp_path / "back", world_size=ranks)
    compare(tmp_path / "back" / TAG, run / TAG)


def test_the_store_numbers_experts_throughout_the_model(tmp_path: Path) -> None:
    write(EXPERT, tmp_path / "run")
    streamshard.convert(tmp_path / "run", tmp_path / "run.zarr")
    state = zarr.open_group(tmp_path / "run.zarr", mode="r")["state/exp_avg"]
    assert isinstance(state, zarr.Group)
    name = EXPERTS[0][0]
    for expert_rank in range(EXPERT.expert_parallel):
        wanted = EXPERT.values("exp_avg", name, expert_rank)
        array = state[EXPERT.in_model(name, expert_rank)]
        assert isinstance(array, zarr.Array)
        assert torch.equal(torch.tensor(array[:]), wanted)


def test_the_store_keeps_the_parts_of_the_model_apart(tmp_path: Path) -> None:
    write(TENSOR, tmp_path / "run")
    streamshard.convert(tmp_path / "run", tmp_path / "run.zarr")
    store = zarr.open_group(tmp_path / "run.zarr", mode="r")
    for part in range(2):
        array = store[f"mp_rank_{part:02d}/state/fp32/embed.weight"]
        assert isinstance(array, zarr.Array)
        wanted = replace(TENSOR, part=part).values("fp32", "embed.weight")
        assert torch.equal(torch.tensor(array[:]), wanted)


@pytest.mark.parametrize(
    ("job", "world_size", "multiples"),
    [(TENSOR, 3, "2, 4, 6"), (EXPERT, 5, "2, 4, 6"), (JOBS["expert-tensor"], 6, "4, 8, 12")],
)
def test_ranks_that_do_not_divide_are_refused_with_those_that_do(
    tmp_path: Path, job: Job, world_size: int, multiples: str
) -> None:
    run = write(job, tmp_path / "run")
    with pytest.raises(UsageError, match=f"give a multiple of .*{multiples}"):
        streamshard.repartition(run, tmp_path / "out", world_size=world_size)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("mp_rank_01_model_states.pt", "mp_rank_01_model_states.pt: the model file is missing"),
        ("bf16_zero_pp_rank_2_mp_rank_01_optim_states.pt", "rank 2 of at least 3 is missing"),
        ("*mp_rank_01*", "one of 2 tensor or pipeline parallel parts"),
        ("*mp_rank_00*", "mp_rank_00_optim_states.pt: rank 0 of at least 3 is missing"),
    ],
)
def test_a_missing_file_of_a_part_is_named(tmp_path: Path, lost: str, message: str) -> None:
    run = write(TENSOR, tmp_path / "run")
    for path in (run / TAG).glob(lost):
        path.unlink()
    with pytest.raises(IncompleteError, match=message):
        streamshard.inspect(run)


def test_parts_of_different_steps_are_refused(tmp_path: Path) -> None:
    run = write(TENSOR, tmp_path / "run")
    path = run / TAG / "mp_rank_01_model_states.pt"
    state = load(path)
    state["global_steps"] += 1
    save(state, path)
    with pytest.raises(DisagreementError, match=r"disagrees with .* about global_steps"):
        streamshard.inspect(run)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    run = write(EXPERT, tmp_path / "run")
    (run / TAG / "layer_0_expert_2_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(IncompleteError, match=r"expert_2_mp_rank_00_model_states\.pt: missing"):
        streamshard.inspect(run)
    for path in (run / TAG).glob("layer_*"):
        path.unlink()
    with pytest.raises(IncompleteError, match=r"expert_0_mp_rank_00_model_states\.pt: missing"):
        streamshard.inspect(run)


def test_experts_that_other_tensor_ranks_have_are_refused(tmp_path: Path) -> None:
    """Saved without `enable_expert_tensor_parallelism`, as far as a message depends on it."""
    run = write(JOBS["expert-tensor"], tmp_path / "run")
    for path in (run / TAG).glob("*_optim_states.pt"):
        state = load(path)
        base = state["optimizer_state_dict"]["base_optimizer_state"]
        base["param_groups"][2]["name"] = "ep_size_4"
        save(state, path)
    message = r"mp_rank_00_optim_states\.pt: the experts of param group 'ep_size_4' are on 8 ranks"
    with pytest.raises(UnsupportedError, match=f"{message}, .*without enable_expert_tensor_para"):
        streamshard.inspect(run)


def test_parts_that_deepspeed_does_not_save_are_named(tmp_path: Path) -> None:
    """Those of tensor-parallel ranks that share whole experts with others."""
    run = write(JOBS["expert-tensor"], tmp_path / "run")
    model = run / TAG / "mp_rank_01_model_states.pt"
    model.unlink()
    message = r"mp_rank_01_model_states\.pt: the model file is missing"
    with pytest.raises(IncompleteError, match=f"{message}$"):
        streamshard.inspect(run)
    for path in (run / TAG).glob("layer_*_mp_rank_01_*"):
        path.unlink()
    with pytest.raises(IncompleteError, match=f"{message}, and so are .* DeepSpeed saves neither"):
        streamshard.inspect(run)


def test_a_torn_expert_file_is_noticed(tmp_path: Path) -> None:
    run = write(EXPERT, tmp_path / "run")
    path = run / TAG / "layer_0_expert_1_mp_rank_00_model_states.pt"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SourceError, match="expert_1_mp_rank_00"):
        streamshard.inspect(run)


def test_a_wrong_order_of_expert_ranks_is_noticed(tmp_path: Path) -> None:
    """A config that was changed after the save would hand experts to the wrong ranks."""
    run = write(replace(EXPERT, data_before_experts=True), tmp_path / "run")
    for path in (run / TAG).glob("*_optim_states.pt"):
        state = load(path)
        state["ds_config"]["use_data_before_expert_parallelism"] = False
        save(state, path)
    with pytest.raises(SourceError, match="use_data_before_expert_parallelism"):
        streamshard.inspect(run)


def test_inspect_counts_ranks_parts_and_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(JOBS["expert-tensor"], tmp_path / "run")
    assert main(["inspect", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    counted = [found[key] for key in ("data_parallel", "model_parallel", "expert_parallel")]
    assert (found["world_size"], counted) == (8, [4, 2, 2])
    assert (found["tensor_parallel"], found["pipeline_parallel"]) == (2, 1)
    names = [found["parameters"][-k]["name"] for k in (1, 2, 3, 4)]
    assert len(set(names)) == 4
    assert main(["inspect", str(run)]) == 0
    shown = capsys.readouterr().out
    assert main(["inspect", str(run), "--svg", str(tmp_path / "cut.svg")]) == 0
    assert "mp_rank_01, expert rank 1" in shown
    drawn, degrees = (tmp_path / "cut.svg").read_text(), "4 data-parallel x 2 tensor-parallel, exp"
    assert f"world size 8: {degrees}erts over 2" in shown
    assert f"saved by 8 ranks: {degrees}erts over 2" in drawn
    assert "mp_rank_01 (tensor rank 1 of 2), param group 2, expert rank 1 of 2" in drawn


def test_experts_stay_out_of_stage_3(tmp_path: Path) -> None:
    run = write(EXPERT, tmp_path / "run")
    with pytest.raises(UsageError, match="stage 3 does not train with expert parallelism"):
        streamshard.repartition(run, tmp_path / "out", world_size=2, zero_stage=3)


def test_dumps_of_experts(tmp_path: Path) -> None:
    """Raw dumps of a job with experts name them by rank, as the shards do."""
    write(EXPERT, tmp_path / "run")
    write(replace(EXPERT, world_size=2), tmp_path / "wanted")
    for name, directory in (("run", "dumps"), ("wanted", "wanted-dumps")):
        (tmp_path / directory).mkdir()
        for path in sorted((tmp_path / name / TAG).glob("*_optim_states.pt")):
            rank = path.name.split("_")[4]
            save(load(path)["optimizer_state_dict"], tmp_path / directory / f"{rank}.pt")
    source, target = (str(tmp_path / d / "{rank}.pt") for d in ("dumps", "found"))
    streamshard.repartition(source, target, world_size=2)
    compare(tmp_path / "found", tmp_path / "wanted-dumps")
    shutil.rmtree(tmp_path / "found")
    with pytest.raises(UsageError, match="multiple of 2"):
        streamshard.repartition(source, target, world_size=3)
