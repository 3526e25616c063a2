"""Each rank's ``optimizer.state_dict()`` saved by hand, taken to another number of ranks.

The user's code: every rank saves ``optimizer.state_dict()`` to ``optimizer.{rank:02d}.pt``. A job
of another size loads the list of all files that were made for it, with
``optimizer.load_state_dict(list)``.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import streamshard
from streamshard.errors import UnsupportedError
from tests.oracle.cases import BF16, FP16, FP32, ROUND_ROBIN, SUB_GROUPS
from tests.oracle.compare import close, differences
from tests.oracle.files import digests, file_differences
from tests.oracle.jobs import Dump, Job, LoadDumps, Train, after_path, start_engine, take_step
from tests.oracle.models import Case
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.reshardings import Resharding
from tests.oracle.test_load_options import Attempt, do
from tests.oracle.truth import Truth
from tests.oracle.values import value_differences

NAME = "optimizer.{rank:02d}.pt"
FURTHER_STEPS = 2
STAGE_2, STAGE_3 = BF16[1], BF16[2]

RESHARDINGS = [
    *(Resharding(case, 4, 2) for case in (BF16[0], BF16[2], FP16[1], ROUND_ROBIN)),
    *(Resharding(case, 2, 3) for case in (BF16[1], FP32[1], SUB_GROUPS)),
    Resharding(BF16[1], 4, 3, resume=ROUND_ROBIN),
    Resharding(ROUND_ROBIN, 4, 2, resume=BF16[1]),
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

    def of(self, one: Resharding, what: str) -> Path:
        """For what becomes of a case: `out`, `again`, `loaded.pt` and the like."""
        return self.root / f"{one.name}-{what}"

    def like(self, stage: int) -> Path:
        return self.root / f"like-stage-{stage}"

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
        asked: dict[str, Any] = (
            {"facts": {"source": {"ds_config": self.config(one.case)}}} if told else {}
        )
        if one.case.zero_stage == 3:
            # The stage of the checkpoint that gives the shapes does not matter.
            asked["like"] = self.like(2 if one.target == 3 else 3)
        source, size = self.source(one.case, one.source) / NAME, one.target
        streamshard.repartition(
            source, self.of(one, "out") / NAME, world_size=size, ds_config_file=resuming, **asked
        )
        store, to = self.of(one, "store.zarr"), self.of(one, "of-store") / NAME
        streamshard.convert(source, store, **asked)
        streamshard.repartition(store, to, world_size=size, ds_config_file=resuming)

    def load(self, one: Resharding) -> LoadDumps:
        """Load with DeepSpeed alone the list of what was made for these ranks."""
        return LoadDumps(
            one.resuming,
            str(self.of(one, "out") / NAME),
            self.dumped(one.case, one.source),
            self.of(one, "loaded.pt"),
            str(self.of(one, "again") / NAME),
            self.of(one, "shapes.pt"),
            FURTHER_STEPS,
        )


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Dumps:
    """Every case dumped, taken to its target by both roads, and loaded."""
    made = Dumps(tmp_path_factory.mktemp("dumps"))
    for ranks in (2, 4):
        cases = {one.case: None for one in RESHARDINGS if one.source == ranks}
        jobs: list[Job] = [made.dump(case, ranks) for case in cases]
        if ranks == 4:
            # Of another seed and moment than what needs them.
            likes = [(case, made.like(case.zero_stage)) for case in (STAGE_2, STAGE_3)]
            jobs += [Train(case, place, None, steps=1, seed=5) for case, place in likes]
        _run(made, ranks, jobs)
    for one in RESHARDINGS:
        made.reshard(one)
    for ranks in (2, 3):
        jobs = [made.load(one) for one in RESHARDINGS if one.target == ranks]
        if ranks == 2:
            refused = [Attempt(STAGE_2, made.source(STAGE_2, 4) / NAME, made.root / "refused")]
            require_success(run_jobs(ranks, refused, made.root / "ranks", do))
        _run(made, ranks, jobs)
    return made


def _run(made: Dumps, ranks: int, jobs: list[Job]) -> None:
    require_success(run_jobs(ranks, jobs, made.root / "ranks"))


EACH = pytest.mark.parametrize("one", RESHARDINGS, ids=lambda one: one.name)


@EACH
def test_both_roads_write_the_same_bytes(one: Resharding, dumps: Dumps) -> None:
    names = {NAME.format(rank=rank) for rank in range(one.target)}
    direct, of_store = digests(dumps.of(one, "out")), digests(dumps.of(one, "of-store"))
    assert direct.keys() == names
    assert direct == of_store


@EACH
def test_the_optimizer_holds_what_was_dumped_and_trains_on(one: Resharding, dumps: Dumps) -> None:
    start, loaded = dumps.dumped(one.case, one.source), dumps.of(one, "loaded.pt")
    dumped = Truth.load(start)
    assert dumped.states.keys() == {"fp32", "exp_avg", "exp_avg_sq"}
    assert differences(*one.alike(dumped, Truth.load(loaded))) == []
    expected, found = (Truth.load(after_path(path)) for path in (start, loaded))
    expected, found = one.alike(expected, found)
    assert close(expected, found, start=dumped, tolerance=one.noise) == []


@EACH
def test_dumped_again_the_files_are_the_same(one: Resharding, dumps: Dumps, tmp_path: Path) -> None:
    shapes = torch.load(dumps.of(one, "shapes.pt"), weights_only=False)
    for name, directory in (("ours", dumps.of(one, "out")), ("again", dumps.of(one, "again"))):
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
    assert digests(tmp_path / "out") == digests(dumps.of(one, "out"))


def test_all_ranks_refuse_them_as_a_checkpoint_and_change_nothing(dumps: Dumps) -> None:
    messages = [(dumps.root / f"refused-{rank}").read_text() for rank in range(2)]
    assert messages[0] == messages[1]
    expected = r"UsageError: rank 0: .*raw dumps of an optimizer.*'streamshard repartition'"
    assert re.match(expected, messages[0]), messages[0]


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


def _dress_up(directory: Path, ranks: int, shapes: object, to: Path) -> None:
    """Spell dumps as the files of a checkpoint, which are compared elsewhere already."""
    to.mkdir()
    for rank in range(ranks):
        dump = torch.load(directory / NAME.format(rank=rank), weights_only=False)
        stem = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": dump}, to / f"{stem}_optim_states.pt")
        torch.save({"param_shapes": shapes}, to / f"{stem}_model_states.pt")
