"""A tag that is a path: DeepSpeed saves it, and finds it by `latest` in what was made of it."""

from pathlib import Path

import pytest

import streamshard
from tests.oracle.cases import BF16
from tests.oracle.compare import differences
from tests.oracle.jobs import Job, Resume, Train
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.truth import Truth

TAG = "epoch/3"
STAGES = (2, 3)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the truth of the saved jobs and of those that resumed."""
    root = tmp_path_factory.mktemp("tags")
    trained: list[Job] = [
        Train(BF16[stage - 1], root / f"{stage}", root / f"{stage}.truth.pt", tag=TAG)
        for stage in STAGES
    ]
    require_success(run_jobs(2, trained, root / "ranks"))
    jobs: list[Job] = []
    for stage in STAGES:
        out, store = root / f"{stage}-out", root / f"{stage}.zarr"
        streamshard.convert(root / f"{stage}", store)
        streamshard.repartition(store, out, world_size=3)
        jobs.append(Resume(BF16[stage - 1], out, root / f"{stage}.resumed.pt"))
    require_success(run_jobs(3, jobs, root / "ranks"))
    return root


@pytest.mark.parametrize("stage", STAGES)
def test_the_engine_holds_what_was_saved(root: Path, stage: int) -> None:
    assert (root / f"{stage}/latest").read_text() == TAG
    assert (root / f"{stage}-out/latest").read_text() == TAG
    saved, resumed = (Truth.load(root / f"{stage}.{name}.pt") for name in ("truth", "resumed"))
    assert differences(saved, resumed) == []
