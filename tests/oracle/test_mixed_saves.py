"""A job that dies while it saves a tag for the second time leaves files of two saves."""

import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from tests.oracle.cases import BF16_OPTIMIZER, SUB_GROUPS
from tests.oracle.jobs import Resume, Train
from tests.oracle.models import Case
from tests.oracle.ranks import require_success, run_jobs

TAG = "last"
SAID = "optimizer's files are of step 2, the model's of step 3"
CASES = [BF16_OPTIMIZER, SUB_GROUPS]


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves of one tag at steps 2 and 3, and what the job leaves that dies in the second one.

    DeepSpeed writes the model files first, then those of the optimizer.
    """
    root = tmp_path_factory.mktemp("mixed")
    trains = [
        Train(case, root / f"{case.name}-{steps}", None, steps=steps, tag=TAG)
        for case in CASES
        for steps in (2, 3)
    ]
    require_success(run_jobs(2, trains, root / "ranks"))
    for case in CASES:
        died = root / f"{case.name}-died"
        shutil.copytree(root / f"{case.name}-2", died)
        for path in (root / f"{case.name}-3" / TAG).glob("*model_states.pt"):
            shutil.copy(path, died / TAG)
    return root


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_files_of_two_saves_are_noted(case: Case, saves: Path, tmp_path: Path) -> None:
    died = saves / f"{case.name}-died"
    reports: list[Any] = [
        streamshard.repartition(died, tmp_path / "out", world_size=3),
        streamshard.convert(died, tmp_path / "run.zarr"),
        streamshard.repartition(tmp_path / "run.zarr", tmp_path / "of-store", world_size=3),
        streamshard.verify(died),
    ]
    assert [SAID in " ".join(report.notes) for report in reports] == [True] * len(reports)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_files_of_one_save_are_not(case: Case, saves: Path, tmp_path: Path) -> None:
    whole = saves / f"{case.name}-3"
    assert "of two saves" not in " ".join(
        streamshard.repartition(whole, tmp_path / "out", world_size=3).notes
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_they_do_not_count_as_one_of_the_newest(case: Case, saves: Path, tmp_path: Path) -> None:
    run, archive = tmp_path / "run", tmp_path / "archive"
    for step, made in enumerate(("2", "2", "3", "died"), 1):
        shutil.copytree(saves / f"{case.name}-{made}" / TAG, run / f"global_step{step}")
    (run / "latest").write_text("global_step4")
    found = streamshard.compact(run, archive, keep_last=2, min_age=timedelta(0), dry_run=True)
    kept = {tag.step: tag.reason for tag in found.tags if tag.action == "kept"}
    assert kept.keys() == {2, 3, 4}
    assert [step for step, reason in kept.items() if "of two saves" in reason] == [4]


class Harmless:
    """Is pickled as a call of a function, as hostile files have it."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return os.getcwd, ()


def test_a_live_load_warns_once_of_what_files_call(saves: Path, tmp_path: Path) -> None:
    run = shutil.copytree(saves / f"{BF16_OPTIMIZER.name}-3", tmp_path / "run")
    for path in (run / TAG).glob("*model_states.pt"):
        torch.save({**torch.load(path, weights_only=False), "planted": Harmless()}, path)
    for ranks in (2, 3):
        logs = tmp_path / f"at{ranks}"
        resume = Resume(BF16_OPTIMIZER, run, tmp_path / f"{ranks}.pt", reshards=True)
        require_success(run_jobs(ranks, [resume], logs))
        said = [path.read_text() for path in sorted(logs.glob("*/rank*.log"))]
        assert ["DANGER: the training state calls posix.getcwd" in text for text in said] == [
            rank == 0 for rank in range(ranks)
        ]


def test_a_live_load_says_so_at_any_count_of_ranks(saves: Path, tmp_path: Path) -> None:
    case = BF16_OPTIMIZER
    died = saves / f"{case.name}-died"
    for ranks in (1, 2):
        logs = tmp_path / f"at{ranks}"
        resume = Resume(case, died, tmp_path / f"{ranks}.pt", reshards=True)
        require_success(run_jobs(ranks, [resume], logs))
        assert SAID in next(logs.glob("*/rank0.log")).read_text()
