"""Dry runs, saved plans and `apply` on the command line."""

import json
import signal
from pathlib import Path

from tests.cli.conftest import streamshard, tree
from tests.cli.test_going_on import cut_off


def test_a_dry_run_is_a_plan_and_json_only_gains_a_key(run: Path, tmp_path: Path) -> None:
    command = ("repartition", run, tmp_path / "out", "--world-size", 3)
    dry = streamshard(*command, "-n")
    assert (dry.code, dry.err) == (0, "")
    for text in ("would write", "which is an estimate", "For the job that resumes:", "left out"):
        assert text in dry.out
    assert "zero_pp_rank_{0..2}_mp_rank_00" in dry.out
    assert "zero_pp_rank_2_mp_rank_00" in streamshard(*command, "-n", "-v").out
    planned = json.loads(streamshard(*command, "-n", "--json").out)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    done = json.loads(streamshard(*command, "--json").out)
    assert planned.keys() - done.keys() == {"estimate"}
    assert planned["estimate"]["written_bytes"] == done["bytes_written"]
    assert planned["estimate"]["time"]["problem"] is None


def test_a_plan_is_saved_cut_off_and_gone_on_with(run: Path, tmp_path: Path) -> None:
    plan, command = tmp_path / "plan.json", ("convert", run, tmp_path / "out", "--chunk-size", 64)
    saved = streamshard(*command, "-n", "--plan-out", plan)
    assert saved.out.endswith(f"\nTo do this: streamshard apply {plan}\n")
    shown = streamshard("apply", plan, "-n")
    assert shown.code == 0
    assert shown.out.startswith(f"would write  {tmp_path}/out")
    assert cut_off("note", 3, ("apply", plan)).code == -signal.SIGKILL
    done = streamshard(*command, "--json")
    assert json.loads(done.out)["kept_bytes"] > 0
    wanted = tree(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "wanted")
    assert cut_off("note", 3, command).code == -signal.SIGKILL
    done = streamshard("apply", plan, "--json", "--workers", 1)
    assert json.loads(done.out)["kept_bytes"] > 0
    assert tree(tmp_path / "out") == wanted


def test_exit_codes_of_what_is_refused(run: Path, tmp_path: Path) -> None:
    plan, command = tmp_path / "plan.json", ("export", run, tmp_path / "out")
    done = streamshard(*command, "--plan-out", plan)
    assert (done.code, "--dry-run" in done.err) == (2, True)
    assert not plan.exists()
    assert not (tmp_path / "out").exists()
    assert streamshard(*command, "-q", "-n", "--plan-out", plan).out == ""
    (run / "zero_to_fp32.py").write_text("another")
    done = streamshard("apply", plan)
    assert (done.code, f"{run}/zero_to_fp32.py has changed since" in done.err) == (3, True)
    plan.write_text("{}")
    assert streamshard("apply", plan).code == 2
