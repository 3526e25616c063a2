"""`newest`: of every kind of run, the newest checkpoint from which a job can go on."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from streamshard.errors import IncompleteError, SourceError, SourceNotFoundError
from tests.cli.conftest import in_process as program
from tests.compact.runs import MODEL, SHARD, make_run, save
from tests.compact.test_families import LIGHTNING, make_output
from tests.fabricated import edit, write
from tests.job import Job
from tests.verify.conftest import flip_data

STEPS = (80, 90, 100, 1000)
DAMAGES: dict[str, Callable[[Path], object]] = {
    "a NaN": lambda tag: poison(tag),
    "a rank that is missing": lambda tag: (tag / SHARD).unlink(),
    "a shard that was cut off": lambda tag: cut_off(tag / SHARD),
    "an empty shard": lambda tag: (tag / SHARD).write_bytes(b""),
    "a bit that flipped": lambda tag: flip_data(tag / SHARD),
}


def poison(tag: Path, value: float = math.nan) -> None:
    """Put NaN into a master weight."""

    def change(content: dict[str, Any]) -> None:
        content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data[3] = value

    edit(tag / SHARD, change)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", steps=STEPS)


@pytest.mark.parametrize("what", DAMAGES)
def test_one_that_is_not_good_is_passed_over_for_the_one_before(run: Path, what: str) -> None:
    assert streamshard.newest(run).path == f"{run}/global_step1000"
    DAMAGES[what](run / "global_step1000")
    found = streamshard.newest(run, quick=True)
    in_headers = what not in ("a NaN", "a bit that flipped")
    assert found.path == f"{run}/global_step{100 if in_headers else 1000}"
    assert (found.checkpoints[in_headers].is_healthy, found.bytes_read) == (None, 0)
    found = streamshard.newest(run)
    assert found.path == f"{run}/global_step100"
    (over,) = found.passed_over
    assert over.path == f"{run}/global_step1000"
    assert (over.is_healthy is False) == (what == "a NaN")
    assert (over.is_whole is False) == (what != "a NaN")
    DAMAGES[what](run / "global_step100")
    assert streamshard.newest(run).path == f"{run}/global_step90"


def test_nothing_older_is_read(run: Path) -> None:
    size = sum(file.stat().st_size for file in (run / "global_step1000").iterdir())
    found = streamshard.newest(run)
    assert 0 < found.bytes_read < 2 * size
    assert [one.is_whole for one in found.checkpoints] == [True, None, None, None]
    assert [one.step for one in found.checkpoints] == sorted(STEPS, reverse=True)


def test_a_tag_above_latest_is_of_a_save_that_did_not_end(run: Path) -> None:
    """DeepSpeed writes `latest` when all ranks have saved, and loads what it names."""
    (run / "latest").write_text("global_step100")
    found = streamshard.newest(run)
    assert found.path == f"{run}/global_step100"
    assert "above that of global_step100" in found.passed_over[0].reason


@pytest.mark.parametrize(
    ("change", "notes"),
    [
        (lambda path: path.unlink(), 0),
        (lambda path: path.write_text(""), 1),
        (lambda path: path.write_text("global_step7000"), 1),
        (lambda path: path.write_text("../elsewhere"), 1),
        (lambda path: (path.unlink(), path.mkdir()), 1),
        (lambda path: (path.unlink(), path.symlink_to("nowhere")), 1),
    ],
)
def test_a_wrong_latest_is_told_and_the_steps_count(
    run: Path, change: Callable[[Path], object], notes: int
) -> None:
    change(run / "latest")
    found = streamshard.newest(run)
    assert (found.path, len(found.notes)) == (f"{run}/global_step1000", notes)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.complex64, complex(0, math.nan)),
        (torch.complex128, complex(math.inf, 0)),
        (torch.float8_e4m3fn, math.nan),
        (torch.float8_e5m2, math.inf),
    ],
)
def test_a_buffer_of_any_float_dtype_counts(run: Path, dtype: torch.dtype, value: complex) -> None:
    def change(content: dict[str, Any]) -> None:
        content["module"]["rotary"] = torch.tensor([1, value]).to(dtype)
        content["buffer_names"].append("rotary")

    edit(run / "global_step1000" / MODEL, change)
    found = streamshard.newest(run)
    assert found.path == f"{run}/global_step100"
    assert "of 2 elements" in found.passed_over[0].reason


@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii"])
def test_the_path_is_printed_byte_for_byte(tmp_path: Path, encoding: str) -> None:
    """As the file system has it, which may be no text."""
    run = make_run(tmp_path / os.fsdecode(b"\xff \xc3\xa9"), steps=(5,))
    done = subprocess.run(
        [sys.executable, "-m", "streamshard", "newest", run],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, os.fsencode(run / "global_step5") + b"\n")


@pytest.mark.parametrize("around", ["epochs", "epochs/all"])
def test_a_tag_may_be_a_path(run: Path, around: str) -> None:
    """DeepSpeed takes `save_checkpoint(dir, tag="epochs/global_step5")`."""
    (run / around).mkdir(parents=True)
    for step in STEPS:
        (run / f"global_step{step}").rename(run / around / f"global_step{step}")
    (run / "latest").write_text(f"{around}/global_step100")
    assert streamshard.newest(run).path == f"{run}/{around}/global_step100"
    (run / "latest").write_text(f"{around}/global_step1000")
    assert streamshard.newest(run).path == f"{run}/{around}/global_step1000"
    poison(run / around / "global_step1000")
    found = streamshard.newest(run)
    assert (found.path, found.notes) == (f"{run}/{around}/global_step100", ())


def test_steps_in_several_directories_are_those_of_their_files(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for tag, step in (("epoch_1/step_9", 90), ("epoch_2/step_3", 120)):
        write(Job(client_state={"global_steps": step}), run, tag)
    assert (run / "latest").read_text() == "epoch_2/step_3"
    assert streamshard.newest(run).path == f"{run}/epoch_2/step_3"
    poison(run / "epoch_2/step_3")
    assert streamshard.newest(run).path == f"{run}/epoch_1/step_9"


@pytest.mark.parametrize("pattern", ["checkpoint-{}", "checkpoint_{}", "epoch_{}", LIGHTNING])
def test_of_a_framework_the_whole_directory_is_named(tmp_path: Path, pattern: str) -> None:
    output = make_output(tmp_path / "output", pattern)
    assert streamshard.newest(output).path == str(output / pattern.format(1000))
    (output / pattern.format(1000) / "latest").unlink()
    assert streamshard.newest(output).path == str(output / pattern.format(900))
    poison(output / pattern.format(900) / "global_step900")
    assert streamshard.newest(output).path == str(output / pattern.format(300))


@pytest.mark.parametrize(
    ("pattern", "name", "content"),
    [
        ("checkpoint-{}", "trainer_state.json", None),
        ("checkpoint-{}", "trainer_state.json", b""),
        ("checkpoint-{}", "trainer_state.json", b'{"global_step": 10'),
        ("checkpoint-{}", "rng_state_0.pth", b""),
        ("checkpoint_{}", "random_states_1.pkl", None),
        ("checkpoint_{}", "random_states_1.pkl", b""),
        ("epoch_{}", "random_states_0.pkl", None),
    ],
)
def test_what_a_framework_writes_after_deepspeed_counts(
    tmp_path: Path, pattern: str, name: str, content: bytes | None
) -> None:
    output = make_output(tmp_path / "output", pattern)
    path = output / pattern.format(1000) / name
    path.unlink() if content is None else path.write_bytes(content)
    found = streamshard.newest(output, quick=True)
    assert found.path == str(output / pattern.format(900))
    assert name in found.passed_over[0].reason


def test_names_of_several_forms_are_compared_by_the_steps_in_their_files(tmp_path: Path) -> None:
    """As of Accelerate, which saves `epoch_1` after `step_900`; of Lightning's `last.ckpt`."""
    output = tmp_path / "output"
    output.mkdir()
    for name, steps in (("step_900", 9), ("epoch_1", 12), ("last", 11)):
        save(output / name, steps)
        edit_steps(output / name, steps)
    order = [Path(one.path).name for one in streamshard.newest(output).checkpoints]
    assert order == ["epoch_1", "last", "step_900"]


def edit_steps(unit: Path, steps: int) -> None:
    for path in unit.rglob("*model_states.pt"):
        edit(path, lambda content: content.update(global_steps=steps))


def test_stores_are_checkpoints_too(run: Path, tmp_path: Path) -> None:
    stores = tmp_path / "stores"
    poison(run / "global_step1000")
    for step in STEPS:
        streamshard.convert(run, stores / f"global_step{step}.zarr", tag=f"global_step{step}")
    found = streamshard.newest(stores)
    assert found.path == str(stores / "global_step100.zarr")
    assert found.passed_over[0].is_healthy is False


def test_none_is_an_error_that_says_why(run: Path, tmp_path: Path) -> None:
    for step in STEPS:
        poison(run / f"global_step{step}")
    with pytest.raises(IncompleteError, match="4 checkpoints in it, none of which") as raised:
        streamshard.newest(run)
    assert len(raised.value.__notes__) == len(STEPS)
    shown = program("newest", run, "--json")
    assert (shown.code, json.loads(shown.out)["path"]) == (3, None)
    shown = program("newest", run)
    assert (shown.out, shown.err.count("1 NaN of")) == ("", len(STEPS))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceNotFoundError, match="no checkpoint in it"):
        streamshard.newest(tmp_path / "empty")
    with pytest.raises(SourceError, match="no such file or directory"):
        streamshard.newest(tmp_path / "nowhere")


def test_a_script_gets_one_line(run: Path) -> None:
    poison(run / "global_step1000", math.inf)
    done = program("newest", run)
    assert (done.code, done.out) == (0, f"{run}/global_step100\n")
    assert f"passed over {run}/global_step1000: state/fp32/" in done.err
    assert "infinite of" in done.err
    quiet = program("newest", run, "--quiet")
    assert (quiet.out, quiet.err) == (done.out, "")
    document = json.loads(program("newest", run, "--json").out)
    assert document["path"] == f"{run}/global_step100"
    assert [one["is_healthy"] for one in document["checkpoints"]] == [False, True, None, None]


def test_what_it_finds_is_a_path(run: Path) -> None:
    found = streamshard.newest(run)
    with streamshard.open(found) as opened:
        assert opened.tag == "global_step1000"
    assert streamshard.inspect(found).tag == "global_step1000"


def test_two_saves_in_one_tag_are_a_warning(run: Path) -> None:
    edit_steps(run / "global_step1000", 9)
    found = streamshard.newest(run)
    assert found.path == f"{run}/global_step1000"
    assert "of two saves" in found.checkpoints[0].warnings[0]
    assert "of two saves" in program("newest", run).err
    notes = streamshard.verify(run, health=True).notes
    assert [("of two saves" in note) for note in notes].count(True) == 1


@pytest.mark.parametrize(("skipped", "is_told"), [(2, True), (1, False)])
def test_steps_that_were_all_skipped_are_a_warning(run: Path, skipped: int, is_told: bool) -> None:
    """DeepSpeed skips steps whose gradients overflow, so the weights stay finite."""
    for path in (run / "global_step1000").glob("*model_states.pt"):
        edit(path, lambda content: content.update(global_steps=9, skipped_steps=skipped))
    for quick in (True, False):
        warnings = streamshard.newest(run, quick=quick).checkpoints[0].warnings
        told = [line for line in warnings if "were skipped" in line]
        assert told == (
            ["All 2 steps since global_step100 were skipped, as gradients overflowed."] * is_told
        )


def test_a_loss_scale_at_its_minimum_is_a_warning(run: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        scaler = content["optimizer_state_dict"]["loss_scaler"]
        scaler.cur_scale, scaler.min_scale, scaler.dynamic = 1.0, 1, True

    for path in (run / "global_step1000").glob("*optim_states.pt"):
        edit(path, change)
    (warning,) = streamshard.newest(run).checkpoints[0].warnings
    assert "loss scale is at its minimum, 1" in warning
