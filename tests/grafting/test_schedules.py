"""A grafted training has the rates that START's job would have had, had it run from the start.

torch's chainable schedulers compute each rate from the one before, so their roundings depend on the
way: their rates may differ by some units in the last place.
"""

import io
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules as of_deepspeed
from torch.optim import AdamW, Optimizer
from torch.optim import lr_scheduler as of_torch

from streamshard.formats.dcp.dcp_writer import value_item
from streamshard.formats.deepspeed import names
from streamshard.formats.pickle.inert import Node
from streamshard.grafting.job_state import GraftedState, grafted_state
from streamshard.grafting.requirements import require_same_settings
from streamshard.grafting.schedules import grafted_scheduler_file
from tests.grafting.model_parts import Training, inert, model_part, settings

OLD, NEW = [1e-3, 4e-3], [7e-4, 6e-3]
Make = Callable[[AdamW], Any]


def warm_up_and_decay(step: int) -> float:
    return min(step / 4, 1 - step / 40)


class Decay:
    """A schedule that torch saves with its state."""

    def __init__(self) -> None:
        self.factor = 0.9

    def __call__(self, step: int) -> float:
        return self.factor**step


def sequential(
    optimizer: Optimizer, floor: float = 0.0, first: Callable[..., Any] = of_torch.LinearLR
) -> of_torch.SequentialLR:
    warm_up = first(optimizer, 0.01, total_iters=4)
    cosine = of_torch.CosineAnnealingLR(optimizer, T_max=20, eta_min=floor)
    return of_torch.SequentialLR(optimizer, [warm_up, cosine], milestones=[4])


def chained(optimizer: Optimizer) -> of_torch.ChainedScheduler:
    constant = of_torch.ConstantLR(optimizer, 0.5, total_iters=3)
    return of_torch.ChainedScheduler([constant, of_torch.ExponentialLR(optimizer, 0.9)])


def within(optimizer: Optimizer) -> of_torch.ChainedScheduler:
    """Return a scheduler of schedulers, one of which has two."""
    decay = of_torch.ExponentialLR(optimizer, 0.95)
    return of_torch.ChainedScheduler([sequential(optimizer), decay])


TORCH: dict[str, Make] = {
    "lambda": lambda o: of_torch.LambdaLR(o, warm_up_and_decay),
    "callable objects": lambda o: of_torch.LambdaLR(o, [Decay(), Decay()]),
    "cosine": lambda o: of_torch.CosineAnnealingLR(o, T_max=20),
    "cosine to a floor": lambda o: of_torch.CosineAnnealingLR(o, T_max=20, eta_min=1e-4),
    "sequential": sequential,
    "sequential to a floor": partial(sequential, floor=1e-4),
    "chained": chained,
    "nested": within,
    "restarts": lambda o: of_torch.CosineAnnealingWarmRestarts(o, 3, 2, eta_min=1e-5),
    "steps": lambda o: of_torch.MultiStepLR(o, [3, 8], gamma=0.1),
    "polynomial": lambda o: of_torch.PolynomialLR(o, total_iters=20, power=2.0),
    "one cycle": lambda o: of_torch.OneCycleLR(o, [g["lr"] for g in o.param_groups], 30),
}
DEEPSPEED: dict[str, Callable[[AdamW, Sequence[float]], Any]] = {
    "WarmupLR": lambda o, max_lr: of_deepspeed.WarmupLR(o, warmup_max_lr=max_lr),
    "WarmupDecayLR": lambda o, max_lr: of_deepspeed.WarmupDecayLR(
        o, 40, warmup_max_lr=max_lr, warmup_num_steps=5
    ),
    "WarmupCosineLR": lambda o, _: of_deepspeed.WarmupCosineLR(o, 40, warmup_num_steps=5),
    "OneCycle": lambda o, max_lr: of_deepspeed.OneCycle(
        o, [rate / 10 for rate in max_lr], max_lr, cycle_first_step_size=6, decay_step_size=2
    ),
    "LRRangeTest": lambda o, min_lr: of_deepspeed.LRRangeTest(o, list(min_lr), 3),
}


def grafted(
    before: Training,
    starting: Training,
    directory: Path,
    origins: Sequence[int | None] = (0, 1),
    *,
    scheduler_of_start: bool = False,
) -> GraftedState:
    return grafted_state(
        before.saved(directory),
        starting.saved(directory),
        origins,
        fresh=False,
        scheduler_of_start=scheduler_of_start,
        config={},
    )


def loaded(state: Node) -> Node:
    """Write the file of a scheduler, and let torch read it."""
    return torch.load(io.BytesIO(value_item(state)), weights_only=False)


def resumed(state: GraftedState, bases: Sequence[float], make: Make) -> list[list[float]]:
    """Return the rates of the five steps of START's job after it has loaded OUT."""
    job = Training(bases, make)
    job.load(state.optimizer_file, loaded(state.model_state[names.SCHEDULER]))
    assert job.scheduler.get_last_lr() == [group["lr"] for group in job.optimizer.param_groups]
    assert [group["initial_lr"] for group in job.optimizer.param_groups] == pytest.approx(
        [group["initial_lr"] for group in Training(bases, make).optimizer.param_groups], abs=0
    )
    return job.run(5)


def expected(steps: int, bases: Sequence[float], make: Make) -> list[list[float]]:
    """Return the rates of five steps of a job that had the new bases from the start."""
    job = Training(bases, make)
    job.run(steps)
    return job.run(5)


def ulps(rates: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    """Return the most units in the last place by which rates differ, of the largest of them."""
    pairs = [pair for both in zip(rates, others, strict=True) for pair in zip(*both, strict=True)]
    unit = math.ulp(max(max(pair) for pair in pairs))
    return max(abs(one - other) for one, other in pairs) / unit


@pytest.mark.parametrize("steps", [0, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("kind", TORCH)
def test_rates_are_those_of_a_job_with_the_new_bases(tmp_path: Path, kind: str, steps: int) -> None:
    make = TORCH[kind]
    before = Training(OLD, make)
    before.run(steps)
    state = grafted(before, Training(NEW, make), tmp_path)
    assert state.notes == ()
    found, wanted = resumed(state, NEW, make), expected(steps, NEW, make)
    assert ulps(found, wanted) <= 4
    if kind == "lambda":
        assert found[1:] == wanted[1:]


@pytest.mark.parametrize("kind", DEEPSPEED)
def test_schedulers_of_deepspeed_go_on_from_the_step(tmp_path: Path, kind: str) -> None:
    """They save nothing but the step. So the rate of the first update is the source's."""
    old, new = (lambda o, b=bases: DEEPSPEED[kind](o, b) for bases in (OLD, NEW))
    before = Training(OLD, old)
    before.run(8)
    state = grafted(before, Training(NEW, new), tmp_path)
    assert len(state.notes) == 1
    assert "No file tells how far the learning rate of param group 0 (now " in state.notes[0]
    job = Training(NEW, new)
    job.load(state.optimizer_file, loaded(state.model_state[names.SCHEDULER]))
    first, *later = job.run(5)
    assert first == before.run(1)[0]
    assert later == expected(8, NEW, new)[1:]


@pytest.mark.parametrize("kind", ["one cycle", "cyclic"])
def test_a_momentum_goes_on_with_the_rates_that_it_is_cycled_with(
    tmp_path: Path, kind: str
) -> None:
    cyclic = partial(of_torch.CyclicLR, base_lr=1e-4, max_lr=1e-2, step_size_up=6)
    make = TORCH.get(kind, cyclic)
    before, starting = Training(OLD, make), Training(NEW, make)
    before.run(3)
    for group in starting.optimizer.param_groups:
        group["betas"] = (group["betas"][0], 0.9)
    found = settings(grafted(before, starting, tmp_path).optimizer_file)
    wanted = [(group["betas"][0], 0.9) for group in before.optimizer.param_groups]
    assert [group["betas"] for group in found] == wanted
    assert wanted[0][0] != starting.optimizer.param_groups[0]["betas"][0]
    found = settings(grafted(before, starting, tmp_path, scheduler_of_start=True).optimizer_file)
    assert [g["betas"] for g in found] == [g["betas"] for g in starting.optimizer.param_groups]


def test_what_a_scheduler_puts_into_param_groups_makes_no_other_optimizer(tmp_path: Path) -> None:
    cycle, plain = (Training(OLD, TORCH[kind]).saved(tmp_path) for kind in ("one cycle", "lambda"))
    for old, new in ((cycle, plain), (plain, cycle)):
        require_same_settings(old, old.groups[0], new, new.groups[0])


class OnPlateau:
    """ReduceLROnPlateau with a loss that never falls."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.inner = of_torch.ReduceLROnPlateau(optimizer, patience=3)
        self.state_dict = self.inner.state_dict

    def step(self) -> None:
        self.inner.step(1.0)


def test_reduce_on_plateau_goes_on_from_the_rate_and_what_it_counts(tmp_path: Path) -> None:
    before = Training(OLD, OnPlateau)
    before.run(7)
    state = grafted(before, Training(NEW, OnPlateau), tmp_path)
    assert "No file tells how far" in state.notes[0]
    assert resumed_counts(state) == {"best": 1.0, "num_bad_epochs": 2, "last_epoch": 7}
    assert [group["lr"] for group in settings(state.optimizer_file)] == before.run(1)[0]


def resumed_counts(state: GraftedState) -> dict[str, Any]:
    scheduler = state.model_state[names.SCHEDULER]
    return {key: scheduler[key] for key in ("best", "num_bad_epochs", "last_epoch")}


@pytest.mark.parametrize("kind", ["lambda", "cosine to a floor", "sequential"])
@pytest.mark.parametrize(
    "origins", [(1, 0, 2), (0, 1, None), (None, 0, 2), (None, None, 1), (None,) * 3]
)
def test_groups_have_the_place_of_the_group_they_come_from(
    tmp_path: Path, kind: str, origins: tuple[int | None, ...]
) -> None:
    """The schedule is one for all, so a group of new parameters has its place too."""
    make = TORCH[kind]
    old, new = [*OLD, 3e-3], [*NEW, 2e-3]
    before = Training(old, make)
    before.run(7)
    state = grafted(before, Training(new, make), tmp_path, origins)
    assert state.notes == ()
    assert ulps(resumed(state, new, make), expected(7, new, make)) <= 4


def test_a_group_that_does_not_learn_tells_nothing_of_the_place(tmp_path: Path) -> None:
    make = TORCH["lambda"]
    before, new = Training([0.0, *OLD], make), [0.0, *NEW]
    before.run(7)
    state = grafted(before, Training(new, make), tmp_path, (0, 1, None))
    assert "param group 0 (now 0.0)" in state.notes[0]
    assert ulps(resumed(state, new, make), expected(7, new, make)) <= 4


def test_a_new_group_has_the_rate_of_start_where_the_others_disagree(tmp_path: Path) -> None:
    make: Make = lambda o: of_torch.LambdaLR(  # noqa: E731
        o, [lambda step: 0.9**step, lambda step: 0.8**step, lambda step: 1.0]
    )
    old, new = [1e-3, 1e-3, 1e-3], [2e-3, 2e-3, 5e-4]
    before = Training(old, make)
    before.run(3)
    state = grafted(before, Training(new, make), tmp_path, (0, 1, None))
    rates = [group["lr"] for group in settings(state.optimizer_file)]
    assert rates == pytest.approx([2e-3 * 0.9**3, 2e-3 * 0.8**3, 5e-4])
    assert "param group 2 (now 0.0005)" in state.notes[0]


def test_a_rule_keeps_the_schedule_of_start(tmp_path: Path) -> None:
    make = TORCH["cosine"]
    before, starting = Training(OLD, make), Training(NEW, make)
    before.run(5)
    state = grafted(before, starting, tmp_path, scheduler_of_start=True)
    assert state.notes == ()
    assert resumed(state, NEW, make) == expected(0, NEW, make)


FALLING: Make = lambda o: of_torch.ChainedScheduler([of_torch.ExponentialLR(o, 0.9)])  # noqa: E731
OTHERS: dict[str, tuple[Make, Make, str]] = {
    "kind": (TORCH["cosine"], TORCH["lambda"], "(without the same T_max, eta_min, lr_lambdas)"),
    "outer kind": (sequential, TORCH["lambda"], "(without the same _milestones, _schedulers,"),
    "inner count": (FALLING, chained, "(without the same _schedulers)"),
    "inner kind": (partial(sequential, first=of_torch.ConstantLR), sequential, "end_factor"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_another_kind_of_scheduler_begins_anew(tmp_path: Path, kind: str) -> None:
    other, make, says = OTHERS[kind]
    before = Training(OLD, other)
    before.run(5)
    state = grafted(before, Training(NEW, make), tmp_path)
    assert "The scheduler: the source has one of another kind (without the same" in state.notes[0]
    assert says in state.notes[0]
    assert "So it begins again, with START's learning rates." in state.notes[0]
    assert len(state.notes) == 1
    assert resumed(state, NEW, make) == expected(0, NEW, make)


def test_versions_of_torch_may_save_other_passing_entries(tmp_path: Path) -> None:
    make = TORCH["sequential"]
    before, starting = Training(OLD, make), Training(NEW, make)
    before.run(5)
    source = before.saved(tmp_path)
    state = source.model_state[names.SCHEDULER]
    for one in (state, *state["_schedulers"]):
        one.pop("_is_initial", None)
        one["verbose"] = False
    found = grafted_state(
        source, starting.saved(tmp_path), (0, 1), fresh=False, scheduler_of_start=False, config={}
    )
    assert found.notes == ()
    assert ulps(resumed(found, NEW, make), expected(5, NEW, make)) <= 4
    assert "verbose" not in found.model_state[names.SCHEDULER]


def test_other_settings_are_named(tmp_path: Path) -> None:
    before = Training(OLD, TORCH["cosine"])
    before.run(5)
    make: Make = lambda o: of_torch.CosineAnnealingLR(o, T_max=50)  # noqa: E731
    state = grafted(before, Training(OLD, make), tmp_path)
    assert state.model_state[names.SCHEDULER]["T_max"] == 50
    assert "START's scheduler has other settings (T_max)" in state.notes[0]


@pytest.mark.parametrize("kind", ["lambda", "sequential to a floor"])
def test_files_of_schedulers_follow_the_same_rule(tmp_path: Path, kind: str) -> None:
    """HF Trainer and Accelerate keep the scheduler in a file of its own, without the engine."""
    make = TORCH[kind]
    before, starting = Training(OLD, make), Training(NEW, make)
    before.run(6)
    files = tuple(inert(job.scheduler.state_dict(), tmp_path) for job in (before, starting))
    parts = tuple(
        model_part(
            inert(job.optimizer.state_dict()["param_groups"], tmp_path), {"lr_scheduler": None}
        )
        for job in (before, starting)
    )
    (one, other), (old, new) = files, parts
    for of_start in (False, True):
        state = grafted_state(
            old,
            new,
            (0, 1),
            fresh=False,
            scheduler_of_start=of_start,
            config={},
            scheduler_file=(one, other),
        )
        assert (state.notes, state.model_state["lr_scheduler"]) == ((), None)
        file = grafted_scheduler_file((one, other), (old, new), (0, 1), scheduler_of_start=of_start)
        job = Training(NEW, make)
        job.load(state.optimizer_file, loaded(file))
        assert ulps(job.run(5), expected(0 if of_start else 6, NEW, make)) <= 4


def test_lightning_keeps_the_scheduler_in_its_client_state(tmp_path: Path) -> None:
    make = TORCH["cosine"]
    before, starting = Training(OLD, make), Training(NEW, make)
    before.run(6)
    source, start = (
        job.saved(tmp_path, lr_scheduler=None, lr_schedulers=[job.scheduler.state_dict()])
        for job in (before, starting)
    )
    for of_start in (False, True):
        state = grafted_state(
            source, start, (0, 1), fresh=False, scheduler_of_start=of_start, config={}
        )
        assert state.notes == ()
        job = Training(NEW, make)
        (scheduler,) = state.model_state["lr_schedulers"]
        job.load(state.optimizer_file, scheduler)
        assert ulps(job.run(5), expected(0 if of_start else 6, NEW, make)) <= 4
