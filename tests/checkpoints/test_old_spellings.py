"""What older DeepSpeeds spelled in other ways is read as it was meant, or refused by name.

Real engines of two older versions are asked in `tests/oracle`; here is one spelling at a time, also
of versions that are not.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from streamshard.errors import (
    CorruptFileError,
    DisagreementError,
    IncompleteError,
    SourceError,
    UnsupportedError,
)
from tests.cli.conftest import tree
from tests.comparing import both_roads, compare
from tests.fabricated import load, write
from tests.job import TAG, Job, ZeroStageEnum, old_fragment_address, stand_ins
from tests.oracle.values import value_differences

Content = dict[str, Any]
Edit = Callable[[Job, int, Content], None]
"""Gets the job, the rank and what its file holds, and changes that."""


def respell(job: Job, run_dir: Path, edit: Edit) -> Path:
    """Save a job as it was once spelled; returns the run directory."""
    write(job, run_dir)
    for path in (run_dir / TAG).iterdir():
        content = load(path)
        _, _, rank = path.name.partition("zero_pp_rank_")
        edit(job, int(rank.partition("_")[0] or 0), content)
        with stand_ins():
            torch.save(content, path)
    return run_dir


def without(*keys: str) -> Edit:
    """Leave out what came only later, whichever file it is in."""

    def edit(job: Job, rank: int, content: Content) -> None:
        for key in keys:
            content.pop(key, None)
            content.get("optimizer_state_dict", {}).pop(key, None)

    return edit


OF_0_9_0 = without("frozen_param_shapes", "frozen_param_fragments", "shared_params")


def count_padding_last(job: Job, rank: int, content: Content) -> None:
    """Before 0.16.4: all padding is the last rank's, however little of it that rank holds."""
    if "optimizer_state_dict" not in content:
        return
    state = content["optimizer_state_dict"]
    for group, shapes in enumerate(job.groups):
        moments = state["base_optimizer_state"]["state"][group]["exp_avg"]
        numel = moments.numel()
        total = numel * job.world_size - sum(prod(shape) for _, shape in shapes)
        padding = total if rank == job.world_size - 1 else 0
        master = torch.zeros(numel)
        lean = state["single_partition_of_fp32_groups"][group].detach()
        master[: lean.numel()] = lean
        state["single_partition_of_fp32_groups"][group] = (
            master[: numel - padding].clone().requires_grad_()
        )
        state["group_paddings"][group] = padding


def as_bf16_optimizer(job: Job, rank: int, content: Content) -> None:
    """Before 0.17.6 at stage 0 in bf16: everything with its padding, and little else."""
    content["ds_config"]["zero_optimization"]["stage"] = 0
    count_padding_last(job, rank, content)
    if "optimizer_state_dict" not in content:
        return
    state = content["optimizer_state_dict"]
    for group, master in enumerate(state["single_partition_of_fp32_groups"]):
        whole = torch.zeros_like(state["base_optimizer_state"]["state"][group]["exp_avg"])
        whole[: master.numel()] = master.detach()
        state["single_partition_of_fp32_groups"][group] = whole.requires_grad_()
    for key in ("loss_scaler", "dynamic_loss_scale", "overflow", "zero_stage"):
        del state[key]
    del state["param_alignment_paddings"]


def name_stage_by_number(job: Job, rank: int, content: Content) -> None:
    """Before 0.7.0."""
    if "optimizer_state_dict" in content:
        content["optimizer_state_dict"]["zero_stage"] = job.stage


def move_fragment_address(job: Job, rank: int, content: Content) -> None:
    """Until 0.7.3 the class was at another place."""
    for mapping in content.get("optimizer_state_dict", {}).get("param_slice_mappings", ()):
        for name, at in mapping.items():
            mapping[name] = old_fragment_address(numel=at.numel, start=at.start)


def name_sparse_modules(job: Job, rank: int, content: Content) -> None:
    """Until 0.19.6, in a set, which every process orders in its own way."""
    if "module" in content:
        found = ["embed", "head", "other.embed"]
        content["sparse_tensor_module_names"] = set(found[rank:] + found[:rank])


def unchanged(job: Job, rank: int, content: Content) -> None:
    """Spell it as today."""


READ = {
    "padding-counted-last": (Job(stage=2, world_size=7), count_padding_last, unchanged),
    "no-slice-mappings": (Job(stage=1), without("param_slice_mappings"), None),
    "no-alignment-paddings": (Job(stage=2), without("param_alignment_paddings"), None),
    **{f"stage-{n}-by-number": (Job(stage=n), name_stage_by_number, None) for n in (1, 3)},
    "moved-class": (Job(stage=2), move_fragment_address, unchanged),
    "sparse-modules": (Job(stage=3, world_size=3), name_sparse_modules, None),
    "stage-2-of-0.9.0": (Job(stage=2), OF_0_9_0, None),
    "stage-3-of-0.9.0": (Job(stage=3, frozen=(), tied={}), OF_0_9_0, None),
    "stage-0-of-bf16": (Job(stage=1, world_size=4), as_bf16_optimizer, None),
}
"""Job, how it was spelled, and how the same is written: None for as it was."""


@pytest.mark.parametrize("case", READ)
def test_read_and_written_as_it_was_meant(case: str, tmp_path: Path) -> None:
    job, edit, serialized = READ[case]
    source = respell(job, tmp_path / "source", edit)
    target = replace(job, world_size=3, garbage=False)
    wanted = respell(target, tmp_path / "wanted", serialized or edit)
    for out in both_roads(source, world_size=3):
        compare(out / TAG, wanted / TAG)


def test_what_0_9_0_did_not_list_is_listed_at_stage_3(tmp_path: Path) -> None:
    job = Job(stage=1, sub_group_size=20)
    source = respell(job, tmp_path / "source", OF_0_9_0)
    wanted = write(replace(job, stage=3, world_size=3, garbage=False), tmp_path / "wanted")
    streamshard.repartition(source, tmp_path / "found", world_size=3, zero_stage=3)
    for path in (wanted / TAG).glob("*model_states.pt"):
        found = load(tmp_path / "found" / TAG / path.name)
        assert list(value_differences(found, load(path), path.name)) == []  # in any order


@pytest.mark.parametrize(
    ("dtype", "today", "once"),
    [
        pytest.param(torch.bfloat16, "_optim", "optim", id="before 0.3.14"),
        pytest.param(torch.float16, "zero_pp", "fp16_zero_pp", id="with the other prefix"),
    ],
)
def test_old_file_names(dtype: torch.dtype, today: str, once: str, tmp_path: Path) -> None:
    source = write(Job(dtype=dtype), tmp_path / "source")
    streamshard.repartition(source, tmp_path / "wanted", world_size=3)
    for path in (source / TAG).glob("*optim_states.pt"):
        path.rename(path.with_name(path.name.replace(today, once)))
    streamshard.repartition(source, tmp_path / "found", world_size=3)
    assert tree(tmp_path / "found") == tree(tmp_path / "wanted")


def test_both_spellings_of_one_rank_are_refused(tmp_path: Path) -> None:
    source = write(Job(), tmp_path / "source")
    path = next((source / TAG).glob("*rank_0*optim_states.pt"))
    shutil.copy(path, path.with_name(path.name.replace("_optim", "optim")))
    with pytest.raises(IncompleteError, match="claims to be of one rank with"):
        streamshard.repartition(source, tmp_path / "out", world_size=3)


def test_stage_0_keeps_its_stage_unless_told_otherwise(tmp_path: Path) -> None:
    source = respell(Job(stage=1, world_size=4), tmp_path / "source", as_bf16_optimizer)
    report = streamshard.repartition(source, tmp_path / "as-saved", world_size=3)
    assert "DeepSpeed before 0.17.6" in report.notes[0]
    assert "zero_stage=" in report.notes[0]
    config = tmp_path / "config.json"
    config.write_text(json.dumps(load(next((source / TAG).glob("*model_states.pt")))["ds_config"]))
    again = tmp_path / "of-config"
    report = streamshard.repartition(source, again, world_size=3, ds_config_file=config)
    assert "DeepSpeed before 0.17.6" in report.notes[0]
    compare(again / TAG, tmp_path / "as-saved" / TAG)
    report = streamshard.repartition(source, tmp_path / "stage-1", world_size=3, zero_stage=1)
    assert "0.17.6" not in report.notes[0]
    wanted = write(Job(stage=1, world_size=3), tmp_path / "wanted")
    compare(tmp_path / "stage-1" / TAG, wanted / TAG)


def count_one_too_many(job: Job, rank: int, content: Content) -> None:
    """A count of padding that no version made."""
    count_padding_last(job, rank, content)
    if rank == 1 and "optimizer_state_dict" in content:
        content["optimizer_state_dict"]["group_paddings"][0] += 1


AGAIN = "Load it with a later version"
REFUSED: dict[str, tuple[Job, Edit, type[SourceError], str]] = {
    "stage-2-of-0.6": (Job(stage=2), without("group_paddings"), UnsupportedError, AGAIN),
    "no-shapes": (Job(), without("param_shapes"), UnsupportedError, f"0.6. {AGAIN}"),
    "no-buffer-names": (Job(), without("buffer_names"), CorruptFileError, "'buffer_names'"),
    "frozen-at-stage-3-of-0.9.0": (
        Job(stage=3, tied={}),
        OF_0_9_0,
        UnsupportedError,
        f"'old.weight' .* before DeepSpeed 0.9.2. {AGAIN}",
    ),
    "tied-at-stage-3-of-0.9.1": (
        Job(stage=3),
        without("shared_params"),
        UnsupportedError,
        f"'head.weight' .* before DeepSpeed 0.9.2. {AGAIN}",
    ),
    "padding-counted-as-never": (
        Job(world_size=4),
        count_one_too_many,
        DisagreementError,
        "its group_paddings are not those",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_file_and_the_reason(case: str, tmp_path: Path) -> None:
    job, edit, error, message = REFUSED[case]
    source = respell(job, tmp_path / "source", edit)
    with pytest.raises(error, match=rf"{TAG}.*_states\.pt: .*{message}"):
        streamshard.repartition(source, tmp_path / "out", world_size=3)
    assert not (tmp_path / "out").exists()


def test_a_stage_by_its_name_comes_back_from_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first releases of Python 3.11 pickled members of enums so, and others by their value."""
    by_value = write(Job(), tmp_path / "by-value")
    monkeypatch.setattr(ZeroStageEnum, "__reduce_ex__", by_name)
    run = write(Job(), tmp_path / "run")
    assert streamshard.diff(run, by_value).is_equal
    streamshard.convert(run, tmp_path / "run.zarr")
    for stage, name in ((2, b"gradients"), (3, b"weights")):
        out = tmp_path / f"stage{stage}"
        streamshard.repartition(tmp_path / "run.zarr", out, world_size=2, zero_stage=stage)
        (shard, *_) = sorted(out.glob("*/*optim_states.pt"))
        assert name in shard.read_bytes()
        assert streamshard.inspect(out).zero_stage == stage


def by_name(member: ZeroStageEnum, protocol: object) -> tuple[object, ...]:
    return getattr, (ZeroStageEnum, member.name)


def test_a_stage_that_the_enum_has_not_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unheard_of(member: ZeroStageEnum, protocol: object) -> tuple[object, ...]:
        return getattr, (ZeroStageEnum, "activations")

    monkeypatch.setattr(ZeroStageEnum, "__reduce_ex__", unheard_of)
    write(Job(stage=2), tmp_path / "run")
    with pytest.raises(UnsupportedError, match=r"ZeRO stage <.*getattr> is not known"):
        streamshard.inspect(tmp_path / "run")
