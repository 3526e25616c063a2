"""Each rank's ``optimizer.state_dict()`` saved by hand, taken to another number of ranks.

The user's code: every rank saves ``torch.save(optimizer.state_dict(), f"optimizer.{rank:02d}.pt")``
and later loads the list of all files with ``optimizer.load_state_dict(list)``. Nothing tells that
list's length but the world size of the job that loads it.
"""

import json
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import pytest
import torch

import streamshard
from streamshard.errors import UnsupportedError
from tests.oracle.cases import BF16, FP16, FP32, ROUND_ROBIN, SUB_GROUPS, Resharding
from tests.oracle.compare import close, differences
from tests.oracle.files import digests, file_differences
from tests.oracle.jobs import Dump, Job, LoadDumps, Train, after_path
from tests.oracle.models import Case
from tests.oracle.odd_engines import WholeDump, dump_whole
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.truth import Truth
from tests.oracle.values import value_differences

NAME = "optimizer.{rank:02d}.pt"
FURTHER_STEPS = 2
TOLERANCE = {"fp32": 1e-4, "fp16": 0.02, "bf16": 0.5}
"""As in the test of whole checkpoints: the noise of reductions at another world size."""

RESHARDINGS = [
    *(
        Resharding(case, n, m)
        for case in (*BF16, FP32[1])
        for n, m in ((4, 2), (2, 4), (3, 5))
    ),
    Resharding(FP16[1], 4, 2),
    Resharding(FP16[2], 4, 2),
    Resharding(BF16[1], 4, 4),
    Resharding(ROUND_ROBIN, 4, 2),
    Resharding(ROUND_ROBIN, 3, 5),
    Resharding(BF16[1], 4, 3, resume=ROUND_ROBIN),
    Resharding(ROUND_ROBIN, 4, 2, resume=BF16[1]),
    Resharding(SUB_GROUPS, 4, 2),
    Resharding(SUB_GROUPS, 2, 4),
]  # fmt: skip
NOT_DEFAULT = (ROUND_ROBIN, SUB_GROUPS)
"""Dumps hold no config: where it matters, the user has to give it."""


@dataclass(frozen=True)
class Dumps:
    """Where each thing lies, and what went wrong on the way."""

    root: Path
    errors: dict[str, str] = field(default_factory=dict)

    def source(self, one: Resharding) -> Path:
        return self.root / f"{one.case.name}-at{one.source}"

    def out(self, one: Resharding) -> Path:
        return self.root / one.name

    def of_store(self, one: Resharding) -> Path:
        return self.root / f"{one.name}-of-store"

    def again(self, one: Resharding) -> Path:
        return self.root / f"{one.name}-again"

    def shapes(self, one: Resharding) -> Path:
        return self.root / f"{one.name}.shapes.pt"

    def like(self, stage: int) -> Path:
        return self.root / f"like-stage-{stage}"

    def truth_path(self, directory: Path) -> Path:
        return directory.with_name(f"{directory.name}.truth.pt")


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Dumps:
    """Every case dumped, taken to its target world size by both roads, loaded and dumped again."""
    made = Dumps(tmp_path_factory.mktemp("dumps"))
    for ranks, group in _grouped([(one.source, one) for one in RESHARDINGS]):
        jobs: list[Job] = []
        for one in {one.case.name: one for one in group}.values():
            source = made.source(one)
            truth = made.truth_path(source)
            jobs.append(Dump(one.case, str(source / NAME), truth, further_steps=FURTHER_STEPS))
        if ranks == 3:  # of another seed, moment and world size than most of what needs it
            jobs += [
                Train(case, made.like(case.zero_stage), made.root / "like.pt", steps=1, seed=5)
                for case in (BF16[1], BF16[2])
            ]
        require_success(run_jobs(ranks, jobs, made.root / "ranks"))
    for one in RESHARDINGS:
        try:
            _reshard(made, one)
        except Exception:
            made.errors[one.name] = traceback.format_exc()
    for ranks, group in _grouped([(one.target, one) for one in RESHARDINGS]):
        _load(made, ranks, [one for one in group if one.name not in made.errors])
    return made


def _grouped(ones: list[tuple[int, Resharding]]) -> Iterable[tuple[int, list[Resharding]]]:
    for ranks, group in groupby(sorted(ones, key=lambda pair: pair[0]), key=lambda pair: pair[0]):
        yield ranks, [one for _, one in group]


def _reshard(made: Dumps, one: Resharding) -> None:
    """Straight and by way of a store."""
    told = one.case in NOT_DEFAULT or one.resume
    saved_by = _config(made, one.case) if told else None
    resuming = _config(made, one.resume) if one.resume else None
    # The stage of the checkpoint that gives the shapes does not matter.
    like = made.like(2 if one.target == 5 else 3) if one.case.zero_stage == 3 else None
    source, store = made.source(one) / NAME, made.root / f"{one.name}.zarr"
    streamshard.repartition(
        source,
        made.out(one) / NAME,
        world_size=one.target,
        ds_config_file=resuming,
        source_ds_config_file=saved_by,
        like=like,
    )
    streamshard.convert(source, store, source_ds_config_file=saved_by, like=like)
    streamshard.repartition(
        store, made.of_store(one) / NAME, world_size=one.target, ds_config_file=resuming
    )


def _config(made: Dumps, case: Case) -> Path:
    path = made.root / f"{case.name}.json"
    path.write_text(json.dumps(case.ds_config()))
    return path


def _load(made: Dumps, ranks: int, ones: list[Resharding]) -> None:
    jobs = [
        LoadDumps(
            one.resuming,
            str(made.out(one) / NAME),
            made.truth_path(made.source(one)),
            made.truth_path(made.out(one)),
            str(made.again(one) / NAME),
            made.shapes(one),
            FURTHER_STEPS,
        )
        for one in ones
    ]
    for one, finished in zip(ones, run_jobs(ranks, jobs, made.root / "ranks"), strict=True):
        if finished.error is not None:
            made.errors[one.name] = finished.error


@pytest.fixture(params=RESHARDINGS, ids=lambda one: one.name)
def one(request: pytest.FixtureRequest, dumps: Dumps) -> Resharding:
    """One set of dumps that was resharded and loaded without an error."""
    resharding: Resharding = request.param
    if resharding.name in dumps.errors:
        pytest.fail(dumps.errors[resharding.name], pytrace=False)
    return resharding


def test_both_roads_write_the_same_bytes(one: Resharding, dumps: Dumps) -> None:
    names = {NAME.format(rank=rank) for rank in range(one.target)}
    direct, of_store = digests(dumps.out(one)), digests(dumps.of_store(one))
    assert direct.keys() == names
    assert direct == of_store


def test_the_list_loads_and_the_engine_holds_what_was_dumped(one: Resharding, dumps: Dumps) -> None:
    dumped = Truth.load(dumps.truth_path(dumps.source(one)))
    loaded = Truth.load(dumps.truth_path(dumps.out(one)))
    assert dumped.states.keys() == {"fp32", "exp_avg", "exp_avg_sq"}
    assert differences(dumped, loaded) == []


def test_dumped_again_the_files_are_the_same(one: Resharding, dumps: Dumps, tmp_path: Path) -> None:
    shapes = torch.load(dumps.shapes(one), weights_only=False)
    for name, directory in (("ours", dumps.out(one)), ("again", dumps.again(one))):
        _dress_up(directory, one.target, shapes, tmp_path / name)
    assert file_differences(tmp_path / "ours", tmp_path / "again") == []


def test_training_goes_on_as_if_uninterrupted(one: Resharding, dumps: Dumps) -> None:
    start = dumps.truth_path(dumps.source(one))
    expected = Truth.load(after_path(start))
    found = Truth.load(after_path(dumps.truth_path(dumps.out(one))))
    tolerance = TOLERANCE[one.case.dtype] if one.source != one.target else 0.0
    assert close(expected, found, start=Truth.load(start), tolerance=tolerance) == []


def test_stage_3_needs_a_checkpoint_that_knows_the_shapes(dumps: Dumps, tmp_path: Path) -> None:
    source = dumps.source(Resharding(BF16[2], 4, 2)) / NAME
    with pytest.raises(UnsupportedError, match=r"optimizer\.00\.pt.*shapes.*like=") as refusal:
        streamshard.repartition(source, tmp_path / "out" / NAME, world_size=2)
    assert refusal.value.exit_code == 3
    assert not (tmp_path / "out").exists()


def test_the_config_may_come_after_the_store(dumps: Dumps, tmp_path: Path) -> None:
    one = Resharding(FP16[1], 4, 2)
    config = tmp_path / "fp16.json"
    config.write_text(json.dumps(one.case.ds_config()))
    streamshard.convert(dumps.source(one) / NAME, tmp_path / "store.zarr")
    streamshard.repartition(
        tmp_path / "store.zarr", tmp_path / "out" / NAME, world_size=2, ds_config_file=config
    )
    assert digests(tmp_path / "out") == digests(dumps.out(one))


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
