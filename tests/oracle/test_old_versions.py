"""Checkpoints of older DeepSpeeds resume in the installed one, and in older ones what we wrote.

Real engines of each old version train and save. The installed version resumes from what we make of
that and saves it again; the old version resumes from what we make of its own files, and of those
that the installed version saved.
"""

import json
import os
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import pytest
import torch

import streamshard
from tests.oracle.cases import BF16, BF16_OPTIMIZER, ROUND_ROBIN
from tests.oracle.compare import close, differences
from tests.oracle.files import digests, file_differences
from tests.oracle.jobs import Resume, Train, after_path
from tests.oracle.models import Case
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.truth import Truth

VERSIONS = ("0.14.5", "0.16.9")
TRAINED, RESUMED_BY_NEW, RESUMED_BY_OLD = 3, 4, 2
"""World sizes: each version has its ranks started once or twice."""
FURTHER_STEPS = 1
TOLERANCE = 0.5
"""As in the test of the installed version alone: the noise of reductions in bf16."""

STAGE_0 = Case("bf16-stage-0", 0, "bf16")
"""Before 0.17.6 a BF16_Optimizer did this, as it does stage 1 with gradients in fp32."""
CASES = [*BF16, ROUND_ROBIN, STAGE_0]


@dataclass(frozen=True)
class Leg:
    """One conversion, from the engine that saved to the one that resumes."""

    version: str
    """The old version, which is at one end or at both."""
    way: Literal["to-new", "in-old", "back-to-old"]
    case: Case
    """What was trained."""
    resume: Case | None = None
    """What resumes, where that is trained in another way; its config then goes to the converter."""

    @property
    def resuming(self) -> Case:
        """The case that loads the result."""
        return self.resume or self.case

    @property
    def ranks(self) -> int:
        """How many ranks resume."""
        return RESUMED_BY_NEW if self.way == "to-new" else RESUMED_BY_OLD

    @property
    def name(self) -> str:
        """A name for test ids and directories."""
        as_what = f"-as-{self.resume.name}" if self.resume else ""
        return f"{self.version}-{self.way}-{self.case.name}{as_what}"


LEGS = [
    leg
    for version in VERSIONS
    for leg in (
        *(Leg(version, "to-new", case) for case in CASES if case != STAGE_0),
        Leg(version, "to-new", STAGE_0, resume=BF16_OPTIMIZER),
        Leg(version, "to-new", STAGE_0, resume=BF16[1]),
        *(Leg(version, "in-old", case) for case in CASES),
        *(Leg(version, "back-to-old", case) for case in (*BF16, ROUND_ROBIN)),
    )
]


@dataclass(frozen=True)
class Places:
    """Where each thing lies, and what went wrong on the way."""

    root: Path
    errors: dict[str, str] = field(default_factory=dict)

    def trained(self, version: str, case: Case) -> Path:
        return self.root / f"{version}-{case.name}"

    def source(self, leg: Leg) -> Path:
        if leg.way == "back-to-old":
            return self.resaved(Leg(leg.version, "to-new", leg.case))
        return self.trained(leg.version, leg.case)

    def store(self, leg: Leg) -> Path:
        source = self.source(leg)
        return source.with_name(f"{source.name}.zarr")

    def out(self, leg: Leg) -> Path:
        return self.root / leg.name

    def of_store(self, leg: Leg) -> Path:
        return self.root / f"{leg.name}-of-store"

    def resaved(self, leg: Leg) -> Path:
        return self.root / f"{leg.name}-resaved"

    def loaded(self, leg: Leg) -> Path:
        """Names the truth of an engine that loaded the source directly."""
        return self.root / f"{leg.name}-loaded"

    def truth_path(self, directory: Path) -> Path:
        return directory.with_name(f"{directory.name}.truth.pt")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Every leg from its training to its last engine."""
    home = os.environ.get("OLD_DEEPSPEEDS")
    if home is None:
        wanted = " and ".join(VERSIONS)
        pytest.skip(f"OLD_DEEPSPEEDS names no place of {wanted}: `nox -s oracle` installs them")
    installed = {version: Path(home) / f"deepspeed-{version}" for version in VERSIONS}
    made = Places(tmp_path_factory.mktemp("old-versions"))
    for version, deepspeed_at in installed.items():
        assert (deepspeed_at / "deepspeed").is_dir(), f"{deepspeed_at}: no DeepSpeed in it"
        jobs = [_train(made, version, case) for case in CASES]
        done = run_jobs(TRAINED, jobs, made.root / "ranks", deepspeed_at=deepspeed_at)
        require_success(done)
    to_new = [leg for leg in LEGS if leg.way == "to-new"]
    _convert(made, to_new)
    _resume(made, to_new, RESUMED_BY_NEW, None)
    to_old = [leg for leg in LEGS if leg.way != "to-new"]
    _convert(made, to_old)
    for version, deepspeed_at in installed.items():
        legs = [leg for leg in to_old if leg.version == version]
        _resume(made, legs, RESUMED_BY_OLD, deepspeed_at)
    return made


def _train(made: Places, version: str, case: Case) -> Train:
    place = made.trained(version, case)
    return Train(case, place, made.truth_path(place), further_steps=FURTHER_STEPS)


def _convert(made: Places, legs: Iterable[Leg]) -> None:
    """Take each source to its target's world size, straight and by way of a store."""
    for leg in legs:
        source, store = made.source(leg), made.store(leg)
        config = None
        if leg.resume is not None:
            config = made.root / f"{leg.resume.name}.json"
            config.write_text(json.dumps(leg.resume.ds_config()))
        try:
            if not store.exists():
                streamshard.convert(source, store)
            for road, out in ((source, made.out(leg)), (store, made.of_store(leg))):
                streamshard.repartition(road, out, world_size=leg.ranks, ds_config_file=config)
        except Exception:
            made.errors[leg.name] = traceback.format_exc()


def _resume(made: Places, legs: Iterable[Leg], ranks: int, deepspeed_at: Path | None) -> None:
    able = [leg for leg in legs if leg.name not in made.errors]
    jobs = []
    for leg in able:
        out = made.out(leg)
        job = Resume(leg.resuming, out, made.truth_path(out), made.resaved(leg), FURTHER_STEPS)
        truth = made.truth_path(made.loaded(leg))
        jobs += [job, Resume(leg.resuming, made.source(leg), truth, reshards=True)]
    done = run_jobs(ranks, jobs, made.root / "ranks", deepspeed_at=deepspeed_at)
    for leg, finished in zip([leg for leg in able for _ in range(2)], done, strict=True):
        if finished.error is not None:
            made.errors[leg.name] = finished.error


@pytest.fixture(params=LEGS, ids=lambda leg: leg.name)
def leg(request: pytest.FixtureRequest, places: Places) -> Leg:
    """One leg that was converted and resumed without an error."""
    found: Leg = request.param
    if found.name in places.errors:
        pytest.fail(places.errors[found.name], pytrace=False)
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_it_is_the_old_version_that_saved(version: str, places: Places) -> None:
    for case in CASES:
        files = sorted(places.trained(version, case).glob("*/*_states.pt"))
        assert len(files) == (2 * TRAINED if case.zero_stage == 3 else 1 + TRAINED)
        for path in files:
            assert torch.load(path, weights_only=False)["ds_version"] == version


def test_both_roads_write_the_same_bytes(leg: Leg, places: Places) -> None:
    assert digests(places.out(leg)) == digests(places.of_store(leg))


def test_the_resumed_engine_holds_what_was_saved(leg: Leg, places: Places) -> None:
    resumed = Truth.load(places.truth_path(places.out(leg)))
    saved = _as_the_other_version(_saved(leg, places), resumed)
    assert differences(*_comparable(leg, saved, resumed)) == []


def test_an_engine_that_loads_directly_holds_the_same(leg: Leg, places: Places) -> None:
    of_out = Truth.load(places.truth_path(places.out(leg)))
    assert differences(of_out, Truth.load(places.truth_path(places.loaded(leg)))) == []


def test_training_goes_on_as_if_uninterrupted(leg: Leg, places: Places) -> None:
    resumed = Truth.load(after_path(places.truth_path(places.out(leg))))
    saved = _saved(leg, places)
    uninterrupted = Truth.load(after_path(places.truth_path(places.trained(leg.version, leg.case))))
    assert resumed.counters["global_steps"] == saved.counters["global_steps"] + FURTHER_STEPS
    # The buffers are trained on in the dtype that they have in either version.
    resumed, uninterrupted = (replace(t, buffers={}) for t in (resumed, uninterrupted))
    both = _comparable(leg, uninterrupted, resumed)
    assert close(*both, start=saved, tolerance=TOLERANCE) == []


@pytest.mark.parametrize(
    "leg", [leg for leg in LEGS if leg.way == "in-old"], ids=lambda leg: leg.name, indirect=True
)
def test_the_old_version_would_have_written_the_same_files(leg: Leg, places: Places) -> None:
    tag = (places.source(leg) / "latest").read_text()
    assert file_differences(places.out(leg) / tag, places.resaved(leg) / tag) == []


def _saved(leg: Leg, places: Places) -> Truth:
    """What the engine held that saved the source."""
    if leg.way == "back-to-old":
        by_new = Leg(leg.version, "to-new", leg.case)
        return Truth.load(places.truth_path(places.out(by_new)))
    return Truth.load(places.truth_path(places.source(leg)))


def _as_the_other_version(saved: Truth, resumed: Truth) -> Truth:
    """`saved` with the buffers in the dtype that the other version gives them.

    Before 0.19.2 they are taken to that of the module, which loading casts them to.
    """
    buffers = {name: value.to(resumed.buffers[name].dtype) for name, value in saved.buffers.items()}
    return replace(saved, buffers=buffers)


def _comparable(leg: Leg, saved: Truth, resumed: Truth) -> tuple[Truth, Truth]:
    """Both without the loss scaler where one end is a BF16_Optimizer, which keeps none."""
    keeps_none = (BF16_OPTIMIZER, STAGE_0)
    if (leg.case in keeps_none) == (leg.resuming in keeps_none):
        return saved, resumed
    return replace(saved, scaler={}), replace(resumed, scaler={})
