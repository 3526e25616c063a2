"""Checkpoints taken to another world size load in DeepSpeed bit for bit, and training goes on.

All engines run in the session fixture, one start of the ranks per world size; the tests only
compare what was left on disk. A conversion or resume that fails fails its own tests and no others.
"""

import hashlib
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest
import torch

import streamshard
from tests.oracle.cases import FIRST_LIGHT, Resharding
from tests.oracle.compare import close, differences
from tests.oracle.files import file_differences
from tests.oracle.jobs import Consolidate, Job, Resume, Train, after_path
from tests.oracle.models import Case
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.truth import Truth
from tests.oracle.values import value_differences

pytestmark = pytest.mark.engine

T = TypeVar("T")
FURTHER_STEPS = 2

TOLERANCE = {"fp32": 1e-4, "fp16": 0.02, "bf16": 0.2}
"""How far from the uninterrupted run, as a share of the movement since the save.

Measured at most: 1.8e-6 in fp32, 0.008 in fp16, 0.064 in bf16.
Another world size adds the same gradients up in another order and rounds them in the model's dtype.
"""


@dataclass(frozen=True)
class Places:
    """Where each thing of the session lies, and what went wrong on the way."""

    root: Path
    errors: dict[str, str] = field(default_factory=dict)
    """Resharding name to the traceback of the conversion or the resume."""

    def source(self, case: Case, ranks: int) -> Path:
        return self.root / f"{case.name}-at{ranks}"

    def store(self, one: Resharding) -> Path:
        return self.root / f"{one.case.name}-at{one.source}.zarr"

    def out(self, one: Resharding) -> Path:
        return self.root / f"{one.name}-direct"

    def out_of_store(self, one: Resharding) -> Path:
        return self.root / f"{one.name}-of-store"

    def resaved(self, one: Resharding) -> Path:
        return self.root / f"{one.name}-resaved"

    def truth_path(self, directory: Path) -> Path:
        return directory.with_name(f"{directory.name}.truth.pt")

    def merged_path(self, directory: Path) -> Path:
        return directory.with_name(f"{directory.name}.fp32.pt")


@pytest.fixture(scope="session")
def light(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Every case trained, taken to its target world size by both roads, resumed and saved again."""
    places = Places(tmp_path_factory.mktemp("first-light"))
    for ranks, group in _by(lambda one: one.source, FIRST_LIGHT):
        cases = {one.case.name: one.case for one in group}.values()
        jobs = [job for case in cases for job in _train_jobs(places, case, ranks)]
        require_success(run_jobs(ranks, jobs, places.root / "ranks"))
    for one in FIRST_LIGHT:
        try:
            _convert(places, one)
        except Exception:
            places.errors[one.name] = traceback.format_exc()
    for ranks, group in _by(lambda one: one.target, FIRST_LIGHT):
        _resume(places, ranks, [one for one in group if one.name not in places.errors])
    return places


def _by(
    key: Callable[[Resharding], int], ones: Iterable[Resharding]
) -> Iterator[tuple[int, list[Resharding]]]:
    groups: dict[int, list[Resharding]] = {}
    for one in ones:
        groups.setdefault(key(one), []).append(one)
    yield from sorted(groups.items())


def _train_jobs(places: Places, case: Case, ranks: int) -> list[Job]:
    source = places.source(case, ranks)
    return [
        Train(case, source, places.truth_path(source), further_steps=FURTHER_STEPS),
        Consolidate(source, places.merged_path(source)),
    ]


def _convert(places: Places, one: Resharding) -> None:
    """Take the source to the target world size, straight and by way of a store."""
    source, store = places.source(one.case, one.source), places.store(one)
    if not store.exists():
        streamshard.convert(source, store)
    streamshard.repartition(source, places.out(one), world_size=one.target)
    streamshard.repartition(store, places.out_of_store(one), world_size=one.target)


def _resume(places: Places, ranks: int, ones: list[Resharding]) -> None:
    jobs: list[Job] = []
    owners: list[str] = []
    for one in ones:
        out, resaved = places.out(one), places.resaved(one)
        jobs += [
            Resume(one.case, out, places.truth_path(out), resaved, FURTHER_STEPS),
            Consolidate(out, places.merged_path(out)),
            Consolidate(resaved, places.merged_path(resaved)),
        ]
        owners += [one.name] * 3
    for name, finished in zip(owners, run_jobs(ranks, jobs, places.root / "ranks"), strict=True):
        if finished.error is not None:
            places.errors.setdefault(name, finished.error)


@pytest.fixture(params=FIRST_LIGHT, ids=lambda one: one.name)
def one(request: pytest.FixtureRequest, light: Places) -> Resharding:
    """One resharding that was converted and resumed without an error."""
    resharding: Resharding = request.param
    if resharding.name in light.errors:
        pytest.fail(light.errors[resharding.name], pytrace=False)
    return resharding


def test_both_roads_write_the_same_bytes(one: Resharding, light: Places) -> None:
    direct, of_store = _digests(light.out(one)), _digests(light.out_of_store(one))
    assert direct == of_store


def test_the_resumed_engine_holds_what_was_saved(one: Resharding, light: Places) -> None:
    saved = Truth.load(light.truth_path(light.source(one.case, one.source)))
    resumed = Truth.load(light.truth_path(light.out(one)))
    assert differences(saved, resumed) == []


def test_deepspeed_would_have_written_the_same_files(one: Resharding, light: Places) -> None:
    tag = (light.out(one) / "latest").read_text()
    assert tag == (light.source(one.case, one.source) / "latest").read_text()
    assert file_differences(light.out(one) / tag, light.resaved(one) / tag) == []


def test_zero_to_fp32_agrees(one: Resharding, light: Places) -> None:
    source, out, resaved = (
        torch.load(light.merged_path(directory), weights_only=False)
        for directory in (light.source(one.case, one.source), light.out(one), light.resaved(one))
    )
    assert list(value_differences(source, out, "converted")) == []
    assert list(value_differences(out, resaved, "saved again")) == []


def test_training_goes_on_as_if_uninterrupted(one: Resharding, light: Places) -> None:
    saved_path = light.truth_path(light.source(one.case, one.source))
    saved = Truth.load(saved_path)
    uninterrupted = Truth.load(after_path(saved_path))
    resumed = Truth.load(after_path(light.truth_path(light.out(one))))
    assert resumed.counters["global_steps"] == saved.counters["global_steps"] + FURTHER_STEPS
    # At the same world size nothing is added up in another order.
    tolerance = TOLERANCE[one.case.dtype] if one.source != one.target else 0.0
    assert close(uninterrupted, resumed, start=saved, tolerance=tolerance) == []


def _digests(tree: Path) -> dict[str, str]:
    """Every file below `tree` with the digest of its bytes."""
    return {
        str(path.relative_to(tree)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(tree.rglob("*"))
        if path.is_file()
    }
