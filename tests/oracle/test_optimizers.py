"""Optimizers are understood by what their state looks like, and what is not is refused by name."""

import traceback
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import pytest
import torch

import streamshard
from tests.oracle.cases import Resharding
from tests.oracle.compare import close, differences
from tests.oracle.files import file_differences, padding_found
from tests.oracle.jobs import Job, Resume, Train, after_path
from tests.oracle.models import Case
from tests.oracle.optimizers import TRIALS, Trial
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.truth import Truth

FURTHER_STEPS = 3
TOLERANCE = {"fp32": 1e-4, "fp16": 0.02, "bf16": 0.5}


@dataclass(frozen=True)
class Places:
    """Where each thing lies, and what went wrong on the way."""

    root: Path
    errors: dict[str, str] = field(default_factory=dict)

    def source(self, case: Case) -> Path:
        return self.root / case.name

    def out(self, one: Resharding) -> Path:
        return self.root / one.name

    def resaved(self, one: Resharding) -> Path:
        return self.root / f"{one.name}-resaved"

    def loaded(self, one: Resharding) -> Path:
        return self.root / f"{one.name}-loaded"

    def truth_path(self, directory: Path) -> Path:
        return directory.with_name(f"{directory.name}.truth.pt")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Every trial trained, taken to its target world size, resumed and saved again."""
    made = Places(tmp_path_factory.mktemp("optimizers"))
    able = sorted(
        (trial for trial in TRIALS if not trial.missing_extension),
        key=lambda trial: trial.resharding.source,
    )
    for ranks, group in groupby(able, lambda trial: trial.resharding.source):
        trials = list(group)
        jobs = [_train(made, trial) for trial in trials]
        jobs += [Train(t.like, made.source(t.like), None, t.steps) for t in trials if t.like]
        require_success(run_jobs(ranks, jobs, made.root / "ranks"))
    for trial in able:
        one = trial.resharding
        try:
            streamshard.repartition(
                made.source(one.case),
                made.out(one),
                world_size=one.target,
                zero_stage=one.resuming.zero_stage,
                like=made.source(trial.like) if trial.like else None,
            )
        except Exception:
            made.errors[one.name] = traceback.format_exc()
    done = [t for t in able if t.resharding.name not in made.errors]
    for ranks, group in groupby(done, lambda trial: trial.resharding.target):
        _resume(made, ranks, list(group))
    return made


def _train(made: Places, trial: Trial) -> Job:
    source = made.source(trial.case)
    return Train(
        trial.case, source, made.truth_path(source), trial.steps, further_steps=FURTHER_STEPS
    )


def _resume(made: Places, ranks: int, trials: list[Trial]) -> None:
    ones = [trial.resharding for trial in trials]
    jobs = [
        Resume(
            one.resuming, made.out(one), made.truth_path(made.out(one)), made.resaved(one),
            FURTHER_STEPS, seed=trial.resume_seed,
        )
        for trial, one in zip(trials, ones, strict=True)
    ]  # fmt: skip
    without = [trial for trial in trials if trial.like is None]
    jobs += [
        Resume(
            trial.resharding.resuming, made.source(trial.case),
            made.truth_path(made.loaded(trial.resharding)), seed=trial.resume_seed, reshards=True,
        )
        for trial in without
    ]  # fmt: skip
    owners = [*ones, *(trial.resharding for trial in without)]
    for one, finished in zip(owners, run_jobs(ranks, jobs, made.root / "ranks"), strict=True):
        if finished.error is not None:
            made.errors.setdefault(one.name, finished.error)


@pytest.fixture(params=TRIALS, ids=lambda trial: trial.resharding.name)
def trial(request: pytest.FixtureRequest, trained: Places) -> Trial:
    """One trial that was converted and resumed without an error."""
    found: Trial = request.param
    if found.missing_extension:
        pytest.skip(found.missing_extension)
    if found.resharding.name in trained.errors:
        pytest.fail(trained.errors[found.resharding.name], pytrace=False)
    return found


def test_the_trial_is_what_it_says(trial: Trial, trained: Places) -> None:
    saved = Truth.load(trained.truth_path(trained.source(trial.case)))
    assert saved.states.keys() == {"fp32", *trial.states}
    assert {key for group in saved.groups for key in group["scalars"]} == trial.scalars
    assert saved.counters["global_steps"] == trial.steps
    assert saved.counters["skipped_steps"] == (3 if "overflowed" in trial.case.name else 0)


def test_the_resumed_engine_holds_what_was_saved(trial: Trial, trained: Places) -> None:
    saved = Truth.load(trained.truth_path(trained.source(trial.case)))
    resumed = Truth.load(trained.truth_path(trained.out(trial.resharding)))
    assert differences(_as_loading_leaves(saved, trial), resumed) == []


def test_an_engine_that_loads_directly_holds_the_same(trial: Trial, trained: Places) -> None:
    one = trial.resharding
    if trial.like is None:  # files without hyper-parameters are not loaded directly
        of_out = Truth.load(trained.truth_path(trained.out(one)))
        assert differences(of_out, Truth.load(trained.truth_path(trained.loaded(one)))) == []


def test_deepspeed_would_have_written_the_same_files(trial: Trial, trained: Places) -> None:
    one = trial.resharding
    tag = (trained.out(one) / "latest").read_text()
    found = file_differences(trained.out(one) / tag, trained.resaved(one) / tag)
    known = tuple(f"['{switch}']: missing on the left" for switch in trial.added)
    # The config that comes along is the one of the job that saved.
    known += ("['elastic_checkpoint']: missing on the right",) if trial.like else ()
    assert [line for line in found if not line.endswith(known)] == []


def test_padding_below_stage_3_is_one_value(trained: Places) -> None:
    flat = [t for t in TRIALS if t.case.zero_stage < 3 and not t.missing_extension]
    found = [
        padding_found(trained.source(t.case), like=trained.source(t.like) if t.like else None)
        for t in flat
    ]
    assert any(found)


def test_training_goes_on_as_if_uninterrupted(trial: Trial, trained: Places) -> None:
    start = trained.truth_path(trained.source(trial.case))
    expected = _as_loading_leaves(Truth.load(after_path(start)), trial)
    found = Truth.load(after_path(trained.truth_path(trained.out(trial.resharding))))
    tolerance = TOLERANCE[trial.case.dtype]
    assert close(expected, found, start=_begun(start, expected), tolerance=tolerance) == []


def _as_loading_leaves(truth: Truth, trial: Trial) -> Truth:
    """`truth` with what DeepSpeed's loading does to it, whoever wrote the files."""
    for group in truth.groups:
        group["hyper_parameters"].update(dict.fromkeys(trial.added, False))
    return truth


def _begun(path: Path, later: Truth) -> Truth:
    """The truth at `path`, with the states that the first step makes out of nothing."""
    truth = Truth.load(path)
    made = {
        state: {name: torch.zeros_like(value) for name, value in by_name.items()}
        for state, by_name in later.states.items()
    }
    return replace(truth, states={**made, **truth.states})
