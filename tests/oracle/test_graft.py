"""Grafts onto changed models: engines hold what SRC had, wherever START puts it, and train on.

What is expected is put together here from what the trained engine and the new one held, by a table
of each scenario, without the rules of the graft.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import streamshard
from streamshard.errors import UnsupportedError
from tests.oracle.by_hand import ByHand, Done, by_hand
from tests.oracle.cases import BF16_OPTIMIZER
from tests.oracle.jobs import Resume, Train, after_path
from tests.oracle.models import VOCABULARY, WIDTH, Block, Case, TinyLanguageModel
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.test_muon import DEVICE_2
from tests.oracle.truth import Truth

STEPS = 3


class MoreTokens(TinyLanguageModel):
    """One whose vocabulary was resized; the output head is tied with it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY + 6, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY + 6, bias=False)
        self.head.weight = self.embed.weight


class Untied(TinyLanguageModel):
    """One whose output head is no longer tied with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)


class Deeper(TinyLanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.extend([Block(), Block()])


class Thawed(TinyLanguageModel):
    def __init__(self) -> None:
        super().__init__()
        for param in self.parameters():
            param.requires_grad_(True)


class Frozen(TinyLanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.embed.weight.requires_grad_(False)


class Renamed(TinyLanguageModel):
    """One whose first block has another name, and low-rank parts beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = self.blocks[0]
        self.low = nn.Linear(WIDTH, 2, bias=False)
        self.high = nn.Linear(2, WIDTH, bias=False)
        del self.blocks[0]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        extra: torch.Tensor = self.high(self.low(self.base(self.embed(tokens)))).float().mean()
        loss: torch.Tensor = super().forward(tokens)
        return loss + extra


def faster(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An AdamW with other settings than the trained job's."""
    changed = [
        {**group, "lr": 3 * group["lr"], "weight_decay": 0.5 + group["weight_decay"]}
        for group in groups
    ]
    return torch.optim.AdamW(changed)


@dataclass(frozen=True)
class Scenario:
    """A change of the model, and where each parameter's values are to come from."""

    name: str
    model: Callable[[], nn.Module] | None
    rules: str = ""
    origins: Mapping[str, tuple[str, str]] = field(default_factory=dict, hash=False)
    """Beginning of a name → how its values come, and the beginning of their name in SRC."""
    optimizer: Callable[..., Any] = torch.optim.AdamW
    fresh: bool = False
    one_group: bool = False

    def origin(self, name: str) -> tuple[str, str]:
        """Return how a parameter gets its values, and from which of SRC."""
        for begin, (how, old) in self.origins.items():
            if name.startswith(begin):
                return how, name.replace(begin, old, 1)
        return "keep", name


SCENARIOS = [
    Scenario("same", None),
    Scenario("settings", None, optimizer=faster),
    Scenario("joined", None, one_group=True),
    Scenario("fresh", MoreTokens, "rows embed.weight", {"embed": ("rows", "embed")}, fresh=True),
    Scenario("tokens", MoreTokens, "rows embed.weight", {"embed": ("rows", "embed")}),
    Scenario("untied", Untied, "copy head.weight <- embed.weight", {"head": ("keep", "embed")}),
    Scenario(
        "deeper",
        Deeper,
        "copy blocks.2.* <- blocks.0.*\nnew blocks.3.*",
        {"blocks.2.": ("keep", "blocks.0."), "blocks.3.": ("new", "")},
    ),
    Scenario(
        "thawed",
        Thawed,
        "thaw *middle*\nthaw frozen_shift",
        {
            "blocks.0.middle": ("thaw", "blocks.0.middle"),
            "blocks.1.middle": ("thaw", "blocks.1.middle"),
            "frozen_shift": ("thaw", "frozen_shift"),
        },
    ),
    Scenario("frozen", Frozen, "freeze embed.weight"),
    Scenario(
        "renamed",
        Renamed,
        "move blocks.0.* -> base.*\nmove blocks.1.* -> blocks.0.*\nnew {low,high}.weight",
        {
            "base.": ("keep", "blocks.0."),
            "blocks.0.": ("keep", "blocks.1."),
            "low": ("new", ""),
            "high": ("new", ""),
        },
    ),
]  # fmt: skip


@dataclass(frozen=True)
class Way:
    """Stages, dtypes and counts of ranks of both jobs, and the changes that are tried with them."""

    old: Case
    ranks: int
    new: Case
    new_ranks: int
    names: tuple[str, ...]


def case(stage: int, dtype: str = "bf16") -> Case:
    return Case(f"{dtype}-z{stage}", stage, dtype)  # type: ignore[arg-type]


ALL = tuple(one.name for one in SCENARIOS)
WAYS = {
    "2-to-3": Way(case(2), 2, case(3), 3, ALL),
    "3-to-2": Way(case(3), 4, case(2), 5, ("fresh", "deeper", "thawed", "frozen")),
    "1-to-1": Way(case(1), 2, case(1), 3, ("settings", "renamed")),
    "bf16-optimizer": Way(BF16_OPTIMIZER, 2, BF16_OPTIMIZER, 3, ("fresh", "tokens")),
    "fp32": Way(case(3, "fp32"), 2, case(3, "fp32"), 2, ("same", "untied")),
    "fp16": Way(case(2, "fp16"), 3, case(2, "fp16"), 2, ("fresh", "joined")),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("graft")


@cache
def _carried_out(name: str, root: Path) -> dict[str, Done]:
    way, place = WAYS[name], root / name
    scenarios = [one for one in SCENARIOS if one.name in way.names]
    train = [Train(way.old, place / "source", place / "old.pt", steps=STEPS, seed=11)]
    require_success(run_jobs(way.ranks, train, place / "work"))
    jobs = {one.name: _job(way.new, one) for one in scenarios}
    starts = [
        Train(job, place / name / "start", place / name / "start.pt", steps=0, seed=23)
        for name, job in jobs.items()
    ]
    require_success(run_jobs(way.new_ranks, starts, place / "work"))
    for one in scenarios:
        here = place / one.name
        (here / "rules").write_text(one.rules)
        streamshard.graft(
            place / "source",
            here / "start",
            here / "out",
            rules=here / "rules",
            fresh_states=one.fresh,
            verify=True,
        )
    resumes = [
        Resume(job, place / name / "out", place / name / "resumed.pt", further_steps=3)
        for name, job in jobs.items()
    ]
    require_success(run_jobs(way.new_ranks, resumes, place / "work"))
    for one in scenarios:
        here = place / one.name
        old, start = Truth.load(place / "old.pt"), Truth.load(here / "start.pt")
        _wanted(one, old, start).save(here / "wanted.pt")
    hands = [
        ByHand(job, place / name / "wanted.pt", place / name / "hand.pt", further_steps=3)
        for name, job in jobs.items()
    ]
    require_success(run_jobs(way.new_ranks, hands, place / "work", do=by_hand))
    return {name: _done(place, name) for name in jobs}


def _done(place: Path, name: str) -> Done:
    here = place / name
    loaded = here / "resumed.pt", here / "hand.pt"
    both = [path for one in loaded for path in (one, after_path(one))]
    return Done(*map(Truth.load, (place / "old.pt", here / "wanted.pt", *both)))


def _wanted(scenario: Scenario, old: Truth, start: Truth) -> Truth:
    """Put together what the new job holds if it goes on from the trained one."""
    states = {
        state: {name: _expected(scenario, old, start, state, name) for name in start.states["fp32"]}
        for state in (["fp32"] if scenario.fresh else old.states)
    }
    groups = []
    for number, group in enumerate(start.groups):
        before = old.groups[number]
        settings, earlier = group["hyper_parameters"], before["hyper_parameters"]
        share = Fraction(earlier["lr"]) / Fraction(earlier["initial_lr"])
        rate = float(share * Fraction(settings["initial_lr"]))
        scalars = {} if scenario.fresh else before["scalars"]
        groups.append({**group, "hyper_parameters": {**settings, "lr": rate}, "scalars": scalars})
    rates = [group["hyper_parameters"]["lr"] for group in groups]
    scheduler = {**(old.scheduler or {}), "_last_lr": rates}
    scheduler |= {key: (start.scheduler or {})[key] for key in ("base_lrs", "lr_lambdas")}
    weights = {name: states["fp32"][name].to(value.dtype) for name, value in start.weights.items()}
    return replace(
        start,
        weights=weights,
        frozen={name: _frozen(scenario, old, start, name) for name in start.frozen},
        buffers=old.buffers,
        states=states,
        groups=groups,
        scheduler=scheduler,
        counters=old.counters,
        scaler=old.scaler,
    )


def _job(new: Case, one: Scenario) -> Case:
    name = f"{new.name}-{one.name}"
    changes: dict[str, Any] = {"model": one.model, "one_group": one.one_group}
    return replace(new, name=name, optimizer=one.optimizer, **changes)


def _expected(scenario: Scenario, old: Truth, start: Truth, state: str, name: str) -> torch.Tensor:
    how, source = scenario.origin(name)
    begun = start.states["fp32"][name]
    begun = begun if state == "fp32" else torch.zeros_like(begun)
    if how == "new":
        return begun
    if how == "thaw":
        return old.frozen[source].float() if state == "fp32" else begun
    kept = old.states[state][source]
    return torch.cat([kept, begun[len(kept) :]]) if how == "rows" else kept


def _frozen(scenario: Scenario, old: Truth, start: Truth, name: str) -> torch.Tensor:
    how, source = scenario.origin(name)
    if how == "new":
        return start.frozen[name]
    if source in old.frozen:
        return old.frozen[source]
    return old.states["fp32"][source].to(start.frozen[name].dtype)


@pytest.mark.parametrize(("way", "name"), [(way, name) for way in WAYS for name in WAYS[way].names])
def test_it_holds_and_trains_on_as_an_engine_that_was_filled_by_hand(
    way: str, name: str, root: Path
) -> None:
    done = _carried_out(way, root)[name]
    assert done.hand is not None
    assert done.hand_after is not None
    done.require_the_same()


UNTESTED = {"zero_allow_untested_optimizer": True}
ADAGRAD = Case("z2-adagrad", 2, "bf16", UNTESTED, optimizer=torch.optim.Adagrad, one_group=True)
"""Its states are there before the first step."""


def carried(case: Case, place: Path, *, fresh: bool) -> tuple[Truth, Truth, Truth]:
    """Graft onto the same model; returns what SRC, START and the resumed engine hold."""
    train = Train(case, place / "source", place / "old.pt", seed=11)
    require_success(run_jobs(2, [train], place / "work"))
    start = Train(case, place / "start", place / "start.pt", steps=0, seed=23)
    require_success(run_jobs(3, [start], place / "work"))
    streamshard.graft(
        place / "source", place / "start", place / "out", fresh_states=fresh, verify=True
    )
    resume = Resume(case, place / "out", place / "resumed.pt", further_steps=2)
    require_success(run_jobs(3, [resume], place / "work"))
    old, begun, resumed = (Truth.load(place / f"{name}.pt") for name in ("old", "start", "resumed"))
    return old, begun, resumed


@pytest.mark.parametrize(
    ("case", "fresh"),
    [(ADAGRAD, False), (ADAGRAD, True), (DEVICE_2, True)],
    ids=lambda one: getattr(one, "name", str(one)),
)
def test_states_that_are_made_at_the_start(tmp_path: Path, case: Case, fresh: bool) -> None:
    old, begun, resumed = carried(case, tmp_path, fresh=fresh)
    assert resumed.states.keys() == (begun if fresh else old).states.keys()
    for state, tensors in resumed.states.items():
        wanted = (begun if fresh and state != "fp32" else old).states[state]
        for name, value in tensors.items():
            assert torch.equal(value, wanted[name]), (state, name)


def test_new_members_of_such_a_group_are_refused(tmp_path: Path) -> None:
    new = replace(ADAGRAD, name="z2-adagrad-thawed", model=Thawed)
    jobs = [
        Train(ADAGRAD, tmp_path / "source", None),
        Train(new, tmp_path / "start", None, steps=0),
    ]
    require_success(run_jobs(2, jobs, tmp_path / "work"))
    (tmp_path / "rules").write_text("thaw *")
    with pytest.raises(UnsupportedError, match="keeps sum, which does not begin with zeros"):
        streamshard.graft(
            tmp_path / "source", tmp_path / "start", tmp_path / "no", rules=tmp_path / "rules"
        )
