"""Tensor parallel parts and experts: each is a data-parallel model part or group of its own."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import streamshard
from streamshard.cli.main import main
from streamshard.errors import (
    DisagreementError,
    IncompleteError,
    SourceError,
    UnsupportedError,
    UsageError,
)
from tests.comparing import compare
from tests.fabricated import DUMPS, edit, edit_all, wrapped, write, write_dumps
from tests.job import EXPERT, JOBS, TAG, TENSOR, Job

BOTH = JOBS["expert-tensor"]


@pytest.mark.parametrize(
    ("job", "world_size", "multiples"),
    [(TENSOR, 3, "2, 4, 6"), (BOTH, 6, "4, 8, 12")],
)
def test_ranks_that_do_not_divide_are_refused_with_those_that_do(
    tmp_path: Path, job: Job, world_size: int, multiples: str
) -> None:
    run = write(job, tmp_path / "run")
    with pytest.raises(UsageError, match=f"give a multiple of .*{multiples}"):
        streamshard.repartition(run, tmp_path / "out", world_size=world_size)


def lost(*patterns: str) -> Callable[[Path], None]:
    """Lose the files of a tag whose names fit a pattern."""

    def damage(run: Path) -> None:
        for path in [path for pattern in patterns for path in (run / TAG).glob(pattern)]:
            path.unlink()

    return damage


def later_step(run: Path) -> None:
    edit(run / TAG / "mp_rank_01_model_states.pt", lambda held: held.update(global_steps=8))


def torn_expert(run: Path) -> None:
    path = run / TAG / "layer_0_expert_1_mp_rank_00_model_states.pt"
    path.write_bytes(path.read_bytes()[:-100])


def experts_of_tensor_ranks(run: Path) -> None:
    """Save without `enable_expert_tensor_parallelism`, as far as a message depends on it."""

    def rename(held: dict[str, Any]) -> None:
        wrapped(held["optimizer_state_dict"])["param_groups"][2]["name"] = "ep_size_4"

    edit_all(run, "*_optim_states.pt", rename)


def other_order(run: Path) -> None:
    """Change the config after the save, so that it would hand experts to the wrong ranks."""
    other = {"use_data_before_expert_parallelism": False}
    edit_all(run, "*_optim_states.pt", lambda held: held["ds_config"].update(other))


PART_1 = r"mp_rank_01_model_states\.pt: the model file is missing"
REFUSED: dict[str, tuple[Job, Callable[[Path], None], type[SourceError], str]] = {
    "model file": (TENSOR, lost("mp_rank_01_model_states.pt"), IncompleteError, PART_1),
    "optimizer file": (
        TENSOR,
        lost("bf16_zero_pp_rank_2_mp_rank_01_optim_states.pt"),
        IncompleteError,
        "rank 2 of at least 3 is missing",
    ),
    "last part": (
        TENSOR,
        lost("*mp_rank_01*"),
        IncompleteError,
        "one of 2 tensor or pipeline parallel parts",
    ),
    "steps": (TENSOR, later_step, DisagreementError, r"disagrees with .* about global_steps"),
    "expert": (
        EXPERT,
        lost("layer_0_expert_2_mp_rank_00_model_states.pt"),
        IncompleteError,
        r"expert_2_mp_rank_00_model_states\.pt: missing",
    ),
    "torn expert": (EXPERT, torn_expert, SourceError, "expert_1_mp_rank_00"),
    "order of experts": (
        replace(EXPERT, data_before_experts=True),
        other_order,
        SourceError,
        "use_data_before_expert_parallelism",
    ),
    "experts of other tensor ranks": (
        BOTH,
        experts_of_tensor_ranks,
        UnsupportedError,
        "experts 'ep_size_4' are on 8 ranks, .*without enable_expert_tensor_par",
    ),
    # DeepSpeed saves no files of tensor-parallel ranks that share whole experts with others.
    "part with experts": (BOTH, lost("mp_rank_01_model*"), IncompleteError, f"{PART_1}$"),
    "part that shares experts": (
        BOTH,
        lost("mp_rank_01_model*", "layer_*_mp_rank_01_*"),
        IncompleteError,
        f"{PART_1}, and so are .* DeepSpeed saves neither",
    ),
}


@pytest.mark.parametrize(("job", "damage", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_missing_or_does_not_fit_is_named(
    tmp_path: Path,
    job: Job,
    damage: Callable[[Path], None],
    kind: type[SourceError],
    message: str,
) -> None:
    run = write(job, tmp_path / "run")
    damage(run)
    with pytest.raises(kind, match=message):
        streamshard.inspect(run)


def test_inspect_counts_ranks_parts_and_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(BOTH, tmp_path / "run")
    assert main(["inspect", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    counted = [found[key] for key in ("data_parallel", "model_parallel", "expert_parallel")]
    assert (found["world_size"], counted) == (8, [4, 2, 2])
    assert (found["tensor_parallel"], found["pipeline_parallel"]) == (2, 1)
    names = [found["parameters"][-k]["name"] for k in (1, 2, 3, 4)]
    assert len(set(names)) == 4
    assert main(["inspect", str(run)]) == 0
    shown = capsys.readouterr().out
    assert main(["inspect", str(run), "--html", str(tmp_path / "cut.html")]) == 0
    assert "mp_rank_01, expert rank 1" in shown
    drawn = (tmp_path / "cut.html").read_text()
    assert "world size 8: 4 data-parallel x 2 tensor-parallel, experts over 2" in shown
    assert "mp_rank_01 (tensor rank 1 of 2), param group 2, expert rank 1 of 2" in drawn


def test_dumps_of_experts(tmp_path: Path) -> None:
    """Raw dumps of a job with experts name them by rank, as the shards do."""
    source = write_dumps(write(EXPERT, tmp_path / "run"), tmp_path / "dumps")
    wanted = write(replace(EXPERT, world_size=2), tmp_path / "of-2")
    write_dumps(wanted, tmp_path / "wanted")
    streamshard.repartition(source, tmp_path / "found" / DUMPS, world_size=2)
    compare(tmp_path / "found", tmp_path / "wanted")
    shutil.rmtree(tmp_path / "found")
    with pytest.raises(UsageError, match="multiple of 2"):
        streamshard.repartition(source, tmp_path / "found" / DUMPS, world_size=3)
