"""The session in which every case is trained, converted and resumed, for all tests that look at it.

All engines run in the session fixture, one start of the ranks per world size; the tests only
compare what was left on disk. A conversion or resume that fails fails its own tests and no others.
"""

import json
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

import streamshard
from tests.oracle.cases import BF16_OPTIMIZER, FIRST_LIGHT, LEGACY, STAGE_0, Resharding
from tests.oracle.jobs import Consolidate, Job, Resume, Train
from tests.oracle.models import Case
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.topology.cases import TOPOLOGIES

T = TypeVar("T")
FURTHER_STEPS = 3


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

    def loaded(self, one: Resharding) -> Path:
        """Where an engine saved again that loaded directly what another world size saved."""
        return self.root / f"{one.name}-loaded"

    def loaded_from(self, one: Resharding) -> Path:
        """The shards or, for every third resharding, the store."""
        return (
            self.store(one)
            if zlib.crc32(one.name.encode()) % 3 == 0
            else self.source(one.case, one.source)
        )

    def truth_path(self, directory: Path) -> Path:
        return directory.with_name(f"{directory.name}.truth.pt")

    def merged_path(self, directory: Path) -> Path:
        return directory.with_name(f"{directory.name}.fp32.pt")


@pytest.fixture(scope="session")
def light(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Every case trained, taken to its target world size by both roads, resumed and saved again."""
    return carry(FIRST_LIGHT, Places(tmp_path_factory.mktemp("first-light")))


@pytest.fixture(scope="session")
def topologies(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """The same for jobs that are divided by more than data parallelism."""
    return carry(TOPOLOGIES, Places(tmp_path_factory.mktemp("topologies")))


def carry(ones: Iterable[Resharding], places: Places) -> Places:
    """Train the cases of all of `ones`, convert, resume and save again; say where it all lies.

    Raises
    ------
    AssertionError
        When a case does not train. All else that goes wrong is among `errors`.
    """
    ones = list(ones)
    for ranks, group in _by(lambda one: one.source, ones):
        cases = {one.case.name: one.case for one in group}.values()
        jobs = [job for case in cases for job in _train_jobs(places, case, ranks)]
        require_success(run_jobs(ranks, jobs, places.root / "ranks"))
    for one in ones:
        try:
            _convert(places, one)
        except Exception:
            places.errors[one.name] = traceback.format_exc()
    for ranks, group in _by(lambda one: one.target, ones):
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
    train = Train(case, source, places.truth_path(source), further_steps=FURTHER_STEPS)
    if case in (BF16_OPTIMIZER, *LEGACY, *STAGE_0) or case.topology is not None:
        return [train]
    return [train, Consolidate(source, places.merged_path(source))]


def _convert(places: Places, one: Resharding) -> None:
    """Take the source to the target world size, straight and by way of a store."""
    source, store = places.source(one.case, one.source), places.store(one)
    if not store.exists():
        streamshard.convert(source, store)
    config = None
    if one.resume is not None:
        config = places.root / f"{one.resume.name}.json"
        config.write_text(json.dumps(one.resume.ds_config()))
    for road, out in ((source, places.out(one)), (store, places.out_of_store(one))):
        streamshard.repartition(
            road,
            out,
            world_size=one.target,
            ds_config_file=config,
            expert_parallel=one.expert_parallel,
        )


def _resume(places: Places, ranks: int, ones: list[Resharding]) -> None:
    jobs: list[Job] = []
    owners: list[str] = []
    for one in ones:
        out, resaved = places.out(one), places.resaved(one)
        new: list[Job] = [Resume(one.resuming, out, places.truth_path(out), resaved, FURTHER_STEPS)]
        direct = places.loaded_from(one), places.truth_path(places.loaded(one)), places.loaded(one)
        new.append(Resume(one.resuming, *direct, reshards=True))
        if one.consolidates:
            new += [Consolidate(made, places.merged_path(made)) for made in (out, resaved)]
        jobs += new
        owners += [one.name] * len(new)
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
