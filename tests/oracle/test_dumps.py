"""Each rank's ``optimizer.state_dict()`` saved by hand, taken to another number of ranks.

The user's code: every rank saves ``optimizer.state_dict()`` to ``optimizer.{rank:02d}.pt``. A job
of another size loads the list of all files that were made for it, with
``optimizer.load_state_dict(list)``; or the dumps as they are, with
``load_optimizer(engine.optimizer, "optimizer.{rank:02d}.pt")``.
"""

import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import distributed, nn

import streamshard
from streamshard.errors import UnsupportedError
from tests.oracle.cases import ALIGNED, BF16, BF16_OPTIMIZER, FP16, FP32, ROUND_ROBIN, SUB_GROUPS
from tests.oracle.compare import close, differences
from tests.oracle.files import digests, file_differences
from tests.oracle.jobs import (
    Dump,
    Job,
    LoadDumps,
    RefuseDumps,
    Train,
    after_path,
    start_engine,
    take_step,
)
from tests.oracle.models import Case, TinyLanguageModel
from tests.oracle.ranks import older_deepspeed, require_success, run_jobs
from tests.oracle.reshardings import Resharding
from tests.oracle.truth import Truth
from tests.oracle.values import value_differences

NAME = "optimizer.{rank:02d}.pt"
FURTHER_STEPS = 2
OLD_VERSIONS = ("0.14.5", "0.16.9")
STAGE_2, STAGE_3 = BF16[1], BF16[2]
Way = Literal["converted", "live"]

BOTH_WAYS = [
    *(Resharding(case, 4, 2) for case in (*BF16, *FP16[1:], SUB_GROUPS, ROUND_ROBIN)),
    *(Resharding(case, 2, 3) for case in (*BF16[1:], FP32[1], SUB_GROUPS)),
    Resharding(FP32[1], 2, 2),
    Resharding(BF16[1], 4, 3, resume=ROUND_ROBIN),
    Resharding(ROUND_ROBIN, 4, 2, resume=BF16[1]),
]
LIVE = [
    Resharding(BF16_OPTIMIZER, 4, 2),
    Resharding(BF16[1], 4, 2, resume=ALIGNED),
    Resharding(BF16_OPTIMIZER, 4, 2, resume=BF16[1]),
    Resharding(BF16[0], 4, 2, resume=BF16_OPTIMIZER),
]
LOADS: list[tuple[Resharding, Way]] = [
    *((one, "converted") for one in BOTH_WAYS),
    *((one, "live") for one in (*BOTH_WAYS, *LIVE)),
]
STORED = [Resharding(STAGE_2, 4, 2), Resharding(STAGE_3, 4, 2)]
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
    Refusal("whole", STAGE_2, "UsageError: rank 0: .*call load_checkpoint", source="like-stage-3"),
]


@dataclass(frozen=True)
class Dumps:
    """Where each thing lies."""

    root: Path

    def source(self, case: Case, ranks: int) -> Path:
        return self.root / f"{case.name}-at{ranks}"

    def dumped(self, case: Case, ranks: int) -> Path:
        """For the truth that the dumping engine left."""
        return self.root / f"{case.name}-at{ranks}.truth.pt"

    def store(self, one: Resharding) -> Path:
        return self.root / f"{one.name}.zarr"

    def out(self, one: Resharding) -> Path:
        return self.root / f"{one.name}-out"

    def of_store(self, one: Resharding) -> Path:
        return self.root / f"{one.name}-of-store"

    def again(self, one: Resharding) -> Path:
        """What an engine dumped that had loaded what was made for it."""
        return self.root / f"{one.name}-converted"

    def shapes(self, one: Resharding) -> Path:
        return self.root / f"{one.name}-converted.shapes.pt"

    def like(self, stage: int) -> Path:
        return self.root / f"like-stage-{stage}"

    def loaded(self, name: str) -> Path:
        """For the truth after a load."""
        return self.root / f"{name}.loaded.pt"

    def report(self, name: str) -> dict[str, Any]:
        report: dict[str, Any] = torch.load(self.root / f"{name}.report.pt", weights_only=False)
        return report

    def notes(self, name: str) -> tuple[str, ...]:
        notes: tuple[str, ...] = self.report(name)["notes"]
        return notes

    def messages(self, refusal: Refusal) -> Path:
        return self.root / f"refused-{refusal.name}"

    def config(self, case: Case) -> Path:
        path = self.root / f"{case.name}.json"
        path.write_text(json.dumps(case.ds_config()))
        return path

    def dump(self, case: Case, ranks: int) -> Dump:
        template, truth = str(self.source(case, ranks) / NAME), self.dumped(case, ranks)
        return Dump(case, template, truth, further_steps=FURTHER_STEPS)

    def reshard(self, one: Resharding) -> None:
        """Straight and by way of a store. Where it matters, the user has to give the config."""
        told = one.case in (ROUND_ROBIN, SUB_GROUPS) or one.resume
        resuming = self.config(one.resume) if one.resume else None
        asked: dict[str, Any] = {"source_ds_config_file": self.config(one.case) if told else None}
        if one.case.zero_stage == 3:
            # The stage of the checkpoint that gives the shapes does not matter.
            asked["like"] = self.like(2 if one.target == 3 else 3)
        source, size = self.source(one.case, one.source) / NAME, one.target
        streamshard.repartition(
            source, self.out(one) / NAME, world_size=size, ds_config_file=resuming, **asked
        )
        streamshard.convert(source, self.store(one), **asked)
        to = self.of_store(one) / NAME
        streamshard.repartition(self.store(one), to, world_size=size, ds_config_file=resuming)

    def load(self, name: str, one: Resharding, source: Path, further_steps: int = 0) -> LoadDumps:
        """Load with DeepSpeed alone the list of what was made for these ranks."""
        return LoadDumps(
            one.resuming,
            str(source),
            self.dumped(one.case, one.source),
            self.loaded(name),
            str(self.root / name / NAME),
            self.root / f"{name}.shapes.pt",
            further_steps,
        )

    def load_live(self, name: str, one: Resharding, source: Path | None = None) -> LoadDumps:
        """Load dumps as they are."""
        is_told = ROUND_ROBIN in (one.case, one.resume) or one.resume is ALIGNED
        plain = self.load(name, one, source or self.source(one.case, one.source) / NAME)
        return replace(
            plain,
            report_path=self.root / f"{name}.report.pt",
            source_ds_config_file=self.config(one.case) if is_told else None,
        )

    def refusal(self, one: Refusal) -> RefuseDumps:
        source = one.source.replace("{z2-bf16}", "z2-bf16-at4").replace("{z3-bf16}", "z3-bf16-at4")
        template, messages = str(self.root / source), self.messages(one)
        return RefuseDumps(one.case, template, messages, one.gives_engine, one.as_checkpoint)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Dumps:
    """Every case dumped, taken to its target by both roads, and loaded in both ways."""
    made = Dumps(tmp_path_factory.mktemp("dumps"))
    for ranks in (2, 4):
        cases = {one.case: None for one, _ in LOADS if one.source == ranks}
        jobs: list[Job] = [made.dump(case, ranks) for case in cases]
        if ranks == 4:
            # Of another seed and moment than what needs them.
            likes = [(case, made.like(case.zero_stage)) for case in (STAGE_2, STAGE_3)]
            jobs += [Train(case, place, None, steps=1, seed=5) for case, place in likes]
        _run(made, ranks, jobs)
    for one in BOTH_WAYS:
        made.reshard(one)
    shutil.copytree(made.source(STAGE_2, 4), made.root / "torn")
    (made.root / "torn" / NAME.format(rank=2)).unlink()
    for ranks in (2, 3):
        jobs = []
        for one, way in LOADS:
            if one.target == ranks and way == "converted":
                jobs.append(
                    made.load(f"{one.name}-converted", one, made.out(one) / NAME, FURTHER_STEPS)
                )
            elif one.target == ranks:
                live = made.load_live(f"{one.name}-live", one)
                jobs.append(replace(live, further_steps=FURTHER_STEPS))
        if ranks == 2:
            for one in STORED:
                jobs.append(made.load_live(f"{one.name}-stored", one, made.store(one)))
                bare = made.load_live(f"{one.name}-bare", one)
                jobs.append(replace(bare, kept_elsewhere=None))
            jobs += [made.refusal(one) for one in REFUSALS]
        _run(made, ranks, jobs)
    return made


def _run(made: Dumps, ranks: int, jobs: list[Job], deepspeed_at: Path | None = None) -> None:
    require_success(run_jobs(ranks, jobs, made.root / "ranks", deepspeed_at=deepspeed_at))


def each(ones: list[Resharding]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("one", ones, ids=lambda one: one.name)


@each(BOTH_WAYS)
def test_both_roads_write_the_same_bytes(one: Resharding, dumps: Dumps) -> None:
    names = {NAME.format(rank=rank) for rank in range(one.target)}
    direct, of_store = digests(dumps.out(one)), digests(dumps.of_store(one))
    assert direct.keys() == names
    assert direct == of_store


@pytest.mark.parametrize(("one", "way"), LOADS, ids=lambda told: getattr(told, "name", told))
def test_the_optimizer_holds_what_was_dumped_and_trains_on(
    one: Resharding, way: Way, dumps: Dumps
) -> None:
    name = f"{one.name}-{way}"
    _require_same(dumps, one, name)
    start = dumps.dumped(one.case, one.source)
    expected, found = (Truth.load(after_path(path)) for path in (start, dumps.loaded(name)))
    expected, found = one.alike(expected, found)
    assert close(expected, found, start=Truth.load(start), tolerance=one.noise) == []


@each(BOTH_WAYS)
def test_dumped_again_the_files_are_the_same(one: Resharding, dumps: Dumps, tmp_path: Path) -> None:
    shapes = torch.load(dumps.shapes(one), weights_only=False)
    for name, directory in (("ours", dumps.out(one)), ("again", dumps.again(one))):
        _dress_up(directory, one.target, shapes, tmp_path / name)
    assert file_differences(tmp_path / "ours", tmp_path / "again") == []


def test_stage_3_needs_a_checkpoint_that_knows_the_shapes(dumps: Dumps, tmp_path: Path) -> None:
    source = dumps.source(STAGE_3, 4) / NAME
    with pytest.raises(UnsupportedError, match=r"optimizer\.00\.pt.*shapes.*like=") as refusal:
        streamshard.repartition(source, tmp_path / "out" / NAME, world_size=2)
    assert refusal.value.exit_code == 3
    assert not (tmp_path / "out").exists()


def test_the_config_may_come_after_the_store(dumps: Dumps, tmp_path: Path) -> None:
    one = Resharding(FP16[1], 4, 2)
    config = tmp_path / "fp16.json"
    config.write_text(json.dumps(one.case.ds_config()))
    streamshard.convert(dumps.source(one.case, 4) / NAME, tmp_path / "store.zarr")
    streamshard.repartition(
        tmp_path / "store.zarr", tmp_path / "out" / NAME, world_size=2, ds_config_file=config
    )
    assert digests(tmp_path / "out") == digests(dumps.out(one))


@each(STORED)
def test_a_store_of_dumps_loads_as_well(one: Resharding, dumps: Dumps) -> None:
    _require_same(dumps, one, f"{one.name}-stored")


@pytest.mark.parametrize("case", BF16, ids=lambda case: case.name)
def test_each_rank_reads_its_own_part_alone(case: Case, dumps: Dumps) -> None:
    states = Truth.load(dumps.dumped(case, 4)).states
    total = sum(tensor.nbytes for tensors in states.values() for tensor in tensors.values())
    report = dumps.report(f"{Resharding(case, 4, 2).name}-live")
    assert sum(report["read_bytes"]) == total
    assert max(report["read_bytes"]) < 0.6 * total
    assert (report["source_world_size"], report["world_size"], report["tag"]) == (4, 2, NAME)
    assert report["source"] == (dumps.source(case, 4) / NAME)


def test_notes_tell_what_concerns_a_load(dumps: Dumps) -> None:
    (assumed,) = dumps.notes(f"{Resharding(STAGE_2, 4, 2).name}-live")
    assert "round_robin_gradients was on" in assumed
    assert assumed.endswith("config of the job that saved the dumps, source_ds_config_file.")
    assert dumps.notes(f"{STORED[0].name}-stored") == (assumed,)
    assert dumps.notes(f"{Resharding(STAGE_3, 4, 2).name}-live") == ()
    assert dumps.notes(f"{Resharding(ROUND_ROBIN, 4, 2).name}-live") == ()


def test_the_models_weights_follow_the_masters_at_stage_3(dumps: Dumps) -> None:
    name = f"{Resharding(STAGE_3, 4, 2).name}-bare"
    dumped, loaded = Truth.load(dumps.dumped(STAGE_3, 4)), Truth.load(dumps.loaded(name))
    assert differences(_with_the_rest(dumped, loaded), loaded) == []
    assert dumps.notes(name) == ()


def test_below_stage_3_a_note_says_that_the_model_has_other_weights(dumps: Dumps) -> None:
    name = f"{Resharding(STAGE_2, 4, 2).name}-bare"
    dumped, loaded = Truth.load(dumps.dumped(STAGE_2, 4)), Truth.load(dumps.loaded(name))
    expected = replace(_with_the_rest(dumped, loaded), weights=loaded.weights)
    assert differences(expected, loaded) == []
    assert not torch.equal(dumped.weights["gain"], loaded.weights["gain"])
    _, note = dumps.notes(name)
    assert note.startswith("The model's weights differ from the loaded master weights")


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_all_ranks_refuse_alike_and_change_nothing(refusal: Refusal, dumps: Dumps) -> None:
    told = {path.name: path.read_text() for path in dumps.messages(refusal).iterdir()}
    assert told.keys() == {"0.txt", "1.txt"}
    assert len({*told.values()}) == 1
    assert re.match(refusal.message, told["0.txt"]), told["0.txt"]


@pytest.mark.parametrize("version", OLD_VERSIONS)
def test_older_versions_load_them_too(version: str, dumps: Dumps) -> None:
    jobs: list[Job] = [dumps.load_live(f"{one.name}-{version}", one) for one in OLD]
    _run(dumps, 2, jobs, older_deepspeed(version))
    for one in OLD:
        dumped = Truth.load(dumps.dumped(one.case, one.source))
        loaded = Truth.load(dumps.loaded(f"{one.name}-{version}"))
        # Older versions round buffers to 16 bits.
        found = differences(replace(dumped, buffers=loaded.buffers), loaded)
        assert found == [], one.name


@dataclass(frozen=True)
class WholeDump:
    """Train without ZeRO, or load one rank's dump, and dump each rank's optimizer."""

    case: Case
    template: str
    load: Path | None = None
    """The one file that every rank loads."""


def dump_whole(job: WholeDump) -> None:
    engine = start_engine(job.case, 11 if job.load is None else 77)
    if job.load is None:
        for step in range(3):
            take_step(engine, job.case, step)
    else:
        engine.optimizer.load_state_dict(torch.load(job.load))
    path = Path(job.template.format(rank=distributed.get_rank()))
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(engine.optimizer.state_dict(), path)
    engine.destroy()
    distributed.barrier()


WHOLE = [Case(f"whole-{dtype}", 0, dtype) for dtype in ("fp32", "bf16", "fp16")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines without ZeRO dumped by two ranks; one rank's file loaded by three, dumped again."""
    root = tmp_path_factory.mktemp("whole")
    jobs = [WholeDump(case, str(root / case.name / NAME)) for case in WHOLE]
    require_success(run_jobs(2, jobs, root / "ranks", dump_whole))
    again = [
        WholeDump(
            case,
            str(root / f"{case.name}-again" / NAME),
            load=root / case.name / NAME.format(rank=1),
        )
        for case in WHOLE
    ]
    require_success(run_jobs(3, again, root / "ranks", dump_whole))
    return root


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.name)
def test_of_an_optimizer_without_zero_any_rank_s_dump_will_do(case: Case, whole: Path) -> None:
    """The message says so, and what three ranks hold is what either of two has dumped."""
    first = whole / case.name / NAME.format(rank=0)
    message = (
        rf"{first}: .* all 2 files hold the same: nothing in it is partitioned.* Any rank's file "
        rf"will do, on any count of ranks: optimizer\.load_state_dict\(torch\.load\('{first}'\)\)"
    )
    with pytest.raises(UnsupportedError, match=message):
        streamshard.inspect(whole / case.name / NAME)
    for given in (first, first.parent):
        with pytest.raises(UnsupportedError, match="which ZeRO did not partition"):
            streamshard.inspect(given)
    held = [torch.load(path) for path in sorted(whole.glob(f"{case.name}*/*.pt"))]
    assert len(held) == 5
    for other in held[1:]:
        assert list(value_differences(held[0], other, case.name)) == []


def test_optimizers_without_zero_that_are_not_alike_are_not_taken_for_one(
    whole: Path, tmp_path: Path
) -> None:
    """As of tensor parallelism, or of two steps: any rank's file would not do then."""
    for rank in range(2):
        dump = torch.load(whole / WHOLE[0].name / NAME.format(rank=rank))
        if rank:
            dump["state"][0]["exp_avg"].add_(1)
        torch.save(dump, tmp_path / NAME.format(rank=rank))
    with pytest.raises(UnsupportedError, match=r"01\.pt: .*00\.pt holds other values of state"):
        streamshard.inspect(tmp_path / NAME)


def _require_same(dumps: Dumps, one: Resharding, name: str) -> None:
    dumped, loaded = Truth.load(dumps.dumped(one.case, one.source)), Truth.load(dumps.loaded(name))
    assert dumped.states.keys() == {"fp32", "exp_avg", "exp_avg_sq"}
    assert differences(*one.alike(dumped, loaded)) == []


def _with_the_rest(dumped: Truth, loaded: Truth) -> Truth:
    """What was dumped, with what is not in dumps as a job has it that loads nothing else."""
    return replace(
        dumped,
        frozen=loaded.frozen,
        buffers=loaded.buffers,
        scheduler=loaded.scheduler,
        counters=loaded.counters,
    )


def _dress_up(directory: Path, ranks: int, shapes: object, to: Path) -> None:
    """Spell dumps as the files of a checkpoint, which are compared elsewhere already."""
    to.mkdir()
    for rank in range(ranks):
        dump = torch.load(directory / NAME.format(rank=rank), weights_only=False)
        stem = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": dump}, to / f"{stem}_optim_states.pt")
        torch.save({"param_shapes": shapes}, to / f"{stem}_model_states.pt")
