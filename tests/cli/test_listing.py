"""`inspect` of directories with several checkpoints, and of one that is not whole."""

import json
import math
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import streamshard
from tests.cli.conftest import as_nobody, in_process, needs_root, passed
from tests.compact.runs import make_run
from tests.fabricated import edit, write, write_dumps
from tests.job import Job
from tests.measured import plan_measured
from tests.verify.test_health import poison

JOB = Job(stage=2, world_size=3)
ROW = re.compile(
    r"(\S+) +(\d+|-) +(\d+|-) +([0-9.]+ \S+) +(?:\d\d:\d\d|\w{3} \d\d), "
    r"\d+ (?:min|h|d) ago +((?:yes|NO|-)(?:, newest)?(?:, latest)?)"
)


def save_step(run: Path, step: int, job: Job = JOB, tag: str = "") -> Path:
    """Save a step into a run directory; returns the tag directory."""
    tag = tag or f"global_step{step}"
    return write(replace(job, step=step), run, tag=tag) / tag


def lose_rank(tag: Path, rank: int) -> None:
    """Remove a rank's optimizer file."""
    (path,) = tag.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    path.unlink()


@pytest.fixture
def trainer_output(tmp_path: Path) -> Path:
    """What HF Trainer leaves when it is killed while it saves for the fourth time."""
    out = tmp_path / "out"
    for step in (500, 1000, 1500, 2000):
        tag = save_step(out / f"checkpoint-{step}", step)
        (tag.parent / "model.safetensors").write_bytes(bytes(10_000))
    lose_rank(out / "checkpoint-1500" / "global_step1500", 1)
    (out / "checkpoint-2000" / "latest").unlink()
    (out / "runs").mkdir()
    (out / "model.safetensors").write_bytes(bytes(10))
    return out


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with three tags."""
    for step in (90, 100, 110):
        save_step(tmp_path / "run", step)
    return tmp_path / "run"


def rows(shown: str) -> list[tuple[str, ...]]:
    """Return what is shown of each checkpoint, without when it was saved."""
    table = shown[shown.index("checkpoint  ") :]
    return [match.groups() for match in map(ROW.fullmatch, table.splitlines()) if match]


def test_the_output_of_a_trainer_lists_its_checkpoints(trainer_output: Path) -> None:
    done = passed("inspect", trainer_output)
    size = r"\d\d\.\d KiB"
    expected = [
        ("checkpoint-500", "500", "3", size, "yes"),
        ("checkpoint-1000", "1000", "3", size, "yes"),
        ("checkpoint-1500", "1500", "3", size, "NO"),
        ("checkpoint-2000/global_step2000", "2000", "3", size, "NO, newest"),
    ]
    for row, wanted in zip(rows(done.out), expected, strict=True):
        assert all(map(re.fullmatch, wanted, row)), row
    assert "4 checkpoints, 2 whole" in done.out
    assert re.search(r"PROBLEM  .*/checkpoint-1500/.*: rank 1 of at least 3 is missing", done.out)
    assert f"PROBLEM  {trainer_output}/checkpoint-2000/latest: not there" in done.out
    (newest,) = re.findall(r"The newest whole checkpoint: (\S+)\. ", done.out)
    assert streamshard.inspect(newest).tag == "global_step1000"


def test_what_stores_record_of_their_health_is_shown(run: Path) -> None:
    archive = run.with_name("archive")
    poison(run / "global_step100", "exp_avg_sq", math.nan)
    archive.mkdir()
    for step in (90, 100):
        store = archive / f"global_step{step}.zarr"
        plan_measured(run / f"global_step{step}", store).run()
    streamshard.convert(run / "global_step110", archive / "global_step110.zarr")
    shown = passed("inspect", archive).out
    table = shown[shown.index("checkpoint  ") :].splitlines()[:5]
    assert [line.split()[-1] for line in table if "--" not in line] == ["healthy", "yes", "NO", "-"]
    listed = json.loads(passed("inspect", archive, "--json").out)["checkpoints"]
    assert [one["is_healthy"] for one in listed] == [True, False, None]


def test_programs_get_the_same_list(trainer_output: Path) -> None:
    done = passed("inspect", trainer_output, "--json")
    found = json.loads(done.out)
    assert list(found) == ["path", "kind", "checkpoints", "problems", "pictures"]
    assert (found["path"], found["kind"]) == (str(trainer_output), "directory")
    assert found["problems"] == []
    steps = {one["step"]: one["is_whole"] for one in found["checkpoints"]}
    assert steps == {500: True, 1000: True, 1500: False, 2000: False}
    assert [one["is_newest"] for one in found["checkpoints"]] == [False, False, False, True]
    for one in found["checkpoints"]:
        assert (one["zero_stage"], one["world_size"], one["is_latest"]) == (2, 3, False)
        place = trainer_output / one["path"]
        assert one["nbytes"] == sum(p.stat().st_size for p in place.rglob("*") if p.is_file())
        # Each path is a source by itself, unless it is broken.
        if one["is_whole"]:
            assert streamshard.inspect(place).global_steps == one["step"]


def test_a_run_directory_is_inspected_and_its_tags_listed(run: Path) -> None:
    shutil.copytree(run / "global_step90", run / "best")
    (run / "latest").write_text("global_step100")
    done = passed("inspect", run)
    assert "tag         global_step100\n" in done.out
    assert [(name, step, whole) for name, step, _, _, whole in rows(done.out[100:])] == [
        ("best", "90", "yes"),
        ("global_step90", "90", "yes"),
        ("global_step100", "100", "yes, latest"),
        ("global_step110", "110", "yes, newest"),
    ]
    found = streamshard.inspect(run).checkpoints
    assert [one.path for one in found if one.is_latest] == ["global_step100"]
    assert [one.path for one in found if one.is_newest] == ["global_step110"]
    assert streamshard.inspect(run, tag="best").checkpoints == ()
    assert streamshard.inspect(run / "best").checkpoints == ()


def test_a_broken_newest_tag_is_told_once(run: Path) -> None:
    lose_rank(run / "global_step110", 0)
    (run / "latest").write_text("global_step100")
    done = in_process("inspect", run)
    assert done.out.count("rank 0 of at least 3 is missing") == 1
    assert f"The newest whole checkpoint: {run}/global_step100." in done.out


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_there_of_an_incomplete_checkpoint(stage: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (7, 8):
        save_step(run, step, replace(JOB, stage=stage, world_size=4))
    tag = run / "global_step8"
    lose_rank(tag, 1)
    lose_rank(tag, 3)
    (torn,) = tag.glob("*zero_pp_rank_2_mp_rank_00_optim_states.pt")
    torn.write_bytes(torn.read_bytes()[:1000])
    done = in_process("inspect", run)
    assert done.code == 3
    assert f"saved by    ZeRO stage {stage}, world size 4\n" in done.out
    assert "steps       8\n" in done.out
    assert re.search(r"global_step8/.*rank_\*_mp_rank_00_optim_states.pt +2 +1000 B to ", done.out)
    gone = [rf"rank_{rank}_\S*: rank {rank} is missing" for rank in (1, 3)]
    for problem in (*gone, rf"{torn}: not a whole torch file"):
        assert len(re.findall(rf"PROBLEM  .*{problem}", done.out)) == 1
    assert [row[4] for row in rows(done.out[100:])] == ["yes", "NO, newest, latest"]
    assert f"The newest whole checkpoint: {run}/global_step7." in done.out
    assert done.err.startswith("streamshard: ")
    found = json.loads(in_process("inspect", run, "--json").out)
    assert (found["is_whole"], found["tag"], found["zero_stage"]) == (False, "global_step8", stage)
    assert (found["world_size"], found["global_steps"]) == (4, 8)
    held = {file["path"] for file in found["file_list"]}
    assert held == {f"global_step8/{p.name}" for p in tag.iterdir()} | {"zero_to_fp32.py"}
    assert len(found["problems"]) >= 3
    assert in_process("inspect", run, "-q").out == ""
    assert in_process("inspect", run, "--rank", 0).out == ""


@pytest.mark.parametrize("content", [None, "", "global_step7"])
def test_tags_without_a_latest_that_names_one_are_listed_with_what_to_give(
    content: str | None, run: Path
) -> None:
    (run / "latest").unlink()
    if content is not None:
        (run / "latest").write_text(content)
    done = in_process("inspect", run)
    assert done.code == 3
    assert [row[0] for row in rows(done.out)] == [f"global_step{n}" for n in (90, 100, 110)]
    assert f"{run}/latest: " in done.err or "no 'latest' file" in done.err
    assert f"such as {run / 'global_step110'}: global_step110, global_step100" in done.err
    assert "streamshard inspect" not in done.err
    found = json.loads(in_process("inspect", run, "--json").out)
    assert [f"streamshard: {problem}\n" for problem in found["problems"]] == [done.err]
    assert in_process("inspect", run / "global_step110").code == 0


def test_what_was_saved_without_zero_is_not_called_broken(run: Path) -> None:
    for path in (run / "global_step90").glob("*_optim_states.pt"):
        path.unlink()
    edit(run / "global_step90" / "mp_rank_00_model_states.pt", without_zero)
    (row, *_) = rows(in_process("inspect", run).out[100:])
    assert (row[0], row[4]) == ("global_step90", "yes")
    assert all(one.is_whole for one in streamshard.inspect(run).checkpoints)


def without_zero(model: dict[str, Any]) -> None:
    """Make of a model file what DeepSpeed saves without ZeRO, where it holds the optimizer."""
    model["ds_config"]["zero_optimization"]["stage"] = 0
    model |= {"param_shapes": None, "shared_params": None, "optimizer": {"state": {}}}


@needs_root
@pytest.mark.parametrize(("mode", "latest"), [(0o000, True), (0o711, False), (0o744, True)])
def test_a_tag_that_may_not_be_read_is_a_row_and_hides_no_other(
    open_to_all: Path, mode: int, *, latest: bool
) -> None:
    open_to_all.chmod(0o777)
    run, archive = make_run(open_to_all / "run", steps=(80, 90, 100, 110)), open_to_all / "archive"
    (run / "global_step90").chmod(mode)
    if not latest:
        (run / "latest").unlink()
    done = as_nobody("inspect", run)
    assert (done.code, done.err) == (0 if latest else 3, done.err)
    assert re.search(r"^global_step90 .* NO", done.out, re.MULTILINE)
    assert re.search(r"^global_step100 .* yes", done.out, re.MULTILINE)
    advice = f"chmod -R +rX {run}/global_step90"
    assert done.out.count(f"{run}/global_step90: cannot be read (Permission denied); its") == 1
    assert f"{advice}\n" in done.out
    if latest:
        done = as_nobody("compact", run, archive)
        assert (done.code, advice in done.err, "--acknowledge" in done.err) == (3, True, False)
    subprocess.run(shlex.split(advice), check=True)
    assert "NO" not in as_nobody("inspect", run).out


def test_what_is_there_of_dumps(tmp_path: Path) -> None:
    template = write_dumps(write(JOB, tmp_path / "run"), tmp_path / "dumps")
    (tmp_path / "dumps/optimizer.01.pt").unlink()
    done = in_process("inspect", template)
    assert done.code == 3
    assert "saved by    ZeRO stage 2, world size 3\n" in done.out
    assert re.search(r"^optimizer\.\*\.pt +2 ", done.out, re.MULTILINE)
    assert re.search(r"PROBLEM  .*/optimizer\.01\.pt: rank 1 is missing", done.out)
