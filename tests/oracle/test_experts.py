"""Experts in divided param groups, and frozen ones: engines load what is made of them."""

from dataclasses import replace
from pathlib import Path

import pytest

import streamshard
from streamshard.errors import UnsupportedError
from tests.oracle.compare import differences
from tests.oracle.files import file_differences
from tests.oracle.jobs import Resume, Train
from tests.oracle.models import Case
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.topology.cases import of_any_degree
from tests.oracle.topology.experts import ExpertParallel
from tests.oracle.truth import Truth

MOST = 400
"""Between the elements of a rank's experts of both degrees."""
WIDE = Case("wide", 2, "fp32", topology=ExpertParallel((1, 1), max_group=MOST))
NARROW = replace(WIDE, name="narrow", topology=ExpertParallel((2, 2), max_group=MOST))


def test_an_engine_with_fewer_and_with_more_param_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts of so many elements that an engine divides their groups."""
    wide, narrow = tmp_path / "wide", tmp_path / "narrow"
    before = [
        Train(case, run, run.with_suffix(".pt")) for case, run in ((WIDE, wide), (NARROW, narrow))
    ]
    require_success(run_jobs(2, before, tmp_path / "ranks"))
    monkeypatch.setattr(
        "streamshard.formats.deepspeed.model_parallel.expert_groups.GROUP_NUMEL", MOST
    )
    to_narrow, to_wide = tmp_path / "to-narrow", tmp_path / "to-wide"
    streamshard.repartition(wide, to_narrow, world_size=2, expert_parallel=2)
    # What an undivided group does not tell, a save of the target's job does.
    streamshard.repartition(narrow, to_wide, world_size=2, expert_parallel=1, like=wide)
    after = [
        Resume(case, run, run.with_suffix(".pt"), run.with_suffix(".again"))
        for case, run in ((NARROW, to_narrow), (WIDE, to_wide))
    ]
    require_success(run_jobs(2, after, tmp_path / "ranks"))
    for source, run in ((wide, to_narrow), (narrow, to_wide)):
        saved, resumed = (Truth.load(path.with_suffix(".pt")) for path in (source, run))
        assert len(saved.groups) != len(resumed.groups)
        of_both = (replace(of_any_degree(one), scheduler=None) for one in (saved, resumed))
        assert differences(*of_both) == []
        tag = (run / "latest").read_text()
        assert file_differences(run / tag, run.with_suffix(".again") / tag) == []


def test_frozen_weights_of_experts_go_to_stage_1(tmp_path: Path) -> None:
    """At stage 2 DeepSpeed loads those of the first rank into the experts of every rank."""
    frozen = ExpertParallel((2, 2), freezes=True)
    saves, loads = (Case(f"z{stage}", stage, "fp32", topology=frozen) for stage in (2, 1))
    run, out, own = tmp_path / "run", tmp_path / "out", tmp_path / "own.pt"
    jobs = [Train(saves, run, run.with_suffix(".pt")), Resume(saves, run, own)]
    require_success(run_jobs(2, jobs, tmp_path / "ranks"))
    saved = Truth.load(run.with_suffix(".pt"))
    assert differences(saved, Truth.load(own)) != []
    with pytest.raises(UnsupportedError, match=r"down\.bias' is a frozen weight of an expert"):
        streamshard.repartition(run, out, world_size=4)
    streamshard.repartition(run, out, world_size=4, zero_stage=1)
    require_success(run_jobs(4, [Resume(loads, out, out.with_suffix(".pt"))], tmp_path / "ranks"))
    assert differences(saved, Truth.load(out.with_suffix(".pt"))) == []
