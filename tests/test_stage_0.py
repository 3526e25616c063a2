"""What DeepSpeed saves without ZeRO: carried whole to any count of ranks, by every verb."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from streamshard.errors import (
    CorruptFileError,
    DisagreementError,
    IncompleteError,
    UnsupportedError,
    UsageError,
)
from tests.fabricated import client_state, edit, load, write
from tests.job import TAG, Job, ds_config
from tests.oracle.files import digests
from tests.oracle.values import value_differences

JOB = Job(stage=1, world_size=4, client_state=client_state())
OTHER = 3


def model_file(run: Path, part: int = 0) -> Path:
    return run / TAG / f"mp_rank_{part:02d}_model_states.pt"


def wrapped_optimizer() -> dict[str, Any]:
    """Make what `FP16_Optimizer` saves: flat masters, and nothing that names a parameter."""
    flat = [torch.arange(5.0) + group for group in range(2)]
    state = {
        group: {"step": torch.tensor(7.0), "exp_avg": master * 2, "exp_avg_sq": master * 3}
        for group, master in enumerate(flat)
    }
    groups = [{"lr": 0.1 * group, "params": [group]} for group in range(2)]
    return {
        "cur_scale": 1.0,
        "optimizer_state_dict": {"state": state, "param_groups": groups},
        "fp32_groups_flat": [master.requires_grad_() for master in flat],
        "clip_grad": 1.0,
    }


def stage_0(place: Path, job: Job = JOB, **changes: object) -> Path:
    """Save a job without ZeRO."""
    write(job, place)
    for path in (place / TAG).glob("*_optim_states.pt"):
        path.unlink()

    def without_zero(model: dict[str, Any]) -> None:
        model["ds_config"]["zero_optimization"]["stage"] = 0
        model["optimizer"] = wrapped_optimizer()
        model |= {"param_shapes": None, "shared_params": None, **changes}

    for part in range(job.parts):
        edit(model_file(place, part), without_zero)
    return place


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return stage_0(tmp_path / "run")


def require_same_but_for_ranks(source: Path, out: Path, part: int = 0) -> None:
    before, after = (load(model_file(place, part)) for place in (source, out))
    assert after.pop("dp_world_size") == OTHER
    assert before.pop("dp_world_size") == JOB.world_size
    assert list(value_differences(before, after, "model")) == []


def test_all_but_the_count_of_ranks_stays(run: Path, tmp_path: Path) -> None:
    report = streamshard.repartition(run, tmp_path / "out", world_size=OTHER, verify=True)
    assert (report.zero_stage, report.source_world_size, report.world_size) == (0, 4, OTHER)
    assert any("dp_world_size alone is another" in note for note in report.notes)
    require_same_but_for_ranks(run, tmp_path / "out")
    assert (tmp_path / "out" / "zero_to_fp32.py").is_file()


def test_the_way_through_a_store_gives_the_same_bytes(run: Path, tmp_path: Path) -> None:
    store, back = tmp_path / "a.zarr", tmp_path / "back"
    streamshard.convert(run, store, codec="zstd", verify=True)
    for place, out in ((run, "direct"), (store, "of-store")):
        streamshard.repartition(place, tmp_path / out, world_size=OTHER)
    assert digests(tmp_path / "direct") == digests(tmp_path / "of-store")
    streamshard.repartition(store, back)
    for place in (store, back, tmp_path / "direct"):
        found = streamshard.verify(place)
        assert (found.problems, found.differences) == ((), ())
        found = streamshard.verify(place, against=run)
        assert (found.problems, found.differences) == ((), ())
    assert streamshard.inspect(back).world_size == JOB.world_size


def test_a_state_that_differs_is_named(run: Path, tmp_path: Path) -> None:
    changed = stage_0(tmp_path / "changed")

    def change(model: dict[str, Any]) -> None:
        model["optimizer"]["optimizer_state_dict"]["state"][1]["exp_avg"][2] += 1

    edit(model_file(changed), change)
    (difference,) = streamshard.verify(run, against=changed).differences
    assert difference.name == "model/optimizer.optimizer_state_dict.state.1.exp_avg"


def test_parts_of_the_model_keep_their_optimizers(tmp_path: Path) -> None:
    run = stage_0(tmp_path / "run", replace(JOB, parts=2))
    streamshard.repartition(run, tmp_path / "out", world_size=2 * OTHER)
    for part in range(2):
        require_same_but_for_ranks(run, tmp_path / "out", part)


def test_a_part_without_an_optimizer_is_of_another_run(tmp_path: Path) -> None:
    run = stage_0(tmp_path / "run", replace(JOB, parts=2))
    edit(model_file(run, 1), lambda model: model.update(optimizer=None))
    with pytest.raises(DisagreementError, match=r"mp_rank_01.*holds no optimizer's state"):
        streamshard.inspect(run)


@pytest.mark.parametrize("part", [0, 1])
def test_a_part_that_is_missing(part: int, tmp_path: Path) -> None:
    run = stage_0(tmp_path / "run", replace(JOB, parts=2))
    model_file(run, part).unlink()
    with pytest.raises(IncompleteError, match=r"model file is missing|one of 2 tensor or"):
        streamshard.inspect(run)


def test_a_count_of_ranks_that_is_none(tmp_path: Path) -> None:
    run = stage_0(tmp_path / "run", dp_world_size="many")
    with pytest.raises(CorruptFileError, match="'dp_world_size' is 'many', which is not a count"):
        streamshard.inspect(run)


def test_inspect_shows_what_is_there_and_what_is_not_told(run: Path) -> None:
    found = streamshard.inspect(run)
    assert (found.zero_stage, found.world_size, found.kind) == (0, JOB.world_size, "native")
    assert (found.deepspeed_version, found.global_steps) == ("0.19.8", 7)
    assert found.weights == len(JOB.shapes) + len(JOB.frozen)
    assert (found.groups, found.parameters, found.frozen) == ((), (), 0)
    with streamshard.open(run) as opened:
        assert opened["embed.weight"].kind == opened["old.weight"].kind == "weight"
        weight = opened["embed.weight"].module.torch()
        assert torch.equal(weight, load(model_file(run))["module"]["embed.weight"])


REFUSED: list[tuple[Callable[[Path, Path], object], type[Exception], str]] = [
    (
        lambda run, out: streamshard.repartition(run, out, world_size=2, zero_stage=3),
        UnsupportedError,
        "resume at stage 0, or begin at another stage",
    ),
    (
        lambda run, out: streamshard.export(run, out, format="universal"),
        UnsupportedError,
        "DeepSpeed loads it as it is on any count of ranks",
    ),
    (
        lambda run, out: streamshard.export(run, out, format="dcp", dtype="bf16"),
        UnsupportedError,
        "export the weights alone, as safetensors",
    ),
    (
        lambda run, out: streamshard.export(run, out, dtype="fp32"),
        UsageError,
        "export them with dtype=bf16",
    ),
    (
        lambda run, out: streamshard.export(run, out, dtype="bf16", frozen=False),
        UsageError,
        "frozen=False: .* name them with exclude=",
    ),
    (lambda run, out: streamshard.inspect(run, svg=out), UsageError, "nothing to draw"),
    (lambda run, out: streamshard.inspect(run, rank=0), UsageError, "params= shows where"),
    (
        lambda run, out: streamshard.repartition(
            write(replace(JOB, elastic=True), run.with_name("elastic")), out, world_size=2, like=run
        ),
        UsageError,
        "give a checkpoint of stage 1, 2 or 3 with like=",
    ),
]


@pytest.mark.parametrize(("ask", "error", "message"), REFUSED)
def test_what_it_does_not_tell_is_refused_with_what_to_do(
    ask: Callable[[Path, Path], object],
    error: type[Exception],
    message: str,
    run: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=message):
        ask(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_the_messages_advise_works(run: Path, tmp_path: Path) -> None:
    streamshard.export(run, tmp_path / "bf16", dtype="bf16", exclude=["old.*"], format="torch")
    exported = torch.load(tmp_path / "bf16" / "pytorch_model.bin")
    assert "old.weight" not in exported
    streamshard.export(run, tmp_path / "kept", keep_dtype=["*"])


def test_the_job_s_config_may_be_given(run: Path, tmp_path: Path) -> None:
    config = ds_config(replace(JOB, stage=0))
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({**config, "train_batch_size": 48}))
    streamshard.repartition(run, tmp_path / "out", world_size=OTHER, ds_config_file=path)
    written = load(model_file(tmp_path / "out"))["ds_config"]
    assert (written["train_batch_size"], written["zero_optimization"]["stage"]) == (48, 0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"zero_optimization": {"stage": 2}}, UnsupportedError, "resume at stage 0"),
        ({"bf16": {"enabled": False}}, UsageError, "keep the dtype"),
    ],
)
def test_a_config_of_another_kind_is_refused(
    change: dict[str, object], error: type[Exception], message: str, run: Path, tmp_path: Path
) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({**ds_config(replace(JOB, stage=0)), **change}))
    with pytest.raises(error, match=message):
        streamshard.repartition(run, tmp_path / "out", world_size=OTHER, ds_config_file=path)
