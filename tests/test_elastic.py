"""`elastic_checkpoint` keeps neither padding nor hyper-parameters; another checkpoint has these."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from streamshard.errors import DisagreementError, UnsupportedError
from tests.cli.conftest import streamshard as command
from tests.fabricated import load, optimizer_file, save, write
from tests.job import EXPERTS, TAG, Job
from tests.test_repartition_fabricated import differences

JOB = Job(world_size=4, elastic=True)
JOBS = {
    "stage-1": replace(JOB, stage=1),
    "stage-2": JOB,
    "round-robin": replace(JOB, round_robin=True),
    "aligned": replace(JOB, alignment=True),
    "tensor": replace(JOB, parts=2),
    "experts": replace(JOB, experts=EXPERTS, expert_parallel=2),
}


def edit(run_dir: Path, job: Job, change: Callable[[dict[str, Any], int], None]) -> None:
    """Change the optimizer's state in all files."""
    for rank in range(job.world_size):
        path = optimizer_file(run_dir, rank)
        content = load(path)
        change(content["optimizer_state_dict"], rank)
        save(content, path)


def rigid(
    job: Job, run_dir: Path, change: Callable[[dict[str, Any]], object] | None = None
) -> Path:
    """Save the same job without `elastic_checkpoint`, with changes to every param group."""
    job = replace(job, elastic=False)
    write(job, run_dir)

    def all_groups(state: dict[str, Any], _: int) -> None:
        for group in state["base_optimizer_state"]["param_groups"]:
            if change is not None:
                change(group)

    edit(run_dir, job, all_groups)
    return run_dir


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_the_files_are_those_of_the_rigid_job_of_the_other_world(tmp_path: Path, job: Job) -> None:
    run = write(job, tmp_path / "run")
    like = rigid(replace(job, world_size=6), tmp_path / "like")
    wanted = write(replace(job, world_size=2, elastic=False, garbage=False), tmp_path / "wanted")
    streamshard.convert(run, tmp_path / "run.zarr", like=like)
    ranks = 2 * job.parts
    direct, of_store = tmp_path / "direct", tmp_path / "of-store"
    report = streamshard.repartition(run, direct, world_size=ranks, like=like)
    streamshard.repartition(tmp_path / "run.zarr", of_store, world_size=ranks)
    assert any(f"are those of {like} at {TAG}" in note for note in report.notes)
    for path in sorted((wanted / TAG).iterdir()):
        assert (direct / TAG / path.name).read_bytes() == (of_store / TAG / path.name).read_bytes()
        found = differences(load(direct / TAG / path.name), load(path), path.name)
        assert [line for line in found if "/elastic_checkpoint:" not in line] == []


def test_whose_hyper_parameters_they_are(tmp_path: Path) -> None:
    run = write(JOB, tmp_path / "run")
    like = rigid(JOB, tmp_path / "like", lambda group: group.update(lr=0.5))
    streamshard.repartition(run, tmp_path / "out", world_size=2, like=like)
    state = load(optimizer_file(tmp_path / "out", 1))["optimizer_state_dict"]
    assert [group["lr"] for group in state["base_optimizer_state"]["param_groups"]] == [0.5, 0.5]


def test_steps_that_param_groups_count_are_those_of_the_files(tmp_path: Path) -> None:
    run = write(JOB, tmp_path / "run")
    edit(run, JOB, lambda state, _: state.update(base_optimizer_state_step=7))
    like = rigid(JOB, tmp_path / "like", lambda group: group.update(step=3))
    streamshard.repartition(run, tmp_path / "out", world_size=2, like=like)
    state = load(optimizer_file(tmp_path / "out", 1))["optimizer_state_dict"]
    assert "base_optimizer_state_step" not in state
    assert [group["step"] for group in state["base_optimizer_state"]["param_groups"]] == [7, 7]


def test_before_the_first_step(tmp_path: Path) -> None:
    run = write(JOB, tmp_path / "run")
    edit(run, JOB, lambda state, _: state.update(base_optimizer_state=[{}, {}]))
    like = rigid(JOB, tmp_path / "like")
    streamshard.repartition(run, tmp_path / "out", world_size=2, like=like)
    state = load(optimizer_file(tmp_path / "out", 1))["optimizer_state_dict"]
    assert state["base_optimizer_state"]["state"] == {}


def test_inspect_takes_the_other_checkpoint_too(tmp_path: Path) -> None:
    run = write(JOB, tmp_path / "run")
    like = rigid(JOB, tmp_path / "like")
    found = streamshard.inspect(run, like=like)
    assert [group.hyper_parameters["lr"] for group in found.groups] == [0.001, 0.002]


def test_without_another_checkpoint_nothing_is_made_up(tmp_path: Path) -> None:
    run = write(JOB, tmp_path / "run")
    for arguments in (
        ("repartition", run, tmp_path / "out", "--world-size", 2),
        ("convert", run, tmp_path / "out.zarr"),
        ("inspect", run),
    ):
        done = command(*arguments)
        assert done.code == 3
        assert f"{optimizer_file(run, 0)}: saved with elastic_checkpoint" in done.err
        assert "same job with --like" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_other_checkpoint_may_not_be_elastic_as_well(tmp_path: Path) -> None:
    run = write(JOB, tmp_path / "run")
    with pytest.raises(UnsupportedError, match="saved with elastic_checkpoint"):
        streamshard.repartition(run, tmp_path / "out", world_size=2, like=run)


OTHERS: dict[str, tuple[Job, Callable[[dict[str, Any]], object] | None, str]] = {
    "other-groups": (
        replace(JOB, groups=(JOB.groups[0][1:], (*JOB.groups[1], JOB.groups[0][0]))),
        None,
        r"'embed\.weight' is in param group 0 either here or",
    ),
    "fewer-groups": (
        replace(JOB, groups=((*JOB.groups[0], *JOB.groups[1]),)),
        None,
        "2 groups, the checkpoint given with like= has 1 groups",
    ),
    "other-parts": (replace(JOB, parts=2), None, "1 parts of the model, .* like= has 2"),
    "another-optimizer": (JOB, lambda group: group.update(step=3), "of another optimizer than"),
}


@pytest.mark.parametrize(("job", "change", "message"), OTHERS.values(), ids=OTHERS)
def test_the_other_checkpoint_must_be_of_the_same_job(
    tmp_path: Path, job: Job, change: Callable[[dict[str, Any]], object] | None, message: str
) -> None:
    run = write(JOB, tmp_path / "run")
    like = rigid(job, tmp_path / "like", change)
    with pytest.raises(DisagreementError, match=message):
        streamshard.repartition(run, tmp_path / "out", world_size=2, like=like)


def test_hyper_parameters_that_are_tensors_stay_where_they_are(tmp_path: Path) -> None:
    run = write(JOB, tmp_path / "run")
    like = rigid(JOB, tmp_path / "like", lambda group: group.update(lr=torch.tensor(0.5)))
    with pytest.raises(UnsupportedError, match="like= are tensors"):
        streamshard.repartition(run, tmp_path / "out", world_size=2, like=like)


def test_one_rank_alone_is_not_elastic(tmp_path: Path) -> None:
    run = write(JOB, tmp_path / "run")
    like = rigid(JOB, tmp_path / "like")
    content = load(optimizer_file(like, 2))
    content["ds_config"]["zero_optimization"]["elastic_checkpoint"] = True
    save(content, optimizer_file(run, 2))
    with pytest.raises(DisagreementError, match=r"rank_2_.*no elastic_checkpoint"):
        streamshard.repartition(run, tmp_path / "out", world_size=2, like=like)


def test_ranks_that_count_other_steps(tmp_path: Path) -> None:
    run = write(JOB, tmp_path / "run")
    edit(run, JOB, lambda state, rank: state.update(base_optimizer_state_step=7 + rank // 3))
    like = rigid(JOB, tmp_path / "like", lambda group: group.update(step=3))
    with pytest.raises(DisagreementError, match=r"rank_3_.*param groups"):
        streamshard.repartition(run, tmp_path / "out", world_size=2, like=like)


def test_dumps(tmp_path: Path) -> None:
    run = write(JOB, tmp_path / "run")
    like = rigid(JOB, tmp_path / "like")
    wanted = write(replace(JOB, world_size=2, elastic=False), tmp_path / "wanted")
    (tmp_path / "dumps").mkdir()
    for rank in range(JOB.world_size):
        state = load(optimizer_file(run, rank))["optimizer_state_dict"]
        save(state, tmp_path / "dumps" / f"{rank}.pt")
    template, out = (str(tmp_path / name / "{rank}.pt") for name in ("dumps", "out"))
    with pytest.raises(UnsupportedError, match=r"0\.pt: saved with elastic_checkpoint"):
        streamshard.repartition(template, out, world_size=2)
    streamshard.repartition(template, out, world_size=2, like=like)
    for rank in range(2):
        theirs = load(optimizer_file(wanted, rank))["optimizer_state_dict"]
        assert differences(load(Path(out.format(rank=rank))), theirs) == []
