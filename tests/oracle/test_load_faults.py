"""A load that goes wrong on one rank ends on all, with the same message, and nothing hangs."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import streamshard
from tests.compact.runs import STEPS, later, make_run, tag_of
from tests.oracle import faulty_loads, ranks
from tests.oracle.cases import BF16, SUB_GROUPS
from tests.oracle.compare import differences
from tests.oracle.faulty_loads import FaultyLoad, Turned, Woken
from tests.oracle.jobs import Train
from tests.oracle.models import Case
from tests.oracle.topology.pipeline import Pipeline
from tests.oracle.truth import Truth
from tests.verify.conftest import flip_data

FROM, TO = 3, 2
SOON_SECONDS = 20.0
"""Far below gloo's timeout here, far above what a load takes on a busy machine."""
STAGE_2, STAGE_3 = BF16[1], SUB_GROUPS
PIPELINE = Case("pipeline", 1, "fp32", topology=Pipeline())
OTHER_CUTS = Case("z3-other", 3, "bf16", {"zero_optimization": {"sub_group_size": 200}})
TURNED = Turned("z2-turned", 2, "bf16")
WOKEN = Woken("z3-woken", 3, "bf16", STAGE_3.ds_overrides)


def as_it_is(source: Path) -> None:
    """Leave a copy of a source as it is."""


def without_a_shard(source: Path) -> None:
    min(source.glob("*/*optim_states.pt")).unlink()


def cut_for_these_ranks(source: Path) -> None:
    """Replace a copy by one whose files fit as they are."""
    whole = source.rename(source.with_name(f"{source.name} as saved"))
    streamshard.repartition(whole, source, world_size=TO)


def unparsable(store: Path) -> None:
    (store / "zarr.json").write_bytes(b"{")


def damaged(store: Path) -> None:
    """Flip a bit in the largest chunk of a state."""
    chunks = (path for path in store.rglob("*exp_avg/**/c/**/*") if path.is_file())
    chunk = max(chunks, key=lambda path: path.stat().st_size)
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 1
    chunk.write_bytes(content)


def with_a_flipped_bit(source: Path) -> None:
    """Flip a bit of the last rank's shard."""
    flip_data(max(source.glob("*/*optim_states.pt")))


@dataclass(frozen=True)
class Expect:
    """One way to go wrong, and what all ranks say then."""

    case: Case
    messages: tuple[str, ...]
    """What is in the message of each rank; one for all if they are alike."""
    kinds: tuple[str, ...]
    """The errors' classes, likewise."""
    of_store: bool = False
    prepare: Callable[[Path], None] = as_it_is
    job: dict[str, Any] = field(default_factory=dict)
    """Fields of the job."""
    is_usable: bool = True
    """Whether the engine has loaded nothing yet."""


_LAST = "rank 1: "
FAULTS = {
    "a missing shard": Expect(
        STAGE_2, ("zero_pp_rank_0",), ("IncompleteError",), prepare=without_a_shard
    ),
    "a store without its metadata": Expect(
        STAGE_2, ("rank 0: ", "not one that streamshard wrote"), ("SourceNotFoundError",),
        of_store=True, prepare=unparsable,
    ),
    "a shard that one rank does not see": Expect(
        STAGE_2, (_LAST, "zero_pp_rank_2"), ("SourceError",),
        job={"fault": faulty_loads.removed},
    ),
    "a shard that is cut off": Expect(
        STAGE_3, (_LAST, "zero_pp_rank_2"), ("CorruptFileError",),
        job={"fault": faulty_loads.truncated}, is_usable=False,
    ),
    "a shard that is saved again": Expect(
        STAGE_2, (_LAST, "changed while it was being read"), ("CorruptFileError",),
        job={"fault": faulty_loads.rewritten}, is_usable=False,
    ),
    "a shard that is written to while it is mapped": Expect(
        STAGE_3, (_LAST, "zero_pp_rank_2", "changed while it was being read"),
        ("CorruptFileError",), job={"fault": faulty_loads.rewritten_behind_maps}, is_usable=False,
    ),
    "a shard that DeepSpeed itself loads": Expect(
        STAGE_2, ("rank 0: ", "zero_pp_rank_1", "changed while it was being read"),
        ("CorruptFileError",), prepare=cut_for_these_ranks,
        job={"fault": faulty_loads.rewritten_under_deepspeed}, is_usable=False,
    ),
    "the file of a layer": Expect(
        PIPELINE, ("rank 0: ", "layer_00", "changed while it was being read"),
        ("CorruptFileError",), job={"fault": faulty_loads.rewritten_layer}, is_usable=False,
    ),
    "a damaged chunk": Expect(
        STAGE_3, ("damaged",), ("IntegrityError",), of_store=True, prepare=damaged,
        is_usable=False,
    ),
    "a flipped bit of a shard": Expect(
        STAGE_2, ("rank 0: ", "zero_pp_rank_2", "was recorded when", "build the engine again"),
        ("IntegrityError",), prepare=with_a_flipped_bit, is_usable=False,
    ),
    "a flipped bit of a shard that is mapped": Expect(
        STAGE_3, ("rank 0: ", "zero_pp_rank_2", "was recorded when", "build the engine again"),
        ("IntegrityError",), prepare=with_a_flipped_bit,
        job={"fault": faulty_loads.mapped}, is_usable=False,
    ),
    "another sub_group_size": Expect(
        STAGE_3, (_LAST, "groups of parameters for this rank"), ("DisagreementError",),
        job={"case_of_last": OTHER_CUTS}, is_usable=False,
    ),
    "another order of parameters": Expect(
        STAGE_2, (_LAST, "give the parameters in the same order", "streamshard graft "),
        ("DisagreementError",),
        job={"case_of_last": TURNED}, is_usable=False,
    ),
    "a parameter that stage 3 would not load": Expect(
        STAGE_3, (_LAST, "'frozen_shift' is in no param group", "freeze it before"),
        ("UnsupportedError",), job={"case_of_last": WOKEN}, is_usable=False,
    ),
    "other arguments": Expect(
        STAGE_2, ("rank 1 loads with load_optimizer_states=False, rank 0 with",),
        ("DisagreementError",), job={"options_of_last": (("load_optimizer_states", False),)},
    ),
    "a class that cannot be imported": Expect(
        STAGE_2, ("TrainingNotes",), ("OtherRankError", "AttributeError"),
        job={"fault": faulty_loads.unimportable}, is_usable=False,
    ),
    "a function of the job's own": Expect(
        STAGE_3, ("of the job's own has failed",), ("OtherRankError", "LookupError"),
        job={"fault": faulty_loads.failing_in_module}, is_usable=False,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Faults:
    root: Path

    def source(self, case: Case) -> Path:
        return self.root / case.name

    def truth_path(self, case: Case) -> Path:
        return self.root / f"{case.name}.truth.pt"

    def results(self, name: str) -> Path:
        return self.root / "results" / name


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    made = Faults(tmp_path_factory.mktemp("faults"))
    trains = [Train(case, made.source(case), made.truth_path(case)) for case in (STAGE_2, STAGE_3)]
    ranks.require_success(ranks.run_jobs(FROM, trains, made.root / "ranks"))
    in_stages = [Train(PIPELINE, made.source(PIPELINE), made.truth_path(PIPELINE))]
    ranks.require_success(ranks.run_jobs(2 * TO, in_stages, made.root / "ranks"))
    return made


@pytest.fixture(scope="module")
def faults(trained: Faults) -> Faults:
    work = [_job(trained, name, expect) for name, expect in FAULTS.items()]
    weights = _weights_only(trained.root / "weights")
    work.append(FaultyLoad(STAGE_2, weights, trained.results(_DROPPED), trained.source(STAGE_2)))
    ranks.require_success(ranks.run_jobs(TO, work, trained.root / "ranks", faulty_loads.run))
    return trained


_DROPPED = "a store whose states were dropped"


def _job(made: Faults, name: str, expect: Expect) -> FaultyLoad:
    good = made.source(expect.case)
    source = made.root / "sources" / name
    if expect.of_store:
        streamshard.convert(good, source)
    else:
        shutil.copytree(good, source)
    expect.prepare(source)
    return FaultyLoad(
        expect.case,
        source,
        made.results(name),
        good if expect.is_usable else None,
        **expect.job,
    )


def _weights_only(root: Path) -> Path:
    root.mkdir()
    run = make_run(root / "run")
    for days in (0, 8, 60):
        streamshard.compact(
            run, root / "archive", delete=True, now=later(days),
            weights_only_older_than=timedelta(days=30),
        )  # fmt: skip
    return root / "archive" / f"{tag_of(STEPS[0])}.weights.zarr"


def _said(made: Faults, name: str) -> list[dict[str, Any]]:
    return [json.loads((made.results(name) / f"{rank}.json").read_text()) for rank in range(TO)]


@pytest.mark.parametrize("name", FAULTS)
def test_all_ranks_raise_within_seconds(name: str, faults: Faults) -> None:
    expect = FAULTS[name]
    for rank, said in enumerate(_said(faults, name)):
        kind, message = said["error"]
        assert kind == expect.kinds[rank % len(expect.kinds)], message
        for part in expect.messages:
            assert part in message
        assert said["seconds"] < SOON_SECONDS
        assert said["is_put_back"]
        assert said["left_open"] == []


def test_a_store_without_states_is_refused_on_all_ranks(faults: Faults) -> None:
    for said in _said(faults, _DROPPED):
        assert said["error"][0] == "UnsupportedError"
        assert "holds weights only" in said["error"][1]


@pytest.mark.parametrize(
    "name", [_DROPPED, *(name for name, expect in FAULTS.items() if expect.is_usable)]
)
def test_the_engine_then_loads_another_source(name: str, faults: Faults) -> None:
    case = STAGE_2 if name == _DROPPED else FAULTS[name].case
    saved, loaded = (
        Truth.load(path) for path in (faults.truth_path(case), faults.results(name) / "truth.pt")
    )
    assert differences(saved, loaded) == []


@pytest.fixture
def survivors(trained: Faults, tmp_path: Path) -> list[dict[str, Any]]:
    """What the others say of a load during which the last of 3 ranks was killed."""
    count, start_dir = 3, tmp_path / "start"
    start_dir.mkdir()
    source, good = tmp_path / "source", trained.source(STAGE_2)
    streamshard.repartition(good, source, world_size=2)
    job = FaultyLoad(STAGE_2, source, tmp_path / "results", fault=faulty_loads.killed)
    assert ranks.start_ranks(count, [job], faulty_loads.run, start_dir, survives=True)
    return [json.loads((tmp_path / "results" / f"{n}.json").read_text()) for n in range(count - 1)]


def test_a_killed_rank_ends_the_others(survivors: list[dict[str, Any]]) -> None:
    for said in survivors:
        kind, message = said["error"]
        assert kind == "OtherRankError"
        assert "another rank has ended" in message
        assert said["seconds"] < SOON_SECONDS
