"""`repartition --fresh-states`: exact master weights, and an optimizer before its first step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import streamshard
from streamshard.errors import UnsupportedError
from tests.comparing import compare
from tests.fabricated import edit_optimizers, without_zero, wrapped, write
from tests.job import MUON, TAG, Job

FRESH: dict[str, Any] = {"world_size": 3, "fresh_states": True}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_all_but_the_states_is_what_it_was(tmp_path: Path, stage: int) -> None:
    run = write(Job(stage=2), tmp_path / "run")
    report = streamshard.repartition(run, tmp_path / "out", zero_stage=stage, verify=True, **FRESH)
    assert any("optimizer starts fresh" in note for note in report.notes)
    found = streamshard.verify(tmp_path / "out", against=run)
    names = {difference.name for difference in found.differences}
    steps = {f"optimizer/state.group {group}.step" for group in range(2)}
    states = ("state/exp_avg/", "state/exp_avg_sq/")
    assert {name for name in names if not name.startswith(states)} == steps
    assert found.problems == ()


def test_other_ranks_later_are_other_ranks_at_once(tmp_path: Path) -> None:
    run = write(Job(stage=3), tmp_path / "run")
    streamshard.repartition(run, tmp_path / "few", world_size=2, fresh_states=True)
    streamshard.repartition(tmp_path / "few", tmp_path / "later", world_size=3)
    streamshard.repartition(run, tmp_path / "once", **FRESH)
    compare(tmp_path / "later" / TAG, tmp_path / "once" / TAG)


def test_it_is_written_where_a_job_could_resume_from_the_source(tmp_path: Path) -> None:
    run = write(Job(stage=2), tmp_path / "run")
    ranks = Job(stage=2).world_size
    out = tmp_path / "out"
    made = streamshard.repartition(run, out, world_size=ranks, fresh_states=True, if_needed=True)
    assert Path(made.target) == out
    assert (out / "latest").exists()


def _setting(key: str) -> Callable[[dict[str, Any]], object]:
    def add(state: dict[str, Any]) -> None:
        for group in wrapped(state)["param_groups"]:
            group[key] = 1.0

    return add


def _renamed(old: str, new: str) -> Callable[[dict[str, Any]], object]:
    def rename(state: dict[str, Any]) -> None:
        for values in wrapped(state)["state"].values():
            values[new] = values.pop(old)

    return rename


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_renamed("exp_avg_sq", "sum"), "its optimizer keeps sum, and no file says"),
        (_setting("weight_sum"), "its optimizer keeps weight_sum"),
        (_setting("d"), "its optimizer keeps d, and no file says how that begins"),
    ],
)
def test_what_begins_with_other_values_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    run = write(Job(stage=2), tmp_path / "run")
    edit_optimizers(run, change)
    with pytest.raises(UnsupportedError, match=says):
        streamshard.repartition(run, tmp_path / "out", **FRESH)
    assert not (tmp_path / "out").exists()


def test_muon_is_refused(tmp_path: Path) -> None:
    run = write(MUON, tmp_path / "run")
    with pytest.raises(UnsupportedError, match="trained by Muon"):
        streamshard.repartition(run, tmp_path / "out", **FRESH)


def test_without_zero_it_is_refused(tmp_path: Path) -> None:
    run = without_zero(write(Job(stage=2), tmp_path / "run"))
    with pytest.raises(UnsupportedError, match="stage 0"):
        streamshard.repartition(run, tmp_path / "out", **FRESH)
