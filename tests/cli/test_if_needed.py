"""`--if-needed` and `-q`: what job scripts run before every start of a job."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamshard.io.lock import Lock
from tests.cli.conftest import (
    OUTPUTS,
    Saved,
    command,
    flip,
    in_process,
    model_file,
    passed,
    streamshard,
    tree,
)
from tests.fabricated import edit_optimizers, load, wrapped, write
from tests.faults.scenarios import times
from tests.job import TAG, Job

IF_NEEDED = ("--if-needed", "-q")


def test_a_job_script(stage_2: Path, tmp_path: Path) -> None:
    """As the README has it: whatever the count of ranks, there is a directory to resume from."""
    out = tmp_path / "job's out"
    script = (
        f'CKPT=$({sys.executable} -m streamshard repartition "$1" "$2" --world-size "$3" '
        '--if-needed -q) || exit\nprintf "%s" "$CKPT"'
    )
    before = tree(stage_2), times(stage_2)
    first = 0.0
    for world_size, wanted in ((4, stage_2), (3, out), (3, out), (4, stage_2)):
        command = ["bash", "-c", script, "job", str(stage_2), str(out), str(world_size)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stderr, done.stdout) == (0, "", str(wanted))
        first = first or (out.stat().st_mtime_ns if out.exists() else 0)
        assert not out.exists() or out.stat().st_mtime_ns == first
    assert (tree(stage_2), times(stage_2)) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [out.name, stage_2.name]


LENIENT = [output for output in OUTPUTS if output.split()[-1] in ("3", "zstd")]


@pytest.mark.parametrize("verifies", [True, False])
@pytest.mark.parametrize("output", LENIENT)
def test_what_is_there_already_is_proved_by_its_bytes_or_goes_by_names_and_sizes(
    run: Path, tmp_path: Path, output: str, *, verifies: bool
) -> None:
    out = tmp_path / "out"
    given = (*command(output, run, out), "--if-needed", *["--verify"] * verifies)
    for _ in range(2):
        done = in_process(*given, "-q")
        assert (done.code, done.out, done.err) == (0, f"{out}\n", "")
    whole, when = tree(out), times(out)
    report = json.loads(in_process(*given, "--json").out)
    assert (report["found"], report["path"], report["bytes_written"]) == ("target", str(out), 0)
    dry = in_process(*given, "-q", "--dry-run")
    assert (dry.code, dry.out) == (0, f"{out}\n")
    assert (tree(out), times(out)) == (whole, when)
    largest = max(whole, key=lambda name: len(whole[name]))
    data = whole[largest]
    changes: list[tuple[str, Callable[[], object]]] = [
        (f"{largest} holds other bytes", lambda: flip(out / largest)),
        (largest, lambda: (out / largest).write_bytes(data[:-1])),
        (largest, lambda: (out / largest).write_bytes(data + b"\0")),
        (f"{largest} is missing", (out / largest).unlink),
        ("stranger is not one of its files", lambda: (out / "stranger").write_text("?")),
    ]
    for told, change in changes[not verifies :]:
        change()
        damaged = tree(out)
        done = in_process(*given, "-q")
        assert (done.code, done.out, tree(out)) == (4, "", damaged)
        begins = f"{out}: is not what this command makes: " if verifies else ""
        assert f"{begins}{told}" in done.err
        if "stranger" not in told:
            done = in_process(*given, "-q", "--overwrite")
            assert (done.code, done.out) == (0, f"{out}\n"), done.err
            assert tree(out) == whole
    assert in_process(*given, "--dry-run").code == 4


def aged(path: Path) -> Path:
    """Give files a time of change long ago, as a copy that keeps times has it."""
    for file in (path, *path.rglob("*")):
        os.utime(file, ns=(10**9, 10**9))
    return path


VALUES = "other values"
OTHERS = {
    "another step": Job(stage=2, world_size=4, step=8),
    "another rate": Job(stage=2, world_size=4, rates="1"),
    "another state of the client": Job(stage=2, world_size=4, client_state={"epoch": 3}),
    VALUES: Job(stage=2, world_size=4),
}


def scale(state: dict[str, Any]) -> None:
    """Change all numbers, as another run of the same job has them."""
    for flat in state["single_partition_of_fp32_groups"]:
        flat.data *= 1.5
    for moments in wrapped(state)["state"].values():
        moments["exp_avg"] *= 1.5
        moments["exp_avg_sq"] *= 1.5


@pytest.mark.parametrize(
    ("what", "name"),
    [*((what, "out") for what in OTHERS), (VALUES, "x.zarr"), (VALUES, "x.zarr.zip")],
)
def test_a_target_of_another_save_with_the_same_names_and_sizes_is_refused(
    tmp_path: Path, what: str, name: str
) -> None:
    """Also if it is newer than the source that it is taken for."""
    one = write(Job(stage=2, world_size=4), tmp_path / "one")
    other = write(OTHERS[what], tmp_path / "other")
    if what == VALUES:
        edit_optimizers(other, scale)
    aged(other)
    verb = ("repartition", "--world-size", 3) if name == "out" else ("convert", "--codec", "zstd")
    out = tmp_path / name
    assert in_process(verb[0], one, out, *verb[1:]).code == 0
    assert in_process(verb[0], one, out, *verb[1:], "--if-needed").code == 0
    done = in_process(verb[0], other, out, *verb[1:], "--if-needed")
    assert done.code == 4
    assert f"{out}: is not what this command makes" in done.err


def test_a_target_that_is_older_than_the_source_is_refused(saved: Saved, tmp_path: Path) -> None:
    run = Path(shutil.copytree(saved(2), tmp_path / "run"))
    given = ("repartition", run, tmp_path / "out", "--world-size", 3, "--if-needed")
    assert in_process(*given).code == 0
    assert in_process(*given).code == 0
    model_file(run).touch()
    done = in_process(*given)
    assert done.code == 4
    assert f"{model_file(run)} has changed since; --verify compares bytes" in done.err
    assert in_process(*given, "--verify").code == 0


def test_of_the_source_all_that_shapes_files_has_to_fit(saved: Saved, tmp_path: Path) -> None:
    given = tmp_path / "ds.json"

    def found(stage: int, *options: object, **zero: object) -> str | None:
        model = load(model_file(saved(stage), 0 if stage == 3 else None))
        config = dict(model["ds_config"])
        merged = {**config["zero_optimization"], "stage": stage, **zero}
        given.write_text(json.dumps({**config, "zero_optimization": merged}))
        command = ("repartition", saved(stage), tmp_path / "out", "--ds-config", given)
        done = passed(*command, "--world-size", 4, *options, "--if-needed", "--json")
        report = json.loads(done.out)
        is_there = (tmp_path / "out").exists()
        assert is_there == (report["found"] is None)
        assert report["path"] == str(tmp_path / "out" if is_there else saved(stage))
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        answer: str | None = report["found"]
        return answer

    assert found(2) == "source"
    assert found(3) == "source"
    assert found(2, sub_group_size=1000) == "source"  # of stage 3 only
    assert found(3, sub_group_size=1234) is None
    assert found(2, round_robin_gradients=True) is None
    assert found(3, round_robin_gradients=True) == "source"  # of stages 1 and 2 only
    command = ("repartition", saved(2), tmp_path / "out", *IF_NEEDED)
    for options in (("--world-size", 4, "--zero-stage", 1), ("--world-size", 2)):
        done = in_process(*command, *options)
        assert (done.code, done.out) == (0, f"{tmp_path / 'out'}\n")
        shutil.rmtree(tmp_path / "out")


def test_the_source_fits_only_if_that_tag_is_what_a_job_takes(
    stage_2: Path, tmp_path: Path
) -> None:
    """A plain `load_checkpoint` takes what `latest` names, whatever was asked for here."""
    out = tmp_path / "out"
    by_tag = ("repartition", stage_2 / TAG, out, "--world-size", 4, *IF_NEEDED)
    assert in_process(*by_tag).out == f"{stage_2}\n"
    (stage_2 / TAG).rename(stage_2 / "global_step9")
    shutil.copytree(stage_2 / "global_step9", stage_2 / "global_step10")
    (stage_2 / "latest").write_text("global_step10")
    command = ("repartition", stage_2, out, "--world-size", 4, *IF_NEEDED)
    assert in_process(*command).out == f"{stage_2}\n"
    done = in_process(*command, "--tag", "global_step9")
    assert (done.code, done.out) == (0, f"{out}\n")
    assert (out / "latest").read_text() == "global_step9"
    # A job has gone on from the target, and saved into it.
    (out / "latest").write_text("global_step11")
    done = in_process(*command, "--tag", "global_step9")
    assert (done.code, done.out) == (4, "")
    assert "its 'latest' names 'global_step11', not 'global_step9'" in done.err


def test_what_is_done_needs_neither_lock_nor_space(saved: Saved, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ("repartition", saved(2), out, "--world-size", 3, *IF_NEEDED)
    assert streamshard(*command).code == 0
    lock = Lock(tmp_path / ".streamshard.lock.out", out)
    lock.take()
    assert (streamshard(*command).code, streamshard(*command).out) == (0, f"{out}\n")
    shutil.rmtree(out)
    assert streamshard(*command).code == 4
    fits = ("repartition", saved(2), out, "--world-size", 4, *IF_NEEDED)
    assert (streamshard(*fits).code, streamshard(*fits).out) == (0, f"{saved(2)}\n")
    lock.release()
