"""Grafts the whole way that users of HF Trainer and Accelerate go, by commands that are printed.

A job trains and saves; its script is changed; `--save-start` saves the changed job; the command
that it prints refuses and prints rules; with these it writes what the changed job resumes from.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from tests.cli.conftest import in_process
from tests.forked import Finished
from tests.oracle.frameworks.accelerating import AccelerateRun
from tests.oracle.frameworks.changed_models import half_frozen, with_adapter, with_more_tokens
from tests.oracle.frameworks.common import IMPORTS as IMPORTS
from tests.oracle.frameworks.common import Seen, run
from tests.oracle.frameworks.hf_trainer import HfTrain
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.test_start_save import save_start
from tests.oracle.truth import Truth

STEPS, LAST = 3, 5
RATE_ULPS = 4
SETTINGS = {"learning_rate": 1e-3, "weight_decay": 0.01}
SOURCES: Mapping[str, tuple[int, Callable[[Any], Any] | None]] = {
    "whole-z2": (2, None),
    "whole-z3": (3, None),
    "half-z3": (3, half_frozen),
    "of-adapter-z3": (3, with_adapter),
}
"""Name → ZeRO stage and what the script does to the model, of jobs that train and save."""


@dataclass(frozen=True)
class Scenario:
    """A change of a script, and the rules that the refusal is to print."""

    name: str
    source: str
    change: Callable[[Any], Any] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    rules: tuple[str, ...] = ()
    """Some of them, in full; none if there is no refusal."""
    finds_last: bool = False
    """Whether the job looks for its last checkpoint itself."""

    @property
    def stage(self) -> int:
        return SOURCES[self.source][0]


OF_ADAPTER = (
    "move transformer.wte.weight -> base_model.model.transformer.wte.weight",
    "move transformer.ln_f.bias -> base_model.model.transformer.ln_f.bias",
    "freeze base_model.model.transformer.h.*.attn.c_attn.base_layer.weight",
    "new base_model.model.transformer.h.*.attn.c_attn.lora_A.default.weight",
)
SCENARIOS = [
    Scenario("tokens-z3", "whole-z3", with_more_tokens, {}, ("rows transformer.wte.weight",)),
    Scenario("unfrozen", "half-z3", None, {}, ("thaw transformer.h.0.ln_1.bias",)),
    Scenario("adapter-z2", "whole-z2", with_adapter, {}, OF_ADAPTER),
    Scenario("adapter-z3", "whole-z3", with_adapter, {}, OF_ADAPTER),
    Scenario("settings-z2", "whole-z2", None, SETTINGS),
    Scenario("settings-z3", "whole-z3", None, SETTINGS, finds_last=True),
    Scenario("settings-of-adapter", "of-adapter-z3", with_adapter, SETTINGS),
]


@dataclass(frozen=True)
class Place:
    """Where the files of the jobs lie."""

    root: Path

    def source(self, scenario: Scenario) -> Path:
        return self.root / scenario.source / f"checkpoint-{STEPS}"

    def trained(self, scenario: Scenario) -> Truth:
        """What the engine held that saved the source."""
        return Truth.load(self.root / f"{scenario.source}.pt")

    def start(self, scenario: Scenario) -> Path:
        return self.root / f"{scenario.name}-start"

    def out(self, scenario: Scenario) -> Path:
        return self.root / scenario.name / f"checkpoint-{STEPS}"

    def told(self, scenario: Scenario) -> Path:
        return self.root / f"{scenario.name}.rules"

    def resumed(self, scenario: Scenario) -> Truth:
        """What the engine held that had loaded OUT."""
        return Truth.load(self.root / f"{scenario.name}.pt")

    def seen(self, name: str) -> list[Seen]:
        found: list[Seen] = json.loads((self.root / f"{name}.json").read_text())
        return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """All jobs that train first, and those whose rates the grafted ones must have."""
    root = tmp_path_factory.mktemp("graft-frameworks")
    jobs = [
        HfTrain(
            z, root / name, root / f"{name}.json", STEPS, None, None, root / f"{name}.pt",
            change=change,
        )
        for name, (z, change) in SOURCES.items()
    ]  # fmt: skip
    jobs += [
        HfTrain(z, root / name, root / f"{name}.json", LAST, arguments=given)
        for z in (2, 3)
        for name, given in ((f"rates-z{z}", {}), (f"settings-rates-z{z}", SETTINGS))
    ]
    require_success(run_jobs(2, jobs, root / "ranks", run))
    place = Place(root)
    for scenario in SCENARIOS:
        _graft(scenario, place)
    require_success(run_jobs(2, [_resume(one, place) for one in SCENARIOS], root / "ranks", run))
    return place


def _job(scenario: Scenario, place: Place, **given: Any) -> HfTrain:  # noqa: ANN401
    out, seen = place.root / scenario.name, place.root / f"{scenario.name}.json"
    job = HfTrain(scenario.stage, out, seen, LAST, arguments=scenario.arguments, **given)
    return replace(job, change=scenario.change)


def _resume(scenario: Scenario, place: Place) -> HfTrain:
    resume = True if scenario.finds_last else place.out(scenario)
    return _job(
        scenario, place, resume_from=resume, loaded_truth=place.root / f"{scenario.name}.pt"
    )


def _graft(scenario: Scenario, place: Place) -> None:
    """Save START, run the command that this prints, and once more with the rules printed then."""
    resume = None if scenario.finds_last else place.source(scenario)
    job = _job(scenario, place, resume_from=resume)
    told = save_start(job, place.start(scenario), place.root / f"{scenario.name}-ranks")
    refused = _run(told, place.source(scenario), place.out(scenario))
    if scenario.rules:
        assert refused.code == 2, refused.err
        assert not place.out(scenario).exists()
        place.told(scenario).write_text(_lines(refused))
        given = ("--rules", place.told(scenario), "--verify")
        refused = _run(told, place.source(scenario), place.out(scenario), *given)
    assert refused.code == 0, refused.err


def _run(told: str, source: Path, out: Path, *options: object) -> Finished:
    """Run the command that `--save-start` has printed, with its blanks filled in."""
    (line,) = (line for line in told.splitlines() if line.startswith("next: streamshard "))
    blanks = {"SRC": source, "OUT": out}
    command = [blanks.get(word, word) for word in shlex.split(line)[2:]]
    return in_process(*command, *options)


def _lines(refused: Finished) -> str:
    _, _, rules = refused.err.partition("put them into a file of rules:\n")
    return rules


def _scenarios(*names: str) -> pytest.MarkDecorator:
    chosen = [one for one in SCENARIOS if not names or one.name.startswith(names)]
    return pytest.mark.parametrize("scenario", chosen, ids=lambda one: one.name)


@_scenarios("tokens", "unfrozen", "adapter")
def test_the_refusal_prints_the_rules_that_are_meant(scenario: Scenario, place: Place) -> None:
    printed = place.told(scenario).read_text().splitlines()
    assert {*scenario.rules} <= {*printed}
    words = {line.partition(" ")[0] for line in printed if line}
    assert words == {rule.partition(" ")[0] for rule in scenario.rules}


def test_an_adapter_of_another_rank_is_refused_with_a_way_out(place: Place) -> None:
    scenario = Scenario("rank", "of-adapter-z3", partial(with_adapter, rank=4))
    told = save_start(_job(scenario, place), place.start(scenario), place.root / "rank-ranks")
    refused = _run(told, place.source(scenario), place.out(scenario))
    assert refused.code == 2
    *rules, way_out = filter(None, _lines(refused).splitlines())
    new = "new base_model.model.transformer.h.*.attn.c_attn.lora_{}.default.weight"
    assert rules == [new.format("A"), new.format("B")]
    assert "# An adapter of another rank" in way_out
    assert "merge the old one into the model" in way_out
    place.told(scenario).write_text(_lines(refused))
    done = _run(told, place.source(scenario), place.out(scenario), "--rules", place.told(scenario))
    assert done.code == 0, done.err


@_scenarios()
def test_the_engine_holds_what_was_trained(scenario: Scenario, place: Place) -> None:
    trained, resumed = place.trained(scenario), place.resumed(scenario)
    with streamshard.open(place.start(scenario)) as start:
        for name, master in resumed.states["fp32"].items():
            begun = start[name].fp32.torch()
            if name in trained.states["fp32"]:
                kept = trained.states["fp32"][name]
                assert torch.equal(master, torch.cat([kept, begun[len(kept) :]])), name
            elif name in trained.frozen:
                assert torch.equal(master, trained.frozen[name].float()), name
            else:
                assert "lora_" in name
                assert torch.equal(master, begun), name
    for key in resumed.states.keys() - {"fp32"}:
        for name, value in resumed.states[key].items():
            kept = trained.states[key].get(name, value[:0])
            assert torch.equal(value, torch.cat([kept, torch.zeros_like(value[len(kept) :])]))


@_scenarios("adapter")
def test_what_is_frozen_now_is_what_was_trained(scenario: Scenario, place: Place) -> None:
    trained, resumed = place.trained(scenario), place.resumed(scenario)
    names = {
        name: name.removeprefix("base_model.model.").replace(".base_layer", "")
        for name in resumed.frozen
    }
    assert {*names.values()} == trained.states["fp32"].keys()
    for name, value in resumed.frozen.items():
        assert torch.equal(value, trained.states["fp32"][names[name]].to(value.dtype)), name


@_scenarios("settings-of-adapter")
def test_what_was_frozen_and_not_saved_is_that_of_start(scenario: Scenario, place: Place) -> None:
    told = streamshard.inspect(place.out(scenario)).notes
    assert any("unsaved 28 (" in note for note in told), told
    resumed = place.resumed(scenario)
    with streamshard.open(place.start(scenario)) as start:
        for name, value in resumed.frozen.items():
            saved = start[name].tensors["module"].torch()
            assert torch.equal(value, saved.to(value.dtype)), name


@_scenarios()
def test_the_trainer_goes_on(scenario: Scenario, place: Place) -> None:
    of = "settings-rates" if scenario.arguments else "rates"
    (rates, *_) = place.seen(f"{of}-z{scenario.stage}")
    wanted = [group[0] for group in rates["rates"]][STEPS:]
    for seen in place.seen(scenario.name):
        assert (seen["first_step"], seen["engine_step"], seen["last_step"]) == (STEPS, STEPS, LAST)
        assert len(seen["losses"]) == LAST
        assert all(map(isfinite, seen["losses"]))
        assert [set(step) for step in seen["rates"]] == [{step[0]} for step in seen["rates"]]
        followed = [step[0] for step in seen["rates"]]
        if scenario.stage == 2 and (scenario.arguments or scenario.change is with_adapter):
            # DeepSpeed's own scheduler saves no base rate: it sets the rate after the first step.
            old = place.seen("rates-z2")[0]["rates"][STEPS][0]
            assert followed[0] == (old if scenario.arguments else 0)
            followed[0] = wanted[0]
        assert followed == pytest.approx(wanted, rel=RATE_ULPS * 2.0**-52, abs=0)


def accelerate_run(place: Path, name: str, steps: int, **given: Any) -> AccelerateRun:  # noqa: ANN401
    place.mkdir(exist_ok=True)
    seen, truth = place / f"{name}.json", place / f"{name}.pt"
    return AccelerateRun(3, place / name, seen, truth, steps, **given)


def test_accelerate_goes_on_with_another_learning_rate(tmp_path: Path) -> None:
    """Its jobs that load a state have a learning rate of their own, which is that of START."""
    work, source, out = tmp_path / "ranks", tmp_path / "source", tmp_path / "out"
    first = [accelerate_run(tmp_path, name, steps) for name, steps in (("source", 2), ("on", 4))]
    require_success(run_jobs(2, first, work, run))
    job = accelerate_run(tmp_path, "changed", 2, load_dir=source)
    told = save_start(job, tmp_path / "start", tmp_path / "start-ranks")
    done = _run(told, source, out, "--verify")
    assert done.code == 0, done.err
    assert (out / "scheduler.bin").is_file()
    loaded = tmp_path / "loaded.pt"
    resume = accelerate_run(tmp_path, "changed", 2, load_dir=out, loaded_truth=loaded)
    require_success(run_jobs(2, [resume], work, run))
    trained, resumed = Truth.load(tmp_path / "source.pt"), Truth.load(loaded)
    assert resumed.states.keys() == trained.states.keys() > {"fp32"}
    for state, values in resumed.states.items():
        for name, value in values.items():
            assert torch.equal(value, trained.states[state][name]), (state, name)
    on, *_ = json.loads((tmp_path / "on.json").read_text())
    for seen in json.loads((tmp_path / "changed.json").read_text()):
        assert seen["engine_step"] == trained.counters["global_steps"] == 2
        wanted = [rate * 1e-4 / 3e-3 for rate in on["rates"][-len(seen["rates"]) :]]
        assert seen["rates"] == pytest.approx(wanted, rel=RATE_ULPS * 2.0**-52, abs=0)
        assert all(map(isfinite, seen["losses"]))
