"""What is printed, where, and by which flag."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import streamshard as api
from streamshard.cli.parser import arguments_of
from streamshard.cli.text.diff_text import diff_text
from tests.cli.conftest import RANKS, streamshard, without_progress
from tests.forked import Finished


def test_inspect_tells_what_is_there(saved: Callable[[int], Path]) -> None:
    done = streamshard("inspect", saved(3))
    assert (done.code, done.err) == (0, "")
    for text in ("ZeRO stage 3, world size 4", "bfloat16", "exp_avg_sq", "weight_decay"):
        assert text in done.out
    assert max(map(len, done.out.splitlines())) <= 120


def test_inspect_in_json_is_complete(saved: Callable[[int], Path]) -> None:
    found = json.loads(streamshard("inspect", saved(2), "--json").out)
    assert (found["zero_stage"], found["world_size"], found["kind"]) == (2, RANKS, "native")
    assert [group["states"]["step"] for group in found["groups"]] == [7.0, 7.0]
    assert found["groups"][0]["hyper_parameters"]["betas"] == [0.9, 0.999]
    numel = sum(parameter["numel"] for parameter in found["parameters"])
    assert found["state_bytes"]["fp32"] == 4 * numel
    assert found["tied"] == {"head.weight": "embed.weight"}


def test_a_store_is_inspected_like_its_source(saved: Callable[[int], Path], tmp_path: Path) -> None:
    store = tmp_path / "run.zarr"
    assert streamshard("convert", saved(3), store, "-q").code == 0
    of_shards, of_store = (
        json.loads(streamshard("inspect", path, "--json").out) for path in (saved(3), store)
    )
    for own in ("path", "kind", "files", "file_bytes", "file_groups", "file_list", "checkpoints"):
        assert of_shards.pop(own) != of_store.pop(own)
    for parameter in (*of_shards["parameters"], *of_store["parameters"]):
        for cut in ("pieces", "first_rank", "last_rank"):
            parameter.pop(cut)
    assert of_shards == of_store


@pytest.mark.parametrize("flag", ["-q", "--json"])
def test_quiet_and_json_print_nothing_else(
    flag: str, saved: Callable[[int], Path], tmp_path: Path
) -> None:
    done = streamshard("repartition", saved(2), tmp_path / "out", "--world-size", 2, flag)
    assert (done.code, done.err) == (0, "")
    if flag == "-q":
        assert done.out == ""
    else:
        report = json.loads(done.out)
        assert report["peak_bytes"] <= report["projected_bytes"]


def test_the_note_keeps_the_global_batch(stage_2: Path, tmp_path: Path) -> None:
    done = streamshard("repartition", stage_2, tmp_path / "out", "--world-size", 2)
    assert "round_robin_gradients off" in done.out
    assert "global batch" in done.out


def test_help_teaches_by_example_in_one_line(
    in_process: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    verbs = "repartition convert export verify diff inspect compact apply completion"
    for verb in verbs.split():
        done = in_process(verb, "--help")
        assert done.code == 0
        example = done.out.splitlines()[-1].removeprefix("Example: streamshard ")
        words = [word for word in shlex.split(example) if word != ">"]
        arguments_of().parse_args(words[: 2 if verb == "completion" else None])
    assert "Exit codes" in in_process("--help").out


def test_the_version_is_that_of_the_package(
    in_process: Callable[..., Finished], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "streamshard-9.9.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: streamshard\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(tmp_path)
    done = in_process("--version")
    assert (done.code, done.out) == (0, "streamshard 9.9\n")
    monkeypatch.setattr(sys, "path", [])
    done = in_process("--version")
    assert (done.code, "not installed" in done.out) == (0, True)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_run_needs_no_open_streams(closed: str, run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "streamshard"]
    for arguments in (["repartition", run, tmp_path / "out", "--world-size", 2], ["inspect", run]):
        line = shlex.join(map(str, [*command, *arguments]))
        done = subprocess.run(["sh", "-c", f"{line} {closed}"], capture_output=True, text=True)
        assert (done.returncode, without_progress(done.stderr)) == (0, "")
    assert streamshard("verify", tmp_path / "out", "--against", run).code == 0


def test_a_full_standard_output_is_an_error_without_a_traceback(run: Path) -> None:
    command = [sys.executable, "-m", "streamshard", "inspect", str(run)]
    for flag in ("--json", "-v"):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run([*command, flag], stdout=full, stderr=subprocess.PIPE, text=True)
        message = "streamshard: standard output: cannot be written (No space left on device)\n"
        assert (done.returncode, done.stderr) == (4, message)


def test_a_directory_of_archives_tells_what_is_in_it(
    in_process: Callable[..., Finished], run: Path, tmp_path: Path
) -> None:
    archive = tmp_path / "archive"
    assert in_process("convert", run, archive / "one.zarr", "-q").code == 0
    done = in_process("verify", archive)
    assert done.code == 3
    assert done.err.endswith(f". Give the one in it: {archive / 'one.zarr'}\n")


def test_checkpoints_without_a_common_tensor_give_no_table(run: Path) -> None:
    found = replace(api.diff(run, run), states=(), tensors=())
    shown = diff_text(found, sort="relative", verbose=False)
    assert "relative L2" not in shown
    assert "No tensor is in both with the same shape." in shown


def test_a_store_is_called_one_whatever_its_name(
    in_process: Callable[..., Finished], run: Path, tmp_path: Path
) -> None:
    for flags in (["-n"], []):
        done = in_process("convert", run, tmp_path / "name", *flags)
        assert f"{tmp_path / 'name'} (Zarr store) " in " ".join(done.out.split())
        done = in_process("repartition", run, tmp_path / "out", "--world-size", 1, *flags)
        assert "(Zarr store)" not in done.out
    assert in_process("verify", tmp_path / "name", "--against", run).code == 0


@pytest.mark.parametrize("verb", ["repartition", "inspect"])
def test_more_ranks_than_any_job_has_are_refused_at_once(
    verb: str, in_process: Callable[..., Finished], run: Path, tmp_path: Path
) -> None:
    for size in ("1000000", "9" * 40):
        more = [tmp_path / "out", "-n"] if verb == "repartition" else ["--svg", tmp_path / "x.svg"]
        done = in_process(verb, run, *more, "--world-size", size)
        assert done.code == 2
        assert f"--world-size {size}: above 131,072, the most ranks" in done.err
    assert not (tmp_path / "x.svg").exists()
