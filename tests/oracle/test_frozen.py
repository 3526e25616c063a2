"""Frozen weights that were left out, or that share their memory: engines load what is made of them.

Each case is trained at 2 ranks and taken to 3, at every stage, straight, by way of a store, and in
chains through another stage.
"""

import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

import streamshard
from tests.oracle.compare import differences
from tests.oracle.files import digests, file_differences
from tests.oracle.frozen import Adapted, AllTrained, Empty, Sharing, Twice
from tests.oracle.jobs import Resume, Train
from tests.oracle.models import Case
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.truth import Truth

STAGES = (1, 2, 3)
KINDS = [
    Case("excluded", 0, "bf16", exclude_frozen=True),
    Case("adapted", 0, "bf16", exclude_frozen=True, model=Adapted),
    Case("adapted-whole", 0, "bf16", model=Adapted),
    Case("none-frozen", 0, "bf16", exclude_frozen=True, model=AllTrained),
    Case("none-frozen-whole", 0, "bf16", model=AllTrained),
    # In 32 bits, as a cast would give each parameter memory of its own.
    # In 32 bits, as a cast would give each parameter memory of its own.
    Case("sharing", 0, "fp32", model=Sharing),
    Case("sharing-excluded", 0, "fp32", exclude_frozen=True, model=Sharing),
    Case("twice", 0, "fp32", model=Twice),
    Case("empty", 0, "fp32", model=Empty),
    Case("empty-excluded", 0, "fp32", exclude_frozen=True, model=Empty),
]
CHAINS = ((1, 2, 3), (2, 1, 3), (3, 1, 2), (3, 2, 3), (2, 3, 1, 2))


@dataclass(frozen=True)
class Way:
    """The stages that a checkpoint is taken through, from 2 ranks to 3."""

    kind: Case
    stages: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.kind.name}-{'-'.join(map(str, self.stages))}"

    @property
    def cases(self) -> tuple[Case, Case]:
        """The case that is trained and the one that resumes."""
        first, last = (
            replace(self.kind, name=f"{self.kind.name}-z{stage}", zero_stage=stage)
            for stage in (self.stages[0], self.stages[-1])
        )
        return first, last


def _ways(kind: Case) -> list[Way]:
    stages = (1, 2) if kind.model is Empty else STAGES
    pairs = [(one, other) for one in stages for other in stages]
    if not kind.exclude_frozen:
        pairs = [(one, other) for one, other in pairs if one != other]
    if kind.model is Twice:  # stage 1 does not list them, and there they look like one
        pairs = [(one, other) for one, other in pairs if one > 1]
    is_main = kind.exclude_frozen and kind.model in (None, Adapted)
    return [Way(kind, way) for way in (*pairs, *(CHAINS if is_main else ()))]


WAYS = [way for kind in KINDS for way in _ways(kind)]


@dataclass(frozen=True)
class Places:
    """Where each thing lies, and what went wrong on the way."""

    root: Path
    errors: dict[str, str] = field(default_factory=dict)

    def source(self, case: Case) -> Path:
        return self.root / case.name

    def out(self, way: Way) -> Path:
        return self.root / way.name

    def of_store(self, way: Way) -> Path:
        return self.root / f"{way.name}-of-store"

    def resaved(self, way: Way) -> Path:
        return self.root / f"{way.name}-resaved"

    def loaded(self, way: Way) -> Path:
        return self.root / f"{way.name}-loaded"

    def truth(self, directory: Path) -> Path:
        return directory.with_name(f"{directory.name}.truth.pt")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Every case trained, taken all its ways, resumed and saved again."""
    made = Places(tmp_path_factory.mktemp("frozen"))
    sources = {way.cases[0].name: way.cases[0] for way in WAYS}.values()
    jobs = [Train(case, made.source(case), made.truth(made.source(case))) for case in sources]
    require_success(run_jobs(2, jobs, made.root / "ranks"))
    for case in sources:
        streamshard.convert(made.source(case), made.root / f"{case.name}.zarr")
    resumed = []
    for way in WAYS:
        try:
            _take(made, way)
        except Exception:
            made.errors[way.name] = traceback.format_exc()
        else:
            resumed.append(way)
    direct = [way for way in resumed if len(way.stages) == 2]
    # No file has the weights that were left out: they come from the seed.
    ends = run_jobs(
        3,
        [
            Resume(
                way.cases[1], made.out(way), made.truth(made.out(way)), made.resaved(way), seed=11
            )
            for way in resumed
        ]
        + [
            Resume(
                way.cases[1],
                made.source(way.cases[0]),
                made.truth(made.loaded(way)),
                seed=11,
                reshards=True,
            )
            for way in direct
        ],
        made.root / "ranks",
    )
    for way, end in zip([*resumed, *direct], ends, strict=True):
        if end.error is not None:
            made.errors.setdefault(way.name, end.error)
    return made


def _take(made: Places, way: Way) -> None:
    first = way.cases[0]
    *between, last = way.stages[1:]
    for start, end, is_store in (
        (made.source(first), made.out(way), False),
        (made.root / f"{first.name}.zarr", made.of_store(way), True),
    ):
        at = start
        for number, stage in enumerate(between):
            step = made.root / f"{end.name}-by{number}"
            streamshard.repartition(at, step, world_size=4 - number, zero_stage=stage)
            at = step
            if is_store:
                at = step.with_suffix(".zarr")
                streamshard.convert(step, at)
        streamshard.repartition(at, end, world_size=3, zero_stage=last)


@pytest.fixture(params=WAYS, ids=lambda way: way.name)
def way(request: pytest.FixtureRequest, places: Places) -> Way:
    """One way that was gone to its end without an error."""
    found: Way = request.param
    if found.name in places.errors:
        pytest.fail(places.errors[found.name], pytrace=False)
    return found


def test_the_resumed_engine_holds_what_was_saved(way: Way, places: Places) -> None:
    saved = Truth.load(places.truth(places.source(way.cases[0])))
    resumed = Truth.load(places.truth(places.out(way)))
    assert differences(saved, resumed) == []


@pytest.mark.parametrize(
    "way", [way for way in WAYS if len(way.stages) == 2], ids=lambda way: way.name, indirect=True
)
def test_an_engine_that_loads_directly_holds_the_same(way: Way, places: Places) -> None:
    of_out = Truth.load(places.truth(places.out(way)))
    assert differences(of_out, Truth.load(places.truth(places.loaded(way)))) == []


def test_ways_by_stores_give_the_same_files(way: Way, places: Places) -> None:
    assert digests(places.of_store(way)) == digests(places.out(way))


def test_deepspeed_would_have_written_the_same_files(way: Way, places: Places) -> None:
    tag = (places.out(way) / "latest").read_text()
    found = file_differences(places.out(way) / tag, places.resaved(way) / tag)
    assert [line for line in found if not _is_known(line, way)] == []


def _is_known(line: str, way: Way) -> bool:
    """Tell whether a difference is one of those that make none to an engine."""
    if way.kind.model is Adapted and 3 in way.stages[:-1]:
        # Stage 3 did not save the second name of the frozen weight, and an engine has it.
        return "['head.weight']: missing on the left" in line or "share memory on the right" in line
    if way.kind.model is AllTrained and 1 in way.stages[:-1]:
        # From stage 1 it cannot be told that none was left out because there was none.
        return "['frozen_param_" in line and "None is a builtins.NoneType" in line
    if way.kind.model in (Sharing, Twice, Empty):
        # Here each has memory of its own, and the list of what is tied is as it should be.
        return "['shared_params'][" in line or line.endswith("share memory on the right only")
    return False


def test_nothing_is_found_to_differ(way: Way, places: Places) -> None:
    pairs = [(places.out(way), places.source(way.cases[0])), (places.resaved(way), places.out(way))]
    for path, other in pairs:
        found = streamshard.verify(path, against=other)
        assert found.problems == ()
        assert [one for one in found.differences if not _is_second_name(one.name, way)] == []


def _is_second_name(name: str, way: Way) -> bool:
    """Tell whether a tensor is what stage 3 left out, and an engine of another stage saves."""
    return way.kind.model is Adapted and 3 in way.stages and name == "module/head.weight"
