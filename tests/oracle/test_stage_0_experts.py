"""Experts of a job without ZeRO: each rank of them has an optimizer file, which names no group."""

from pathlib import Path

import pytest

import streamshard
from streamshard.errors import UnsupportedError, UsageError
from tests.oracle.compare import differences
from tests.oracle.jobs import Resume, Train
from tests.oracle.models import Case
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.topology.cases import EXPERTS
from tests.oracle.truth import Truth

RANKS, OTHER_RANKS = 4, 2
CASES = [Case(f"experts-z0-{dtype}", 0, dtype, topology=EXPERTS) for dtype in ("bf16", "fp32")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stage-0-experts")
    jobs = [Train(case, root / case.name, root / f"{case.name}.pt") for case in CASES]
    require_success(run_jobs(RANKS, jobs, root / "ranks"))
    return root


def test_they_are_loaded_on_other_ranks_bit_for_bit(saved: Path, tmp_path: Path) -> None:
    """Live from the files and from their store, and by DeepSpeed alone from ours."""
    jobs, made = [], []
    for case in CASES:
        run, store, out = saved / case.name, tmp_path / f"{case.name}.zarr", tmp_path / case.name
        streamshard.convert(run, store)
        streamshard.repartition(run, out, world_size=OTHER_RANKS, expert_parallel=2)
        for way, source in (("files", run), ("store", store), ("ours", out)):
            truth = tmp_path / f"{case.name}-{way}.pt"
            jobs.append(Resume(case, source, truth, reshards=way != "ours"))
            made.append((case.name, way, truth))
    require_success(run_jobs(OTHER_RANKS, jobs, tmp_path / "ranks"))
    for name, way, truth in made:
        wanted = Truth.load(saved / f"{name}.pt")
        assert differences(wanted, Truth.load(truth)) == [], (name, way)


@pytest.mark.parametrize("degree", [1, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_another_expert_degree_is_refused(
    case: Case, degree: int, saved: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match="saved at ZeRO stage 0, and not at 1 or 2"):
        streamshard.repartition(
            saved / case.name, tmp_path / "out", world_size=4, expert_parallel=degree
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_verb_knows_over_how_many_ranks_they_are_spread(
    case: Case, saved: Path, tmp_path: Path
) -> None:
    assert streamshard.inspect(saved / case.name).expert_parallel == 2
    with pytest.raises(UsageError, match=r"experts spread over 2 ranks: give a multiple of 2"):
        streamshard.repartition(saved / case.name, tmp_path / "out", world_size=3)
    assert list(tmp_path.iterdir()) == []
