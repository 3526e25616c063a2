"""Experts of so many elements that an engine divides their param groups, spread again."""

from dataclasses import replace
from pathlib import Path

import pytest

import streamshard
from tests.oracle.compare import differences
from tests.oracle.files import file_differences
from tests.oracle.jobs import Resume, Train
from tests.oracle.models import Case
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.test_topologies import of_any_degree
from tests.oracle.topology.experts import ExpertParallel
from tests.oracle.truth import Truth

MOST = 400
"""Between the elements of a rank's experts of both degrees."""
WIDE = Case("wide", 2, "fp32", topology=ExpertParallel((1, 1), max_group=MOST))
NARROW = replace(WIDE, name="narrow", topology=ExpertParallel((2, 2), max_group=MOST))


def test_an_engine_with_fewer_and_with_more_param_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide, narrow = tmp_path / "wide", tmp_path / "narrow"
    before = [
        Train(case, run, run.with_suffix(".pt")) for case, run in ((WIDE, wide), (NARROW, narrow))
    ]
    require_success(run_jobs(2, before, tmp_path / "ranks"))
    monkeypatch.setattr("streamshard.formats.deepspeed.expert_order.GROUP_NUMEL", MOST)
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
