"""Raw per-rank dumps loaded into live optimizers of another number of ranks, as they are.

The user's code: every rank saves its ``optimizer.state_dict()`` to ``optimizer.{rank:02d}.pt``, and
a job of another size calls ``load_optimizer(engine.optimizer, "optimizer.{rank:02d}.pt")``.
"""

import json
import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

import streamshard
from tests.oracle.cases import (
    ALIGNED,
    BF16,
    BF16_OPTIMIZER,
    FP16,
    FP32,
    ROUND_ROBIN,
    SUB_GROUPS,
    Resharding,
)
from tests.oracle.compare import close, differences
from tests.oracle.jobs import Dump, Job, LoadDumps, RefuseDumps, Train, after_path
from tests.oracle.models import Case, TinyLanguageModel
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.truth import Truth

NAME = "optimizer.{rank:02d}.pt"
FURTHER_STEPS = 2
TOLERANCE = {"fp32": 1e-4, "fp16": 0.02, "bf16": 0.5}
"""As in the test of whole checkpoints: the noise of reductions at another world size."""
OLD_VERSIONS = ("0.14.5", "0.16.9")
ELASTIC = Case("z2-elastic", 2, "bf16", {"zero_optimization": {"elastic_checkpoint": True}})
TO_2 = [
    *(Resharding(case, 4, 2) for case in (*BF16, FP16[1], BF16_OPTIMIZER, SUB_GROUPS, ROUND_ROBIN)),
    Resharding(BF16[1], 4, 2, resume=ROUND_ROBIN),
    Resharding(BF16[1], 4, 2, resume=ALIGNED),
    Resharding(BF16_OPTIMIZER, 4, 2, resume=BF16[1]),
    Resharding(BF16[0], 4, 2, resume=BF16_OPTIMIZER),
    Resharding(FP32[1], 2, 2),
    Resharding(SUB_GROUPS, 2, 2),
]
TO_3 = [
    *(Resharding(case, 2, 3) for case in (FP32[1], SUB_GROUPS)),
    *(Resharding(case, 4, 3) for case in (BF16[0], BF16[1], BF16[2])),
]
STORED = [Resharding(BF16[1], 4, 2), Resharding(BF16[2], 4, 2)]
OLD = [Resharding(case, 4, 2) for case in (*BF16, BF16_OPTIMIZER)]


class OtherOrder(TinyLanguageModel):
    """Has two parameters of a group in the other order."""

    def __init__(self) -> None:
        super().__init__()
        self._parameters["gain"] = self._parameters.pop("gain")


class OtherSize(TinyLanguageModel):
    """Has a parameter of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.rand(9))


class UnlikeRanks(Case):
    """Gives rank 1 a setting of its own."""

    def ds_config(self) -> dict[str, Any]:
        config = super().ds_config()
        config["zero_optimization"]["sub_group_size"] = 10**9 - distributed.get_rank()
        return config


@dataclass(frozen=True)
class Refusal:
    """A load that is refused, by the message."""

    name: str
    case: Case
    message: str
    source: str = "{z2-bf16}/" + NAME
    gives_engine: bool = False
    as_checkpoint: bool = False


STAGE_2, STAGE_3 = BF16[1], BF16[2]
OF_JOB = "this job's optimizer"
REFUSALS = [
    Refusal(
        "groups",
        replace(STAGE_2, one_group=True),
        "DisagreementError: .*has 3 groups of parameters for this rank, the engine's .* has 1",
    ),
    Refusal(
        "groups-3",
        replace(STAGE_3, one_group=True),
        f"DisagreementError: rank 0: .*00.pt: 3 param groups, {OF_JOB} has 1",
        source="{z3-bf16}/" + NAME,
    ),
    Refusal(
        "order",
        replace(STAGE_2, model=OtherOrder),
        "DisagreementError: .*group 2: parameter 0 .* is 'gain', of the engine's it is 'mix'",
    ),
    Refusal(
        "size",
        replace(STAGE_2, model=OtherSize),
        f"DisagreementError: .*'mix' has 2 elements, in {OF_JOB} it has 9",
    ),
    Refusal(
        "size-3",
        replace(STAGE_3, model=OtherSize),
        f"DisagreementError: rank 0: .*00.pt: sub-group 2 holds 2 elements, .*{OF_JOB} add up to 4",
        source="{z3-bf16}/" + NAME,
    ),
    Refusal("stage", STAGE_3, "UsageError: rank 0: .* of ZeRO stage 2 lack what stage 3 needs"),
    Refusal(
        "round-robin",
        ROUND_ROBIN,
        "UsageError: rank 0: this job's config has round_robin_gradients .* on, and the dumps do "
        "not tell whether they were saved so: .* with source_ds_config_file",
    ),
    Refusal("engine", STAGE_2, "UsageError: rank 0: .*is a DeepSpeedEngine", gives_engine=True),
    Refusal(
        "as-checkpoint",
        STAGE_2,
        "UsageError: rank 0: .*call load_optimizer with engine.optimizer",
        gives_engine=True,
        as_checkpoint=True,
    ),
    Refusal("missing", STAGE_2, r"IncompleteError: rank 0: .*\.02\.pt: missing", "torn/" + NAME),
    Refusal(
        "unlike-ranks",
        UnlikeRanks("z3-unlike-ranks", 3, "bf16"),
        "DisagreementError: rank 1: .* settings .*: 999999999.*, that of rank 0 has .*: 1000000000",
    ),
    Refusal("whole", STAGE_2, "UsageError: rank 0: .*call load_checkpoint", source="like"),
]


@dataclass(frozen=True)
class Loads:
    """Where each thing lies."""

    root: Path

    def template(self, case: Case, ranks: int) -> str:
        return str(self.root / f"{case.name}-at{ranks}" / NAME)

    def dumped(self, case: Case, ranks: int) -> Path:
        """The truth that the dumping engine left."""
        return self.root / f"{case.name}-at{ranks}.truth.pt"

    def loaded(self, name: str) -> Path:
        """The truth after a load."""
        return self.root / f"{name}.loaded.pt"

    def report(self, name: str) -> dict[str, Any]:
        report: dict[str, Any] = torch.load(self.root / f"{name}.report.pt", weights_only=False)
        return report

    def notes(self, name: str) -> tuple[str, ...]:
        notes: tuple[str, ...] = self.report(name)["notes"]
        return notes

    def messages(self, refusal: Refusal) -> Path:
        return self.root / f"refused-{refusal.name}"

    def dump(self, case: Case, ranks: int) -> Dump:
        template, truth = self.template(case, ranks), self.dumped(case, ranks)
        return Dump(case, template, truth, further_steps=FURTHER_STEPS)

    def load(
        self, name: str, one: Resharding, source: str = "", further_steps: int = 0
    ) -> LoadDumps:
        """Load dumps as they are."""
        is_told = ROUND_ROBIN in (one.case, one.resume) or one.resume is ALIGNED
        config = self.root / f"{one.case.name}.json"
        config.write_text(json.dumps(one.case.ds_config()))
        return LoadDumps(
            one.resuming,
            source or self.template(one.case, one.source),
            self.dumped(one.case, one.source),
            self.loaded(name),
            str(self.root / name / NAME),
            self.root / "shapes.pt",
            further_steps,
            report_path=self.root / f"{name}.report.pt",
            source_ds_config_file=config if is_told else None,
        )

    def refusal(self, one: Refusal) -> RefuseDumps:
        source = one.source.replace("{z2-bf16}", "z2-bf16-at4").replace("{z3-bf16}", "z3-bf16-at4")
        template, messages = str(self.root / source), self.messages(one)
        return RefuseDumps(one.case, template, messages, one.gives_engine, one.as_checkpoint)


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory) -> Loads:
    """Every case dumped and loaded."""
    made = Loads(tmp_path_factory.mktemp("loads"))
    dumped = (*BF16, FP16[1], BF16_OPTIMIZER, SUB_GROUPS, ROUND_ROBIN, ELASTIC)
    like = Train(STAGE_3, made.root / "like", None, steps=1)  # knows the shapes
    _run(made, 4, [*(made.dump(case, 4) for case in dumped), like])
    stored = []
    for one in STORED:
        given = like.save_dir if one.case is STAGE_3 else None
        source, store = made.template(one.case, 4), made.root / f"{one.case.name}.zarr"
        streamshard.convert(source, store, like=given)
        stored.append(made.load(f"{one.name}-stored", one, str(store)))
    shutil.copytree(made.root / "z2-bf16-at4", made.root / "torn")
    (made.root / "torn" / NAME.format(rank=2)).unlink()
    _run(made, 2, [
        *(made.dump(case, 2) for case in (FP32[1], SUB_GROUPS)),
        *(made.load(one.name, one, further_steps=FURTHER_STEPS) for one in TO_2),
        *stored,
        *(replace(made.load(f"{one.name}-bare", one), kept_elsewhere=None) for one in STORED),
        made.load("elastic", Resharding(ELASTIC, 4, 2, resume=STAGE_2)),
        *(made.refusal(one) for one in REFUSALS),
    ])  # fmt: skip
    _run(made, 3, [made.load(one.name, one, further_steps=FURTHER_STEPS) for one in TO_3])
    return made


def _run(made: Loads, ranks: int, jobs: list[Job], deepspeed_at: Path | None = None) -> None:
    require_success(run_jobs(ranks, jobs, made.root / "ranks", deepspeed_at=deepspeed_at))


@pytest.mark.parametrize("one", [*TO_2, *TO_3], ids=lambda one: one.name)
def test_the_optimizer_holds_what_was_dumped_and_trains_on(one: Resharding, loads: Loads) -> None:
    _require_same(loads, one, one.name)
    start = loads.dumped(one.case, one.source)
    expected, found = (Truth.load(after_path(path)) for path in (start, loads.loaded(one.name)))
    tolerance = TOLERANCE[one.case.dtype] if one.source != one.target else 0.0
    expected, found = _alike(one, expected, found)
    assert close(expected, found, start=Truth.load(start), tolerance=tolerance) == []


@pytest.mark.parametrize("one", STORED, ids=lambda one: one.name)
def test_a_store_of_dumps_loads_as_well(one: Resharding, loads: Loads) -> None:
    _require_same(loads, one, f"{one.name}-stored")


@pytest.mark.parametrize("case", BF16, ids=lambda case: case.name)
def test_each_rank_reads_its_own_part_alone(case: Case, loads: Loads) -> None:
    states = Truth.load(loads.dumped(case, 4)).states
    total = sum(tensor.nbytes for tensors in states.values() for tensor in tensors.values())
    report = loads.report(Resharding(case, 4, 2).name)
    assert sum(report["read_bytes"]) == total
    assert max(report["read_bytes"]) < 0.6 * total
    assert (report["source_world_size"], report["world_size"], report["tag"]) == (4, 2, NAME)
    assert report["source"] == Path(loads.template(case, 4))


def test_notes_tell_what_concerns_a_load(loads: Loads) -> None:
    (assumed,) = loads.notes(Resharding(STAGE_2, 4, 2).name)
    assert "round_robin_gradients was on" in assumed
    assert assumed.endswith("config of the job that saved the dumps, source_ds_config_file.")
    assert loads.notes(f"{STORED[0].name}-stored") == (assumed,)
    assert loads.notes(Resharding(STAGE_3, 4, 2).name) == ()
    assert loads.notes(Resharding(ROUND_ROBIN, 4, 2).name) == ()


def test_the_models_weights_follow_the_masters_at_stage_3(loads: Loads) -> None:
    name = f"{Resharding(STAGE_3, 4, 2).name}-bare"
    dumped, loaded = Truth.load(loads.dumped(STAGE_3, 4)), Truth.load(loads.loaded(name))
    assert differences(_with_the_rest(dumped, loaded), loaded) == []
    assert loads.notes(name) == ()


def test_below_stage_3_a_note_says_that_the_model_has_other_weights(loads: Loads) -> None:
    name = f"{Resharding(STAGE_2, 4, 2).name}-bare"
    dumped, loaded = Truth.load(loads.dumped(STAGE_2, 4)), Truth.load(loads.loaded(name))
    expected = replace(_with_the_rest(dumped, loaded), weights=loaded.weights)
    assert differences(expected, loaded) == []
    assert not torch.equal(dumped.weights["gain"], loaded.weights["gain"])
    _, note = loads.notes(name)
    assert note.startswith("The model's weights differ from the loaded master weights")


def test_elastic_dumps_leave_the_hyper_parameters_as_they_are(loads: Loads) -> None:
    dumped, loaded = Truth.load(loads.dumped(ELASTIC, 4)), Truth.load(loads.loaded("elastic"))
    assert differences(replace(dumped, groups=[]), replace(loaded, groups=[])) == []
    both = [[group["hyper_parameters"] for group in truth.groups] for truth in (dumped, loaded)]
    assert [group["weight_decay"] for group in both[0]] == [0.1, 0.0, 0.05]
    assert [group["weight_decay"] for group in both[1]] == pytest.approx([0.17, 0.0, 0.085])
    assert loads.notes("elastic")[0].startswith("Saved with elastic_checkpoint")


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_all_ranks_refuse_alike_and_change_nothing(refusal: Refusal, loads: Loads) -> None:
    told = {path.name: path.read_text() for path in loads.messages(refusal).iterdir()}
    assert told.keys() == {"0.txt", "1.txt"}
    assert len({*told.values()}) == 1
    assert re.match(refusal.message, told["0.txt"]), told["0.txt"]


@pytest.mark.parametrize("version", OLD_VERSIONS)
def test_older_versions_load_them_too(version: str, loads: Loads) -> None:
    home = os.environ.get("OLD_DEEPSPEEDS")
    if home is None:
        pytest.skip(f"OLD_DEEPSPEEDS names no place of {version}: `nox -s oracle` installs it")
    jobs: list[Job] = [loads.load(f"{one.name}-{version}", one) for one in OLD]
    _run(loads, 2, jobs, Path(home) / f"deepspeed-{version}")
    for one in OLD:
        dumped = Truth.load(loads.dumped(one.case, one.source))
        loaded = Truth.load(loads.loaded(f"{one.name}-{version}"))
        # Older versions round buffers to 16 bits.
        found = differences(*_alike(one, replace(dumped, buffers=loaded.buffers), loaded))
        assert found == [], one.name


def _require_same(loads: Loads, one: Resharding, name: str) -> None:
    dumped, loaded = Truth.load(loads.dumped(one.case, one.source)), Truth.load(loads.loaded(name))
    assert dumped.states.keys() == {"fp32", "exp_avg", "exp_avg_sq"}
    assert differences(*_alike(one, dumped, loaded)) == []


def _alike(one: Resharding, *truths: Truth) -> list[Truth]:
    """Leave out the loss scaler where one end has none."""
    if one.keeps_scaler:
        return [*truths]
    return [replace(truth, scaler={}) for truth in truths]


def _with_the_rest(dumped: Truth, loaded: Truth) -> Truth:
    """What was dumped, with what is not in dumps as a job has it that loads nothing else."""
    return replace(
        dumped,
        frozen=loaded.frozen,
        buffers=loaded.buffers,
        scheduler=loaded.scheduler,
        counters=loaded.counters,
    )
