"""Muon's momentum, which stages 1 and 2 keep whole and on several ranks, and its order."""

import hashlib
import json
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from tests.oracle.cases import Resharding
from tests.oracle.compare import close, differences
from tests.oracle.files import file_differences
from tests.oracle.jobs import Resume, Train, after_path
from tests.oracle.muon import muon
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.truth import Truth

FURTHER_STEPS = 3
TOLERANCE = 0.5
"""As in bf16 with any other optimizer. Measured at most: 0.15, in a parameter of 2 elements."""
KEY = "momentum_buffer"

DEVICE_1, DEVICE_2 = muon("", 1), muon("", 2)
ROUND_ROBIN = muon("-round-robin", 2, {"zero_optimization": {"round_robin_gradients": True}})
ALIGNED = muon("-aligned", 2, {"zero_optimization": {"parameter_alignment": True}})
OFFLOAD = muon(
    "-offload",
    2,
    {
        "zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}},
        "zero_force_ds_cpu_optimizer": False,
    },
)
BF16_OPTIMIZER = muon("-bf16-optimizer", 1, {"data_types": {"grad_accum_dtype": "fp32"}})
STAGE_3, ZERO_INIT = muon("", 3), muon("-zero-init", 3, zero_init=True)

RESHARDINGS = [
    Resharding(DEVICE_2, 4, 3),
    Resharding(DEVICE_1, 2, 4, resume=DEVICE_2),
    Resharding(DEVICE_2, 3, 1, resume=DEVICE_1),
    Resharding(ROUND_ROBIN, 4, 3),
    Resharding(ALIGNED, 4, 3, resume=DEVICE_1),
    Resharding(OFFLOAD, 4, 3, resume=ALIGNED),
    Resharding(DEVICE_2, 4, 3, resume=OFFLOAD),
    Resharding(BF16_OPTIMIZER, 4, 3, resume=DEVICE_2),
    Resharding(DEVICE_2, 4, 3, resume=BF16_OPTIMIZER),
    Resharding(STAGE_3, 4, 3),
    Resharding(ZERO_INIT, 4, 3, resume=DEVICE_1),
    Resharding(DEVICE_2, 4, 3, resume=ZERO_INIT),
]
"""With 4 ranks a matrix lies on 3 of them, one of which has parts of 3."""
CLIPPED_OTHERWISE = [one for one in RESHARDINGS if BF16_OPTIMIZER in (one.case, one.resuming)]
"""BF16_Optimizer clips the gradients, other optimizers what Muon makes of them."""


@dataclass(frozen=True)
class Places:
    """Where each thing lies, and what went wrong on the way."""

    root: Path
    errors: dict[str, str] = field(default_factory=dict)

    def source(self, one: Resharding) -> Path:
        return self.root / f"{one.case.name}-at{one.source}"

    def out(self, one: Resharding) -> Path:
        return self.root / f"{one.name}-direct"

    def out_of_store(self, one: Resharding) -> Path:
        return self.root / f"{one.name}-of-store"

    def resaved(self, one: Resharding) -> Path:
        return self.root / f"{one.name}-resaved"

    def loaded(self, one: Resharding) -> Path:
        return self.root / f"{one.name}-loaded"

    def like(self, one: Resharding) -> Path | None:
        """What tells the order of stage 3: a save of that job before its first step."""
        if one.resuming.zero_stage < 3 or one.case.zero_stage == 3:
            return None
        return self.root / f"{one.resuming.name}-like"

    def truth_path(self, directory: Path) -> Path:
        return directory.with_name(f"{directory.name}.truth.pt")


def _by(
    key: Callable[[Resharding], int], ones: Iterable[Resharding]
) -> Iterator[tuple[int, list[Resharding]]]:
    for ranks in sorted({key(one) for one in ones}):
        yield ranks, [one for one in ones if key(one) == ranks]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Every case trained, taken to its target by both roads, resumed and saved again."""
    made = Places(tmp_path_factory.mktemp("muon"))
    for ranks, group in _by(lambda one: one.source, RESHARDINGS):
        jobs = list(dict.fromkeys(_train(made, one) for one in group))
        if ranks == 2:
            likes = {made.like(one): one.resuming for one in RESHARDINGS}
            jobs += [Train(c, path, None, steps=0) for path, c in likes.items() if path]
        require_success(run_jobs(ranks, jobs, made.root / "ranks"))
    for one in RESHARDINGS:
        try:
            _convert(made, one)
        except Exception:
            made.errors[one.name] = traceback.format_exc()
    for ranks, group in _by(lambda one: one.target, RESHARDINGS):
        _resume(made, ranks, [one for one in group if one.name not in made.errors])
    return made


def _train(made: Places, one: Resharding) -> Train:
    source = made.source(one)
    return Train(one.case, source, made.truth_path(source), further_steps=FURTHER_STEPS)


def _convert(made: Places, one: Resharding) -> None:
    source, config = made.source(one), None
    store = source.with_suffix(".zarr")
    if not store.exists():
        streamshard.convert(source, store)
    if one.resume is not None:
        config = made.root / f"{one.resume.name}.json"
        config.write_text(json.dumps(one.resume.ds_config()))
    for road, out in ((source, made.out(one)), (store, made.out_of_store(one))):
        streamshard.repartition(
            road, out, world_size=one.target, ds_config_file=config, like=made.like(one)
        )


def _resume(made: Places, ranks: int, ones: list[Resharding]) -> None:
    jobs = [
        Resume(
            one.resuming, made.out(one), made.truth_path(made.out(one)), made.resaved(one),
            FURTHER_STEPS,
        )
        for one in ones
    ]  # fmt: skip
    direct = [one for one in ones if made.like(one) is None]
    jobs += [
        Resume(one.resuming, made.source(one), made.truth_path(made.loaded(one)), reshards=True)
        for one in direct
    ]
    done = run_jobs(ranks, jobs, made.root / "ranks")
    for one, finished in zip([*ones, *direct], done, strict=True):
        if finished.error is not None:
            made.errors.setdefault(one.name, finished.error)


@pytest.fixture(params=RESHARDINGS, ids=lambda one: one.name)
def one(request: pytest.FixtureRequest, trained: Places) -> Resharding:
    """One resharding that was converted and resumed without an error."""
    found: Resharding = request.param
    if found.name in trained.errors:
        pytest.fail(trained.errors[found.name], pytrace=False)
    return found


def test_the_job_is_as_awkward_as_it_says(trained: Places) -> None:
    one = RESHARDINGS[0]
    held = [_momentum(path) for path in _optimizer_files(trained.source(one))]
    lengths = [{group: len(value) for group, value in rank.items()} for rank in held]
    wide, up, down = 101 * 13, 29 * 13, 13 * 19
    assert lengths == [{0: wide, 3: 2}, {0: wide}, {0: wide + 2 * up}, {0: up + 2 * down}]
    assert {value.dtype for rank in held for value in rank.values()} == {torch.bfloat16}
    assert torch.equal(held[0][0], held[1][0])


def test_both_roads_write_the_same_bytes(one: Resharding, trained: Places) -> None:
    assert _digests(trained.out(one)) == _digests(trained.out_of_store(one))


def test_the_resumed_engine_holds_what_was_saved(one: Resharding, trained: Places) -> None:
    saved = _as_loading_leaves(Truth.load(trained.truth_path(trained.source(one))))
    resumed = Truth.load(trained.truth_path(trained.out(one)))
    assert _differences(one, saved, resumed) == []
    assert set(saved.states) == {"fp32", "exp_avg", "exp_avg_sq", KEY}


def test_an_engine_that_loads_directly_holds_the_same(one: Resharding, trained: Places) -> None:
    if trained.like(one) is None:  # else another checkpoint tells the order
        of_out = Truth.load(trained.truth_path(trained.out(one)))
        loaded = Truth.load(trained.truth_path(trained.loaded(one)))
        assert _differences(one, of_out, loaded) == []


def test_deepspeed_would_have_written_the_same_files(one: Resharding, trained: Places) -> None:
    tag = (trained.out(one) / "latest").read_text()
    found = file_differences(trained.out(one) / tag, trained.resaved(one) / tag)
    # Loading makes fp32 of the momentum, until the next step.
    cast = f"['{KEY}']: dtype torch.bfloat16 != torch.float32"
    assert [line for line in found if not line.endswith(cast)] == []
    both = zip(
        _optimizer_files(trained.out(one)), _optimizer_files(trained.resaved(one)), strict=True
    )
    for ours, theirs in (map(_momentum, paths) for paths in both):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[group].float(), theirs[group]) for group in ours)


def test_training_goes_on_as_if_uninterrupted(one: Resharding, trained: Places) -> None:
    start = trained.truth_path(trained.source(one))
    expected = Truth.load(after_path(start))
    found = Truth.load(after_path(trained.truth_path(trained.out(one))))
    assert found.counters["global_steps"] == expected.counters["global_steps"]
    if one not in CLIPPED_OTHERWISE:
        assert close(expected, found, start=Truth.load(start), tolerance=TOLERANCE) == []


def _as_loading_leaves(truth: Truth) -> Truth:
    """`truth` with the momentum in the dtype of the masters, as torch's loading leaves it."""
    for name, value in truth.states[KEY].items():
        truth.states[KEY][name] = value.to(truth.states["fp32"][name].dtype)
    return truth


def _differences(one: Resharding, saved: Truth, resumed: Truth) -> list[str]:
    if BF16_OPTIMIZER in (one.case, one.resuming):
        saved.scaler.clear()  # of which it keeps none
        resumed.scaler.clear()
    return differences(saved, resumed)


def _optimizer_files(directory: Path) -> list[Path]:
    tag = directory / (directory / "latest").read_text()
    return sorted(tag.glob("*_optim_states.pt"))


def _momentum(path: Path) -> dict[int, torch.Tensor]:
    """The momentum in a rank's file, by param group."""
    state: dict[str, Any] = torch.load(path, weights_only=False)["optimizer_state_dict"]
    wrapped = state.get("base_optimizer_state") or state["optimizer_state_dict"]
    return {group: held[KEY] for group, held in wrapped["state"].items() if KEY in held}


def _digests(tree: Path) -> dict[str, str]:
    return {
        str(path.relative_to(tree)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(tree.rglob("*"))
        if path.is_file()
    }
