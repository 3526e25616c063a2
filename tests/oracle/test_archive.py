"""Archives of what real engines saved give the same files back, and engines go on from them."""

import shutil
from datetime import timedelta
from pathlib import Path

import pytest

import streamshard
from tests.oracle.cases import ALIGNED, BF16, BF16_OPTIMIZER, FP16, ROUND_ROBIN, SUB_GROUPS
from tests.oracle.compare import close, differences
from tests.oracle.files import file_differences
from tests.oracle.jobs import Resume, Train, after_path
from tests.oracle.models import Case
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.truth import Truth

CASES = [BF16[1], BF16[2], FP16[1], ROUND_ROBIN, ALIGNED, SUB_GROUPS, BF16_OPTIMIZER]
RANKS = 3
FURTHER_STEPS = 2
NEWER = ("global_step8", "global_step9")
"""Stand for saves that came later, so that the trained one may go."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case trained, archived, removed, rebuilt, and gone on from."""
    root = tmp_path_factory.mktemp("archives")
    train = [
        Train(case, root / case.name, root / f"{case.name}.truth.pt", further_steps=FURTHER_STEPS)
        for case in CASES
    ]
    require_success(run_jobs(RANKS, train, root / "ranks"))
    for case in CASES:
        run, archive = root / case.name, root / f"{case.name}-archive"
        tag = (run / "latest").read_text()
        shutil.copytree(run, root / f"{case.name}-saved")
        for newer in NEWER:
            shutil.copytree(run / tag, run / newer)
        (run / "latest").write_text(NEWER[-1])
        found = streamshard.compact(
            run, archive, keep_last=2, min_age=timedelta(0), delete=True, grace=timedelta(0)
        )
        assert [(t.tag, t.action, t.reason) for t in found.problems] == []
        found = streamshard.compact(run, archive, purge=[tag], grace=timedelta(0))
        assert found.tags[0].action == "purged"
        streamshard.repartition(archive / f"{tag}.zarr", root / f"{case.name}-rebuilt")
    resume = [
        Resume(
            case,
            root / f"{case.name}-rebuilt",
            root / f"{case.name}-rebuilt.truth.pt",
            further_steps=FURTHER_STEPS,
        )
        for case in CASES
    ]
    require_success(run_jobs(RANKS, resume, root / "ranks"))
    return root


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    """One of the cases."""
    found: Case = request.param
    return found


def test_the_original_is_gone(case: Case, place: Path) -> None:
    tags = {path.name for path in (place / case.name).iterdir() if path.is_dir()}
    assert tags == {".streamshard.trash", *NEWER}
    assert not list((place / case.name / ".streamshard.trash").rglob("*.pt"))


def test_the_same_files_come_back(case: Case, place: Path) -> None:
    saved, rebuilt = place / f"{case.name}-saved", place / f"{case.name}-rebuilt"
    tag = (saved / "latest").read_text()
    assert (rebuilt / "latest").read_text() == tag
    assert file_differences(saved / tag, rebuilt / tag) == []
    others = [path for path in saved.iterdir() if path.is_file()]
    assert {path.name for path in others} == {p.name for p in rebuilt.iterdir() if p.is_file()}
    for path in others:
        assert path.read_bytes() == (rebuilt / path.name).read_bytes()


def test_an_engine_holds_what_was_saved_and_goes_on_to_the_bit(case: Case, place: Path) -> None:
    saved = Truth.load(place / f"{case.name}.truth.pt")
    rebuilt = Truth.load(place / f"{case.name}-rebuilt.truth.pt")
    assert differences(saved, rebuilt) == []
    uninterrupted = Truth.load(after_path(place / f"{case.name}.truth.pt"))
    resumed = Truth.load(after_path(place / f"{case.name}-rebuilt.truth.pt"))
    # At the same world size nothing is added up in another order.
    assert close(uninterrupted, resumed, start=saved, tolerance=0.0) == []
