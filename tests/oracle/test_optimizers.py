"""Optimizers are understood by what their state looks like."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from streamshard.errors import UnsupportedError
from tests.oracle.files import padding_found
from tests.oracle.jobs import Resume, Train
from tests.oracle.laws import *  # noqa: F403
from tests.oracle.models import Case
from tests.oracle.optimizers import (
    OfEachRank,
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


def trials(stage: int) -> list[Trial]:
    """List those of a stage; the stages are taken to opposite sides."""
    sizes = (3, 2) if stage == 3 else (2, 3)

    def trial(name: str, dtype: Any, make: Any = torch.optim.AdamW, **more: Any) -> Trial:  # noqa: ANN401
        of_case = {key: more.pop(key) for key in ("ds_overrides", "one_group") if key in more}
        case = Case(f"z{stage}-{name}", stage, dtype, optimizer=make, **of_case)
        return Trial(case, *sizes, **more)

    amsgrad = partial(torch.optim.Adam, amsgrad=True)
    sgd: Any = torch.optim.SGD
    rmsprop = partial(torch.optim.RMSprop, momentum=0.9, centered=True)
    of_rmsprop = frozenset({"square_avg", "momentum_buffer", "grad_avg"})
    overflow = {"fp16": {"initial_scale_power": 16}}
    offload = OFFLOAD | ANY_ON_CPU
    # A new engine of stage 3 has every sub-group twice in its only param group, and refuses its own
    # files.
    adagrad = {"one_group": True, "resume": ADAGRAD if stage == 3 else None}
    return [
        trial("amsgrad", "fp32", amsgrad, states=ADAM | {"max_exp_avg_sq"}),
        trial("sgd", "fp32", sgd, ds_overrides=UNTESTED, states=NONE, scalars=NONE),
        trial("adagrad", "fp32", torch.optim.Adagrad, states=frozenset({"sum"}), **adagrad),
        trial("rmsprop", "fp32", rmsprop, ds_overrides=UNTESTED, states=of_rmsprop),
        trial("tensor-lr", "fp32", adam_with_tensors),
        trial("before-first-step", "bf16", states=NONE, scalars=NONE, steps=0),
        trial("overflowed", "fp16", ds_overrides=overflow, states=NONE, scalars=NONE),
        trial("bf16-masters", "bf16", ds_overrides=MASTERS),
        trial("offload", "bf16", ds_overrides=offload),
        trial("cpu-adam", "bf16", deepspeed_cpu_adam, ds_overrides=OFFLOAD, extension="cpu_adam"),
        trial("fused-adam", "bf16", deepspeed_fused_adam, extension="fused_adam"),
        # Its exp_avg_sq is never used.
        trial(
            "cpu-lion", "bf16", deepspeed_cpu_lion, ds_overrides=OFFLOAD,
            added=frozenset({"amsgrad"}), extension="cpu_lion",
        ),
        trial(
            "cpu-adagrad", "bf16", deepspeed_cpu_adagrad, ds_overrides=offload,
            states=frozenset({"exp_avg_sq"}), extension="cpu_adagrad",
        ),
    ]  # fmt: skip


RESHARDINGS = [*trials(2), *trials(3)]
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


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_numbers_of_each_rank_in_param_groups_stay_on_their_ranks(
    tmp_path: Path, stage: int
) -> None:
    case = Case(f"z{stage}-of-each", stage, "bf16", UNTESTED, optimizer=OfEachRank)
    source, store, out, again = (tmp_path / name for name in ("saved", "s.zarr", "out", "again"))
    require_success(run_jobs(2, [Train(case, source, None)], tmp_path / "ranks"))
    streamshard.convert(source, store, verify=True)
    streamshard.repartition(store, out, world_size=2, verify=True)
    resume = Resume(case, out, tmp_path / "none.pt", again, gathers=False)
    require_success(run_jobs(2, [resume], tmp_path / "ranks"))
    files = sorted(path.relative_to(source) for path in source.glob("*/*optim_states.pt"))
    found = set()
    for file in files:
        saved, ours, loaded = (
            torch.load(run / file, weights_only=False)["optimizer_state_dict"]
            for run in (source, out, again)
        )
        key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
        groups = saved[key]["param_groups"]
        assert list(value_differences(groups, ours[key]["param_groups"], "written")) == []
        assert list(value_differences(ours, loaded, "loaded")) == []
        found.add(tuple(group["d"] for group in groups))
    assert streamshard.verify(out, against=source).is_good  # the rest, but for stage 3's padding
    assert len(found) == len(files) == 2
    with pytest.raises(UnsupportedError, match="differs between ranks: each computes it"):
        streamshard.repartition(source, tmp_path / "other", world_size=3)
