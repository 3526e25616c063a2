"""Grafts of jobs in parts: tensor parallel ranks, a pipeline's stages, experts.

As in `test_graft`, what the engines are to hold is put together from what the trained job and the
new one held, and put into engines by hand.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from tests.oracle.by_hand import ByHand, Done, by_hand
from tests.oracle.jobs import Resume, Train
from tests.oracle.models import Case
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.test_auto_experts import spread as auto_experts
from tests.oracle.test_graft import Deeper, faster
from tests.oracle.topology.cases import BF16_OPTIMIZER
from tests.oracle.topology.experts import ExpertParallel
from tests.oracle.topology.pipeline import Pipeline
from tests.oracle.topology.tensor import TensorParallel
from tests.oracle.truth import Truth


@dataclass(frozen=True)
class Way:
    """A job in parts, the one that goes on with its training, and what is to become of each."""

    old: Case
    ranks: int
    new: Case
    new_ranks: int
    rules: str = ""
    origin: Callable[[str], tuple[str, str]] = field(default=lambda name: ("keep", name))
    """Name of a tensor in the new job → how its values come, and its name in the old one."""
    by_hand: bool = True
    """Whether an engine is filled by hand, too."""


def deeper(name: str) -> tuple[str, str]:
    """Give the third block what the first one had; the fourth is new."""
    if ".blocks.3." in name:
        return "new", name
    return "keep", name.replace(".blocks.2.", ".blocks.0.")


def with_a_layer_more(name: str) -> tuple[str, str]:
    """Number the layers of the second stage from 4 on, as before the first one had layer 4."""
    part, _, rest = name.partition(".")
    layer, _, end = rest.partition(".")
    if not layer.isdecimal() or int(layer) < 4:
        return "keep", name
    return ("new", name) if layer == "4" else ("keep", f"{part}.{int(layer) - 1}.{end}")


def more_experts(name: str) -> tuple[str, str]:
    """Let each expert of the first layer be two, and the gate choose among all."""
    if name == "mixtures.0.deepspeed_moe.gate.wg.weight":
        return "rows", name
    for number in range(4, 8):
        old = name.replace(
            f".0.deepspeed_moe.experts.deepspeed_experts.{number}.",
            f".0.deepspeed_moe.experts.deepspeed_experts.{number - 4}.",
        )
        if old != name:
            return "keep", old
    return "keep", name


def other_bias(name: str) -> tuple[str, str]:
    """Let one bias of each expert be trained where it was not, or the reverse."""
    return "other" if name.endswith(".down.bias") and "mixtures." in name else "keep", name


def _case(name: str, stage: int, topology: Any, **changes: Any) -> Case:  # noqa: ANN401
    return Case(f"{name}-z{stage}", stage, "bf16", topology=topology, **changes)


TENSOR, EXPERTS = TensorParallel(2), ExpertParallel((2, 2))
SHARED = ExpertParallel((2, 2), tensor=2)
FROZEN = ExpertParallel((2, 2), freezes=True)
MORE = ExpertParallel((2, 2), counts=(8, 2))
MOVES = "new 4.*\nmove 4.* -> 5.*\nmove 5.* -> 6.*\nmove 6.* -> 7.*"
COPIES = (
    "copy mixtures.0.*deepspeed_experts.{4,5,6,7}.* <- mixtures.0.*deepspeed_experts.{0,1,2,3}.*\n"
    "rows mixtures.0.*gate*"
)
WAYS = {
    "tensor": Way(
        _case("tensor", 2, TENSOR),
        4,
        _case("tensor-deeper", 3, TENSOR, model=Deeper),
        2,
        "copy blocks.2.* <- blocks.0.*\nnew blocks.3.*",
        deeper,
    ),
    "pipeline": Way(
        _case("pipeline", 1, Pipeline(), ds_overrides=BF16_OPTIMIZER),
        2,
        _case("pipeline-deeper", 1, Pipeline(extra=True), ds_overrides=BF16_OPTIMIZER),
        4,
        MOVES,
        with_a_layer_more,
    ),
    "pipeline-tensor": Way(
        _case("pipeline-tensor", 1, Pipeline(tensor=2)),
        4,
        _case("pipeline-tensor-deeper", 1, Pipeline(tensor=2, extra=True), optimizer=faster),
        4,
        MOVES,
        with_a_layer_more,
    ),
    "experts": Way(
        _case("experts", 2, EXPERTS), 4, _case("more-experts", 2, MORE), 2, COPIES, more_experts
    ),
    "spread": Way(_case("spread", 2, EXPERTS), 2, _case("on-one", 2, ExpertParallel((1, 1))), 2),
    "shared": Way(
        _case("shared", 2, SHARED), 4, _case("shared-on", 1, SHARED, optimizer=faster), 4
    ),
    "frozen-experts": Way(
        _case("experts", 2, EXPERTS),
        2,
        _case("frozen-experts", 1, FROZEN),
        4,
        "freeze mixtures.*.down.bias",
        other_bias,
    ),
    "thawed-experts": Way(
        _case("frozen-experts", 2, FROZEN),
        4,
        _case("experts", 1, EXPERTS),
        2,
        "thaw mixtures.*.down.bias",
        other_bias,
    ),
    "auto-experts": Way(auto_experts(2, 2), 4, auto_experts(3, 1), 2, by_hand=False),
    "auto-experts-3": Way(auto_experts(3, 1), 2, auto_experts(2, 2), 4, by_hand=False),
}


@pytest.fixture(scope="module")
def carried_out(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Done]:
    """Run all jobs of one count of ranks in the same processes."""
    root = tmp_path_factory.mktemp("parts")

    def run(jobs: Mapping[str, Any], ranks: Callable[[Way], int], **more: Any) -> None:  # noqa: ANN401
        for count in {ranks(way) for way in WAYS.values()}:
            mine = [jobs[name] for name in jobs if ranks(WAYS[name]) == count]
            require_success(run_jobs(count, mine, root / "work", **more))

    def path(name: str, what: str) -> Path:
        return root / name / what

    train = {
        name: Train(way.old, path(name, "source"), path(name, "old.pt"), seed=11)
        for name, way in WAYS.items()
    }
    run(train, lambda way: way.ranks)
    start = {
        name: Train(way.new, path(name, "start"), path(name, "start.pt"), steps=0, seed=23)
        for name, way in WAYS.items()
    }
    run(start, lambda way: way.new_ranks)
    for name, way in WAYS.items():
        path(name, "rules").write_text(way.rules)
        sides = path(name, "source"), path(name, "start"), path(name, "out")
        streamshard.graft(*sides, rules=path(name, "rules"), verify=True)
        found = streamshard.verify(sides[2], against=sides[0])
        assert (found.problems, found.differences) == ((), ())
        old, begun = (Truth.load(path(name, f"{what}.pt")) for what in ("old", "start"))
        wanted(way, old, begun).save(path(name, "wanted.pt"))
    resume = {
        name: Resume(way.new, path(name, "out"), path(name, "resumed.pt"), further_steps=3)
        for name, way in WAYS.items()
    }
    run(resume, lambda way: way.new_ranks)
    hand = {
        name: ByHand(way.new, path(name, "wanted.pt"), path(name, "hand.pt"), further_steps=3)
        for name, way in WAYS.items()
        if way.by_hand
    }
    run(hand, lambda way: way.new_ranks, do=by_hand)
    return {name: _done(root / name) for name in WAYS}


def _done(place: Path) -> Done:
    named = ("old", "wanted", "resumed", "resumed.after", "hand", "hand.after")
    paths = [place / f"{name}.pt" for name in named]
    return Done(*(Truth.load(path) for path in paths if path.exists()))


def wanted(way: Way, old: Truth, start: Truth) -> Truth:
    """Put together what the new job holds if it goes on from the trained one."""

    def value(
        of: Mapping[str, torch.Tensor],
        others: Mapping[str, torch.Tensor],
        begun: torch.Tensor,
        name: str,
    ) -> torch.Tensor:
        how, source = way.origin(name)
        if how == "new":
            return begun
        if how == "other" and source not in of:
            return others[source].to(begun.dtype) if source in others else begun
        return torch.cat([of[source], begun[len(of[source]) :]]) if how == "rows" else of[source]

    masters, trained = start.states["fp32"], old.states["fp32"]
    states = {
        state: {
            name: value(of, old.frozen, begun, name)
            if state == "fp32"
            else value(of, {}, torch.zeros_like(begun), name)
            for name, begun in masters.items()
        }
        for state, of in old.states.items()
    }
    weights = {name: states["fp32"][name].to(begun.dtype) for name, begun in start.weights.items()}
    return replace(
        start,
        weights=weights,
        frozen={
            name: value(old.frozen, trained, begun, name) for name, begun in start.frozen.items()
        },
        buffers={
            name: value(old.buffers, {}, begun, name) for name, begun in start.buffers.items()
        },
        states=states,
        groups=[_group(way, old, group) for group in start.groups],
        scheduler=_scheduler(old.scheduler, start.scheduler),
        counters=old.counters,
        scaler=old.scaler,
    )


def _scheduler(old: dict[str, Any] | None, start: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the new job's scheduler where the trained one has come to."""
    if old is None or start is None:
        return start
    share = Fraction(old["_last_lr"][0]) / Fraction(old["base_lrs"][0])
    rates = [float(share * Fraction(base)) for base in start["base_lrs"]]
    return {**old, **{k: start[k] for k in ("base_lrs", "lr_lambdas")}, "_last_lr": rates}


def _group(way: Way, old: Truth, group: dict[str, Any]) -> dict[str, Any]:
    """Return a param group with its own settings, at the place that the trained one has reached."""
    sources = {way.origin(name)[1] for name in group["params"]}
    before = next(one for one in old.groups if sources & {*one["params"]})
    settings, earlier = group["hyper_parameters"], before["hyper_parameters"]
    if "initial_lr" in settings:
        share = Fraction(earlier["lr"]) / Fraction(earlier["initial_lr"])
        settings = {**settings, "lr": float(share * Fraction(settings["initial_lr"]))}
    return {**group, "hyper_parameters": settings, "scalars": before["scalars"]}


@pytest.mark.parametrize("name", WAYS)
def test_engines_hold_and_train_on_as_those_that_were_filled_by_hand(
    name: str, carried_out: Mapping[str, Done]
) -> None:
    done = carried_out[name]
    done.require_the_same()
