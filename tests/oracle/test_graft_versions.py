"""Grafts between jobs of older versions of DeepSpeed, and from one of them to the newest."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import streamshard
from tests.oracle.compare import differences
from tests.oracle.jobs import Resume, Train
from tests.oracle.ranks import older_deepspeed, require_success, run_jobs
from tests.oracle.test_graft import SCENARIOS, STEPS, _expected, _job, case
from tests.oracle.test_graft_parts import WAYS, wanted
from tests.oracle.truth import Truth

CHANGES = [one for one in SCENARIOS if one.name in ("tokens", "deeper", "fresh")]


@pytest.mark.parametrize(
    ("version", "onto", "stage"),
    [("0.14.5", "0.14.5", 2), ("0.16.9", "0.16.9", 3), ("0.14.5", None, 3)],
)
def test_an_engine_of_each_version_resumes(
    version: str, onto: str | None, stage: int, tmp_path: Path
) -> None:
    old = older_deepspeed(version)
    new = None if onto is None else older_deepspeed(onto)
    work, source = tmp_path / "work", tmp_path / "source"
    train = Train(case(stage), source, tmp_path / "old.pt", steps=STEPS, seed=11)
    require_success(run_jobs(2, [train], work, deepspeed_at=old))
    jobs = {one.name: _job(case(stage), one) for one in CHANGES}
    starts = [
        Train(job, tmp_path / name / "start", tmp_path / name / "start.pt", steps=0, seed=23)
        for name, job in jobs.items()
    ]
    require_success(run_jobs(3, starts, work, deepspeed_at=new))
    for one in CHANGES:
        place = tmp_path / one.name
        (place / "rules").write_text(one.rules)
        streamshard.graft(
            source, place / "start", place / "out", rules=place / "rules", fresh_states=one.fresh
        )
    resumes = [
        Resume(job, tmp_path / name / "out", tmp_path / name / "resumed.pt", further_steps=1)
        for name, job in jobs.items()
    ]
    require_success(run_jobs(3, resumes, work, deepspeed_at=new))
    trained = Truth.load(tmp_path / "old.pt")
    for one in CHANGES:
        start, resumed = (Truth.load(tmp_path / one.name / f"{n}.pt") for n in ("start", "resumed"))
        wanted = {"fp32"} if one.fresh else trained.states.keys()
        assert resumed.states.keys() == wanted
        assert resumed.counters["global_steps"] == trained.counters["global_steps"]
        for state, tensors in resumed.states.items():
            for name, value in tensors.items():
                expected = _expected(one, trained, start, state, name)
                assert torch.equal(value, expected), (one.name, state, name)


@pytest.mark.parametrize("version", ["0.14.5", "0.16.9"])
def test_an_engine_of_each_version_resumes_a_pipeline(version: str, tmp_path: Path) -> None:
    way, at, work = WAYS["pipeline"], older_deepspeed(version), tmp_path / "work"
    paths = {what: tmp_path / f"{what}.pt" for what in ("old", "start", "resumed")}
    train = Train(way.old, tmp_path / "source", paths["old"], seed=11)
    require_success(run_jobs(way.ranks, [train], work, deepspeed_at=at))
    start = Train(way.new, tmp_path / "start", paths["start"], steps=0, seed=23)
    require_success(run_jobs(way.new_ranks, [start], work, deepspeed_at=at))
    (tmp_path / "rules").write_text(way.rules)
    sides = tmp_path / "source", tmp_path / "start", tmp_path / "out"
    streamshard.graft(*sides, rules=tmp_path / "rules", verify=True)
    resume = Resume(way.new, tmp_path / "out", paths["resumed"], further_steps=1)
    require_success(run_jobs(way.new_ranks, [resume], work, deepspeed_at=at))
    old, begun, resumed = (Truth.load(path) for path in paths.values())
    both = (replace(one, client_state={}) for one in (wanted(way, old, begun), resumed))
    assert differences(*both) == []
