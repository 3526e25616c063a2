"""`export` on the command line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.cli.conftest import optimizer_file, streamshard, tree
from tests.fabricated import load, save


def test_options_do_what_they_say(run: Path, tmp_path: Path) -> None:
    done = streamshard(
        "export", run, tmp_path / "out", "--dtype", "bf16", "--keep-dtype", "*.bias",
        "--exclude", "mask", "--exclude", "norm.*", "--strip-prefix", "block.", "--no-frozen",
        "--verify", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    report = json.loads(done.out)
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "embed.weight": torch.bfloat16,
        "0.attn.weight": torch.bfloat16,
        "0.mlp": torch.bfloat16,
        "embed.bias": torch.float32,
        "0.bias": torch.float32,
        "1.bias": torch.float32,
        "rotary.inv_freq": torch.bfloat16,
        "empty": torch.bfloat16,
    }
    assert (report["verb"], report["tensors"], report["dtype"]) == ("export", 8, "bf16")
    assert report["peak_bytes"] <= report["projected_bytes"]
    assert report["files"] == len(tree(tmp_path / "out"))


def test_a_dry_run_tells_the_exact_size_and_writes_nothing(run: Path, tmp_path: Path) -> None:
    options = ("--format", "torch", "--max-shard-size", "200")
    dry = streamshard("export", run, tmp_path / "out", *options, "-n", "--json")
    assert (dry.code, [path.name for path in tmp_path.iterdir()]) == (0, ["run"])
    assert streamshard("export", run, tmp_path / "out", *options).code == 0
    written = tree(tmp_path / "out")
    assert json.loads(dry.out)["bytes_written"] == sum(map(len, written.values()))
    assert json.loads(dry.out)["files"] == len(written) > 3


def test_it_says_what_it_wrote(run: Path, tmp_path: Path) -> None:
    done = streamshard("export", run, tmp_path / "out", "--dtype", "fp16")
    lines = done.out.splitlines()
    assert lines[0] == f"wrote    {tmp_path / 'out'}"
    assert "tensors  12, fp16" in lines
    assert "No config.json" in done.out


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--dtype", "int8"), 2, "invalid choice"),
        (("--include", "nothing"), 2, "no tensor has such a name"),
        (("--max-shard-size", "many"), 2, "is not a size"),
        (("--memory-limit", "1MiB"), 5, "--memory-limit"),
        (("--tag", "global_step8"), 3, "no such tag"),
    ],
)
def test_a_mistake_is_named_and_leaves_nothing(
    options: tuple[str, ...], code: int, said: str, run: Path, tmp_path: Path
) -> None:
    done = streamshard("export", run, tmp_path / "out", *options)
    assert (done.code, said in done.err) == (code, True), done.err
    assert "Traceback" not in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_targets_are_guarded_as_those_of_other_verbs_are(run: Path, tmp_path: Path) -> None:
    before = tree(run)
    for target in (run, run / "out", tmp_path / "a.safetensors"):
        done = streamshard("export", run, target, "--overwrite")
        assert done.code == 2, done.err
    assert streamshard("export", run, tmp_path / "out").code == 0
    done = streamshard("export", run, tmp_path / "out")
    assert (done.code, "--overwrite" in done.err) == (4, True)
    assert tree(run) == before


def test_raw_dumps_are_refused_with_what_to_do(run: Path, tmp_path: Path) -> None:
    (tmp_path / "dumps").mkdir()
    for rank in range(2):
        state = load(optimizer_file(run, rank))["optimizer_state_dict"]
        save(state, tmp_path / "dumps" / f"optimizer.{rank}.pt")
    done = streamshard("export", f"{tmp_path}/dumps/optimizer.{{rank}}.pt", tmp_path / "out")
    assert (done.code, "export a whole checkpoint" in done.err) == (3, True), done.err


@pytest.mark.parametrize(
    "options",
    [
        ("--max-shard-size", 300_000),
        ("--format", "torch"),
        ("--format", "universal"),
        ("--format", "dcp"),
        ("--format", "dcp", "--layout", "titan", "--ranks", 2),
        ("--format", "dcp", "--layout", "accelerate"),
    ],
)
def test_an_export_may_be_replaced_and_what_else_is_there_not(
    saved: Callable[[int], Path], tmp_path: Path, options: tuple[object, ...]
) -> None:
    out = tmp_path / "out"
    assert streamshard("export", saved(2), out, *options).code == 0
    before = tree(out)
    assert streamshard("export", saved(3), out, *options).code == 4
    assert streamshard("export", saved(3), out, *options, "--overwrite").code == 0
    assert tree(out) != before
    (out / "notes.md").write_text("irreplaceable")
    before = tree(out)
    assert streamshard("export", saved(2), out, *options, "--overwrite").code == 4
    assert tree(out) == before
