"""What DeepSpeed saves without ZeRO: carried whole to any count of ranks, by every verb."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import streamshard
from streamshard.errors import (
    CorruptFileError,
    DisagreementError,
    IncompleteError,
    StreamshardError,
    UnsupportedError,
    UsageError,
)
from tests.fabricated import DUMPS, client_state, edit, load, save, without_zero, write, write_dumps
from tests.job import TAG, Job, ds_config
from tests.oracle.values import value_differences

JOB = Job(stage=1, world_size=4, client_state=client_state())
PARTS = replace(JOB, parts=2)
OTHER = 3


def model_file(run: Path, part: int = 0) -> Path:
    return run / TAG / f"mp_rank_{part:02d}_model_states.pt"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return without_zero(write(JOB, tmp_path / "run"))


@pytest.mark.parametrize("job", [JOB, PARTS], ids=["one-part", "two-parts"])
def test_all_but_the_count_of_ranks_stays(tmp_path: Path, job: Job) -> None:
    run, out = without_zero(write(job, tmp_path / "run")), tmp_path / "out"
    report = streamshard.repartition(run, out, world_size=OTHER * job.parts, verify=True)
    assert (report.zero_stage, report.source_world_size) == (0, 4 * job.parts)
    assert any("dp_world_size alone is another" in note for note in report.notes)
    assert (out / "zero_to_fp32.py").is_file()
    for part in range(job.parts):
        before, after = (load(model_file(place, part)) for place in (run, out))
        assert (before.pop("dp_world_size"), after.pop("dp_world_size")) == (4, OTHER)
        assert list(value_differences(before, after, "model")) == []


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


def test_weights_beside_its_file_do_not_hide_it(run: Path) -> None:
    save_file({"a": torch.ones(2)}, run / TAG / "model.safetensors")
    for given in (run / TAG, run):
        assert streamshard.inspect(given).zero_stage == 0


# What is not whole --------------------------------------------------------------------------------


def with_experts(place: Path) -> Path:
    run = without_zero(write(JOB, place), optimizer=None)
    for rank in range(2):
        save({"optimizer": {}}, run / TAG / f"expp_rank_{rank}_mp_rank_00_optim_states.pt")
    return run


def without_part(part: int) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        run = without_zero(write(PARTS, place))
        model_file(run, part).unlink()
        return run

    return make


def without_optimizer_in_part(place: Path) -> Path:
    run = without_zero(write(PARTS, place))
    edit(model_file(run, 1), lambda model: model.update(optimizer=None))
    return run


def with_changes(**changes: object) -> Callable[[Path], Path]:
    return lambda place: without_zero(write(JOB, place), **changes)


def lost(job: Job) -> Callable[[Path], Path]:
    """Lose the optimizer files of a job with ZeRO."""

    def make(place: Path) -> Path:
        for path in (write(job, place) / TAG).glob("*_optim_states.pt"):
            path.unlink()
        return place

    return make


OPTIMIZER: dict[str, Any] = {"optimizer": {"state": {}}}
"""Something that a user keeps under a name of DeepSpeed's."""
COPY = r"no \*_optim_states.pt file.*copy them"
LOST_PART = r"model file is missing|one of 2 tensor or"
BROKEN: list[tuple[Callable[[Path], Path], type[StreamshardError], str]] = [
    (lost(Job(stage=3)), IncompleteError, COPY),
    *(
        (lost(Job(stage=stage, client_state=OPTIMIZER)), IncompleteError, COPY)
        for stage in (1, 2, 3)
    ),
    # Before 0.17.6 the optimizer was in files; then, in bf16, in none for a while.
    *(
        (with_changes(optimizer=None, ds_version=version), IncompleteError, COPY)
        for version in ("0.17.5", "0.9.0", "0.14.5+cpu")
    ),
    (
        with_changes(optimizer=None, ds_version="0.18.2"),
        UnsupportedError,
        r"no optimizer's state is in it.*0\.17\.6 to 0\.18\.4.*load_optimizer_states=False",
    ),
    (
        with_experts,
        UnsupportedError,
        r"Load it as it is, with engine\.load_checkpoint\(\), on any multiple of the expert-para",
    ),
    (
        with_changes(ds_autoep_layers=[{"ep_size": 2}], folding={"tp_size": 2}),
        UnsupportedError,
        r"'folding' says so: trained with AutoEP .*AutoTP.*load_checkpoint on",
    ),
    *((without_part(part), IncompleteError, LOST_PART) for part in range(2)),
    (without_optimizer_in_part, DisagreementError, r"mp_rank_01.*holds no optimizer's state"),
    (with_changes(dp_world_size="many"), CorruptFileError, "is 'many', which is not a count"),
]


@pytest.mark.parametrize(("make", "kind", "message"), BROKEN)
def test_what_is_not_whole_is_refused(
    make: Callable[[Path], Path], kind: type[StreamshardError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        streamshard.inspect(make(tmp_path / "run"))


# What it does not tell ----------------------------------------------------------------------------


def dumps_like(run: Path, out: Path) -> object:
    dumps = write_dumps(write(replace(JOB, stage=3), run.with_name("cut")), run.with_name("dumps"))
    return streamshard.repartition(dumps, out / DUMPS, world_size=2, like=run)


def with_config(**changes: object) -> Callable[[Path, Path], object]:
    def ask(run: Path, out: Path) -> object:
        path = run.with_name("ds_config.json")
        path.write_text(json.dumps({**ds_config(replace(JOB, stage=0)), **changes}))
        return streamshard.repartition(run, out, world_size=OTHER, ds_config_file=path)

    return ask


def exported(**options: Any) -> Callable[[Path, Path], object]:  # noqa: ANN401
    return lambda run, out: streamshard.export(run, out, **options)


REFUSED: list[tuple[Callable[[Path, Path], object], type[Exception], str]] = [
    (
        lambda run, out: streamshard.repartition(run, out, world_size=2, zero_stage=3),
        UnsupportedError,
        "resume at stage 0, or begin at another stage",
    ),
    (exported(format="universal"), UnsupportedError, "loads it as it is on any count of ranks"),
    (exported(format="dcp", dtype="bf16"), UnsupportedError, "the weights alone, as safetensors"),
    (exported(dtype="fp32"), UsageError, "export them with dtype=bf16"),
    (lambda run, out: streamshard.inspect(run, html=out), UsageError, "nothing to draw"),
    (lambda run, out: streamshard.inspect(run, rank=0), UsageError, "params= shows where"),
    (dumps_like, UsageError, "give a checkpoint of stage 1, 2 or 3 with like="),
    (with_config(zero_optimization={"stage": 2}), UnsupportedError, "resume at stage 0"),
    (with_config(bf16={"enabled": False}), UsageError, "keep the dtype"),
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


def test_the_job_s_config_may_be_given(run: Path, tmp_path: Path) -> None:
    with_config(train_batch_size=48)(run, tmp_path / "out")
    written = load(model_file(tmp_path / "out"))["ds_config"]
    assert (written["train_batch_size"], written["zero_optimization"]["stage"]) == (48, 0)
