"""A job that dies while it saves a tag for the second time leaves files of two saves."""

import os
import shutil
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


class Harmless:
    """Is pickled as a call of a function, as hostile files have it."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return os.getcwd, ()


def test_live_loads_say_it_once(saves: Path, tmp_path: Path) -> None:
    """That files are of two saves, and which calls they would make."""
    case, run = BF16_OPTIMIZER, tmp_path / "run"
    shutil.copytree(saves / f"{case.name}-3", run)
    for path in (run / TAG).glob("*model_states.pt"):
        torch.save({**torch.load(path, weights_only=False), "planted": Harmless()}, path)
    loads = [
        Resume(case, source, tmp_path / f"{source.name}.pt", reshards=True)
        for source in (saves / f"{case.name}-died", run)
    ]
    require_success(run_jobs(2, loads, tmp_path / "ranks"))
    logs = [path.read_text() for path in sorted(tmp_path.glob("ranks/*/rank*.log"))]
    assert SAID in logs[0]
    calls = [text.count("DANGER: the training state calls posix.getcwd") for text in logs]
    assert calls == [1, 0]
