"""A missing file is named as the job that saved it names it."""

from pathlib import Path

import pytest

import streamshard
from tests.fabricated import write
from tests.job import TAG, Job


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_all_optimizer_files_are_missing(stage: int, tmp_path: Path) -> None:
    """Their prefix is known by the config that the model files keep."""
    run = write(Job(stage=stage), tmp_path / "run")
    lost = sorted((run / TAG).glob("*_optim_states.pt"))
    for path in lost:
        path.unlink()
    told = " ".join(problem.message for problem in streamshard.verify(run).problems)
    assert all(str(path) in told for path in lost), told


def test_the_last_rank_of_stage_3(tmp_path: Path) -> None:
    run = write(Job(stage=3), tmp_path / "run")
    lost = max((run / TAG).glob("*_optim_states.pt"))
    lost.unlink()
    told = " ".join(problem.message for problem in streamshard.verify(run).problems)
    assert lost.name in told, told
