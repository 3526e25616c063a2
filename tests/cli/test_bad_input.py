"""Bad input: the right exit code, a message that names the file, no traceback, no OUT."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks._layout import TAG
from tests.cli.conftest import RANKS, model_file, optimizer_file, streamshard, tree
from tests.fabricated import edit


@dataclass(frozen=True)
class Damage:
    """Something that is wrong with a source, and what must be said of it."""

    name: str
    stage: int
    do: Callable[[Path], object]
    says: tuple[str, ...]


def _cut(path: Path, nbytes: int) -> None:
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size - nbytes)


def _other_step(path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        states = content["optimizer_state_dict"]["base_optimizer_state"]["state"]
        for state in states.values():
            state["step"] = state["step"] + 1

    edit(path, change)


def _other_world(path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["optimizer_state_dict"]["partition_count"] = [8, 8]

    edit(path, change)


DAMAGES = [
    Damage("last rank missing", 2, lambda r: optimizer_file(r, 3).unlink(), ("rank_3", "missing")),
    Damage("first rank missing", 3, lambda r: optimizer_file(r, 0).unlink(), ("rank_0", "missing")),
    Damage("model file missing", 2, lambda r: model_file(r).unlink(), ("mp_rank_00", "missing")),
    Damage("model rank missing", 3, lambda r: model_file(r, 2).unlink(), ("rank_2", "missing")),
    Damage(
        "stale rank",
        2,
        lambda r: shutil.copy(optimizer_file(r, 3), optimizer_file(r, 4)),
        ("rank_4", "another world size"),
    ),
    Damage("truncated", 2, lambda r: _cut(optimizer_file(r, 1), 100), ("rank_1", "not a whole")),
    Damage("empty", 3, lambda r: model_file(r, 1).write_bytes(b""), ("rank_1", "not a whole")),
    Damage("other step", 2, lambda r: _other_step(optimizer_file(r, 2)), ("rank_2", "step")),
    Damage("other world", 2, lambda r: _other_world(optimizer_file(r, 2)), ("rank_2", "8 ranks")),
    Damage("empty latest", 2, lambda r: (r / "latest").write_text(""), ("latest", TAG)),
    Damage("latest lies", 2, lambda r: (r / "latest").write_text("gone"), ("gone", TAG)),
    Damage("latest leads out", 2, lambda r: (r / "latest").write_text(".."), ("leads out",)),
    Damage("no latest", 2, lambda r: (r / "latest").unlink(), ("latest", TAG)),
    Damage("tag is gone", 2, lambda r: shutil.rmtree(r / TAG), (TAG, "not there")),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
@pytest.mark.parametrize("verb", ["repartition", "convert", "inspect"])
def test_a_damaged_source_is_refused(
    damage: Damage, verb: str, saved: Callable[[int], Path], tmp_path: Path
) -> None:
    run = Path(shutil.copytree(saved(damage.stage), tmp_path / "run"))
    damage.do(run)
    before, out = tree(run), tmp_path / "out"
    targets: dict[str, list[object]] = {"repartition": [out, "--world-size", 3], "convert": [out]}
    done = streamshard(verb, run, *targets.get(verb, []))
    assert done.code == 3
    assert all(text in done.err for text in damage.says), done.err
    assert "Traceback" not in done.err
    assert done.out == "" or verb == "inspect"  # which shows what is there
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert tree(run) == before


def test_nothing_at_the_path(tmp_path: Path) -> None:
    done = streamshard("inspect", tmp_path / "nothing")
    assert (done.code, "nothing: no such file" in done.err) == (3, True)


def test_a_config_that_does_not_describe_the_files(stage_2: Path) -> None:
    def round_robin(content: dict[str, Any]) -> None:
        content["ds_config"]["zero_optimization"]["round_robin_gradients"] = True

    for rank in range(RANKS):
        edit(optimizer_file(stage_2, rank), round_robin)
    done = streamshard("inspect", stage_2)
    assert done.code == 3
    assert "param_slice_mappings" in done.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--world-size", "0"], "--world-size 0"),
        (["--world-size", "many"], "invalid int"),
        ([], "--world-size"),
        (["--world-size", "2", "--workers", "0"], "--workers 0"),
        (["--world-size", "2", "--memory-limit", "lots"], "not a size"),
        (["--world-size", "2", "--memory-limit", "120%"], "not a size"),
        (["--world-size", "2", "--zero-stage", "4"], "--zero-stage"),
        (["--world-size", "2", "--ds-config", "nothing.json"], "nothing.json"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], says: str, saved: Callable[[int], Path], tmp_path: Path
) -> None:
    done = streamshard("repartition", saved(2), tmp_path / "out", *arguments)
    assert done.code == 2
    assert says in done.err
    assert "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["repartition", "convert"])
def test_a_checkpoint_given_for_nothing(
    verb: str, saved: Callable[[int], Path], tmp_path: Path
) -> None:
    ranks = ["--world-size", "2"] if verb == "repartition" else []
    done = streamshard(verb, saved(2), tmp_path / "out", *ranks, "--like", saved(3))
    assert done.code == 2
    assert "leave --like out" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "JSON"),
        ("[]", "not an object"),
        ('{"bf16": {"enabled": true}}', "stage 0"),
        ('{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}', "loss scale"),
        ('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}', "make them agree"),
    ],
)
def test_configs_that_cannot_be_followed(
    config: str, says: str, saved: Callable[[int], Path], tmp_path: Path
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(config)
    flags: list[object] = ["--world-size", 2, "--ds-config", path]
    flags += ["--zero-stage", 2] if "agree" in says else []
    done = streamshard("repartition", saved(2), tmp_path / "out", *flags)
    assert (done.code, says in done.err) == (2, True), done.err
    assert not (tmp_path / "out").exists()
