"""`elastic_checkpoint` keeps neither padding nor hyper-parameters; another checkpoint has these."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from streamshard.errors import DisagreementError, StreamshardError, UnsupportedError
from tests.cli.conftest import streamshard as command
from tests.comparing import differences
from tests.fabricated import (
    DUMPS,
    edit,
    edit_optimizers,
    load,
    optimizer_file,
    optimizer_state,
    save,
    wrapped,
    write,
    write_dumps,
)
from tests.job import EXPERTS, TAG, Job

JOB = Job(world_size=4, elastic=True)
JOBS = {
    "stage-1": replace(JOB, stage=1),
    "stage-2": JOB,
    "round-robin": replace(JOB, round_robin=True),
    "aligned": replace(JOB, alignment=True),
    "tensor": replace(JOB, parts=2),
    "experts": replace(JOB, experts=EXPERTS, expert_parallel=2),
}


def rigid(job: Job, run_dir: Path, **changes: object) -> Path:
    """Save the same job without `elastic_checkpoint`, with changes to every param group."""
    write(replace(job, elastic=False), run_dir)
    edit_optimizers(
        run_dir, lambda state: [group.update(changes) for group in wrapped(state)["param_groups"]]
    )
    return run_dir


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(JOB, tmp_path / "run")


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


def test_hyper_parameters_are_those_of_the_other_checkpoint(run: Path, tmp_path: Path) -> None:
    like = rigid(JOB, tmp_path / "like", lr=0.5)
    streamshard.repartition(run, tmp_path / "out", world_size=2, like=like)
    for found in (
        wrapped(optimizer_state(tmp_path / "out", 1))["param_groups"],
        [group.hyper_parameters for group in streamshard.inspect(run, like=like).groups],
    ):
        assert [group["lr"] for group in found] == [0.5, 0.5]


def test_steps_that_param_groups_count_are_those_of_the_files(run: Path, tmp_path: Path) -> None:
    edit_optimizers(run, lambda state: state.update(base_optimizer_state_step=7))
    like = rigid(JOB, tmp_path / "like", step=3)
    streamshard.repartition(run, tmp_path / "out", world_size=2, like=like)
    state = optimizer_state(tmp_path / "out", 1)
    assert "base_optimizer_state_step" not in state
    assert [group["step"] for group in wrapped(state)["param_groups"]] == [7, 7]


def test_before_the_first_step(run: Path, tmp_path: Path) -> None:
    edit_optimizers(run, lambda state: state.update(base_optimizer_state=[{}, {}]))
    streamshard.repartition(run, tmp_path / "out", world_size=2, like=rigid(JOB, tmp_path / "like"))
    assert wrapped(optimizer_state(tmp_path / "out", 1))["state"] == {}


def test_without_another_checkpoint_nothing_is_made_up(run: Path, tmp_path: Path) -> None:
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


def one_rigid_rank(run: Path) -> None:
    other = rigid(JOB, run.with_name("other"))
    content = load(optimizer_file(other, 2))
    content["ds_config"]["zero_optimization"]["elastic_checkpoint"] = True
    save(content, optimizer_file(run, 2))


def other_steps(run: Path) -> None:
    edit_optimizers(run, lambda state: state.update(base_optimizer_state_step=7))
    edit(
        optimizer_file(run, 3),
        lambda held: held["optimizer_state_dict"].update(base_optimizer_state_step=8),
    )


def unchanged(run: Path) -> None: ...


_FIRST, _SECOND = JOB.groups
_OTHER_GROUPS = replace(JOB, groups=(_FIRST[1:], (*_SECOND, _FIRST[0])))
_ONE_GROUP = replace(JOB, groups=((*_FIRST, *_SECOND),))
_STEP = {"step": 3}
_LR = {"lr": torch.tensor(0.5)}
REFUSED: list[tuple[Callable[[Path], None], Job, dict[str, Any], type[StreamshardError], str]] = [
    (
        unchanged,
        _OTHER_GROUPS,
        {},
        DisagreementError,
        r"'embed\.weight' is in param group 0 either",
    ),
    (
        unchanged,
        _ONE_GROUP,
        {},
        DisagreementError,
        "2 groups, the checkpoint given .* has 1 groups",
    ),
    (
        unchanged,
        replace(JOB, parts=2),
        {},
        DisagreementError,
        "1 part of the model, .* like= has 2",
    ),
    (unchanged, JOB, _STEP, DisagreementError, "of another optimizer than"),
    (unchanged, JOB, _LR, UnsupportedError, "like= are tensors"),
    (one_rigid_rank, JOB, {}, DisagreementError, r"rank_2_.*no elastic_checkpoint"),
    (other_steps, JOB, _STEP, DisagreementError, r"rank_3_.*param groups"),
]


@pytest.mark.parametrize(("change", "other", "changes", "kind", "message"), REFUSED)
def test_both_checkpoints_must_be_of_one_job(
    run: Path,
    tmp_path: Path,
    change: Callable[[Path], None],
    other: Job,
    changes: dict[str, Any],
    kind: type[StreamshardError],
    message: str,
) -> None:
    change(run)
    like = rigid(other, tmp_path / "like", **changes)
    with pytest.raises(kind, match=message):
        streamshard.repartition(run, tmp_path / "out", world_size=2, like=like)


def test_the_other_checkpoint_may_not_be_elastic_as_well(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="saved with elastic_checkpoint"):
        streamshard.repartition(run, tmp_path / "out", world_size=2, like=run)


def test_dumps(run: Path, tmp_path: Path) -> None:
    like = rigid(JOB, tmp_path / "like")
    wanted = write(replace(JOB, world_size=2, elastic=False), tmp_path / "wanted")
    template, out = write_dumps(run, tmp_path / "dumps"), tmp_path / "out" / DUMPS
    with pytest.raises(UnsupportedError, match=r"00\.pt: saved with elastic_checkpoint"):
        streamshard.repartition(template, out, world_size=2)
    streamshard.repartition(template, out, world_size=2, like=like)
    for rank in range(2):
        found = load(Path(str(out).format(rank=rank)))
        assert differences(found, optimizer_state(wanted, rank)) == []
