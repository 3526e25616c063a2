"""Optimizers are understood by what their state looks like."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from tests.oracle.files import padding_found
from tests.oracle.jobs import Resume, Train
from tests.oracle.laws import *  # noqa: F403
from tests.oracle.models import Case
from tests.oracle.optimizers import (
    adam_with_tensors,
    deepspeed_cpu_adagrad,
    deepspeed_cpu_adam,
    deepspeed_cpu_lion,
    deepspeed_fused_adam,
    missing_extension,
)
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.reshardings import Places, Resharding, carry
from tests.oracle.truth import Truth
from tests.oracle.values import value_differences

UNTESTED = {"zero_allow_untested_optimizer": True}
ANY_ON_CPU = {"zero_force_ds_cpu_optimizer": False}
OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}}
MASTERS = {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
ADAM, NONE = frozenset({"exp_avg", "exp_avg_sq"}), frozenset[str]()
ADAGRAD = Case("z2-adagrad", 2, "fp32", optimizer=torch.optim.Adagrad, one_group=True)


@dataclass(frozen=True)
class Trial(Resharding):
    """One way to train, at a stage, with what its checkpoint must hold.

    `resume` is there where DeepSpeed cannot resume its own files of `case`.
    """

    states: frozenset[str] = ADAM
    """Names of the states that have an element for every element of the parameters."""
    scalars: frozenset[str] = frozenset({"step"})
    """Names of the states that a param group has one of."""
    added: frozenset[str] = NONE
    """Names of the switches, all off, that DeepSpeed's loading adds to every param group."""
    extension: str | None = None
    """DeepSpeed's C++ extension that the optimizer is written in."""

    def alike(self, saved: Truth, resumed: Truth) -> tuple[Truth, Truth]:
        for group in saved.groups:
            group["hyper_parameters"].update(dict.fromkeys(self.added, False))
        return super().alike(saved, resumed)

    def is_known(self, line: str) -> bool:
        """The config that comes along is the one of the job that saved."""
        known = tuple(f"['{switch}']: missing on the left" for switch in self.added)
        return line.endswith(known)


def trial(stage: int, name: str, dtype: Any, make: Any = torch.optim.AdamW, **more: Any) -> Trial:  # noqa: ANN401
    """Make one of a stage; the stages are taken to opposite sides."""
    of_case = {key: more.pop(key) for key in ("ds_overrides", "one_group") if key in more}
    case = Case(f"z{stage}-{name}", stage, dtype, optimizer=make, **of_case)
    return Trial(case, *((3, 2) if stage == 3 else (2, 3)), **more)


SGD: Any = torch.optim.SGD
AMSGRAD = partial(torch.optim.Adam, amsgrad=True)
RMSPROP = partial(torch.optim.RMSprop, momentum=0.9, centered=True)
OF_RMSPROP = frozenset({"square_avg", "momentum_buffer", "grad_avg"})
OVERFLOW = {"fp16": {"initial_scale_power": 16}}
RESHARDINGS = [
    trial(2, "amsgrad", "fp32", AMSGRAD, states=ADAM | {"max_exp_avg_sq"}),
    trial(3, "amsgrad", "fp32", AMSGRAD, states=ADAM | {"max_exp_avg_sq"}),
    trial(3, "sgd", "fp32", SGD, ds_overrides=UNTESTED, states=NONE, scalars=NONE),
    # A new engine of stage 3 has every sub-group twice in its only param group, and refuses its own
    # files.
    trial(
        3, "adagrad", "fp32", torch.optim.Adagrad, states=frozenset({"sum"}), one_group=True,
        resume=ADAGRAD,
    ),
    trial(2, "rmsprop", "fp32", RMSPROP, ds_overrides=UNTESTED, states=OF_RMSPROP),
    trial(2, "tensor-lr", "fp32", adam_with_tensors),
    trial(2, "before-first-step", "bf16", states=NONE, scalars=NONE, steps=0),
    trial(3, "before-first-step", "bf16", states=NONE, scalars=NONE, steps=0),
    trial(2, "overflowed", "fp16", ds_overrides=OVERFLOW, states=NONE, scalars=NONE),
    trial(3, "bf16-masters", "bf16", ds_overrides=MASTERS),
    trial(3, "offload", "bf16", ds_overrides=OFFLOAD | ANY_ON_CPU),
    trial(2, "cpu-adam", "bf16", deepspeed_cpu_adam, ds_overrides=OFFLOAD, extension="cpu_adam"),
    trial(3, "fused-adam", "bf16", deepspeed_fused_adam, extension="fused_adam"),
    # Its exp_avg_sq is never used.
    trial(
        3, "cpu-lion", "bf16", deepspeed_cpu_lion, ds_overrides=OFFLOAD,
        added=frozenset({"amsgrad"}), extension="cpu_lion",
    ),
    trial(
        2, "cpu-adagrad", "bf16", deepspeed_cpu_adagrad, ds_overrides=OFFLOAD | ANY_ON_CPU,
        states=frozenset({"exp_avg_sq"}), extension="cpu_adagrad",
    ),
]  # fmt: skip
ABLE = [one for one in RESHARDINGS if not missing_extension(one.extension)]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """What can be done here of them."""
    return carry(ABLE, tmp_path_factory.mktemp("optimizers"))


@pytest.fixture
def one(request: pytest.FixtureRequest, places: Places) -> Trial:
    """One trial that was converted and resumed without an error."""
    found: Trial = request.param
    if reason := missing_extension(found.extension):
        pytest.skip(reason)
    if found.name in places.errors:
        pytest.fail(places.errors[found.name], pytrace=False)
    return found


def test_the_trial_is_what_it_says(one: Trial, places: Places) -> None:
    saved = places.saved(one)
    assert saved.states.keys() == {"fp32", *one.states}
    assert {key for group in saved.groups for key in group["scalars"]} == one.scalars
    assert saved.counters["global_steps"] == one.steps
    assert saved.counters["skipped_steps"] == (3 if "overflowed" in one.name else 0)


def test_padding_below_stage_3_is_one_value(places: Places) -> None:
    flat = [one for one in ABLE if one.case.zero_stage < 3]
    assert any(padding_found(places.source(one)) for one in flat)


def test_states_that_are_no_elements_of_parameters_stay_where_zero_is_not(tmp_path: Path) -> None:
    """Adafactor's, of which no truth is gathered: an engine saves again what it has loaded."""
    case = Case("z0-factored", 0, "fp32", optimizer=torch.optim.Adafactor)
    source, out, again = (tmp_path / name for name in ("saved", "out", "again"))
    require_success(run_jobs(2, [Train(case, source, None)], tmp_path / "ranks"))
    streamshard.repartition(source, out, world_size=3, verify=True)
    require_success(
        run_jobs(
            3, [Resume(case, out, tmp_path / "none.pt", again, gathers=False)], tmp_path / "ranks"
        )
    )
    saved, ours, loaded = (
        torch.load(next(run.glob("*/*.pt")), weights_only=False) for run in (source, out, again)
    )
    assert list(value_differences(ours, loaded, "loaded")) == []
    assert (saved.pop("dp_world_size"), ours.pop("dp_world_size")) == (2, 3)
    assert list(value_differences(saved, ours, "written")) == []
