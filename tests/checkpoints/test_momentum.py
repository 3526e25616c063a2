"""Muon's momentum at stages 1 and 2: whole parameters, on every rank that owns a part of them."""

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
    SourceError,
    UnsupportedError,
    UsageError,
)
from tests.fabricated import (
    DUMPS,
    edit,
    edit_all,
    load,
    optimizer_file,
    optimizer_state,
    wrapped,
    write,
    write_dumps,
)
from tests.job import MOMENTUM, MUON, TAG, Job

GROUPS = MUON.groups
_WIDER = (("wide", (9, 800)), *GROUPS[0][1:])
LONG = replace(MUON, groups=(_WIDER, *GROUPS[1:]))
"""Its first matrix is too large to be compared whole; all ranks hold it."""


def momentum(state: dict[str, Any]) -> torch.Tensor:
    found: torch.Tensor = wrapped(state)["state"][0][MOMENTUM]
    return found


def negated(state: dict[str, Any]) -> None:
    momentum(state)[-1].mul_(-1)


def shortened(state: dict[str, Any]) -> None:
    wrapped(state)["state"][0][MOMENTUM] = momentum(state)[:-1].clone()


def left_out(state: dict[str, Any]) -> None:
    wrapped(state)["state"].pop(0)


@pytest.mark.parametrize(
    ("job", "rank", "change", "kind", "message"),
    [
        (
            LONG,
            1,
            negated,
            DisagreementError,
            "{first}: disagrees with {path} about the momentum",
        ),
        (
            MUON,
            3,
            shortened,
            CorruptFileError,
            "{path}: momentum_buffer .* 35 elements on rank 3, 36 ",
        ),
        (MUON, 2, left_out, CorruptFileError, "{path}: .* 0 elements on rank 2, 102 belong"),
    ],
)
def test_copies_that_are_not_alike_and_whole_are_refused(
    tmp_path: Path,
    job: Job,
    rank: int,
    change: Callable[[dict[str, Any]], object],
    kind: type[SourceError],
    message: str,
) -> None:
    run = write(job, tmp_path / "run")
    path = optimizer_file(run, rank)
    edit(path, lambda held: change(held["optimizer_state_dict"]))
    with pytest.raises(kind, match=message.format(first=optimizer_file(run, 0), path=path)):
        streamshard.repartition(run, tmp_path / "out", world_size=2)


@pytest.mark.parametrize("offload", [False, True])
def test_a_config_that_says_the_other_way(tmp_path: Path, offload: bool) -> None:
    run = write(replace(MUON, offload=offload), tmp_path / "run")
    other = {"offload_optimizer": {"device": "none" if offload else "cpu"}}
    edit_all(
        run, "*_optim_states.pt", lambda held: held["ds_config"]["zero_optimization"].update(other)
    )
    with pytest.raises(CorruptFileError, match="offload_optimizer"):
        streamshard.repartition(run, tmp_path / "out", world_size=2)


def test_dumps_need_the_config_of_their_job(tmp_path: Path) -> None:
    template = write_dumps(write(MUON, tmp_path / "run"), tmp_path / "dumps")
    with pytest.raises(UnsupportedError, match=r"00\.pt: .*offload.*ds_config = "):
        streamshard.convert(template, tmp_path / "out.zarr")
    config = tmp_path / "ds.json"
    config.write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
    out = tmp_path / "out" / DUMPS
    streamshard.repartition(template, out, world_size=2, facts={"source": {"ds_config": config}})
    wanted = write(replace(MUON, world_size=2), tmp_path / "wanted")
    for rank in range(2):
        ours = load(Path(str(out).format(rank=rank)))
        assert torch.equal(momentum(ours), momentum(optimizer_state(wanted, rank)))


def test_dumps_of_stage_3_need_their_order(tmp_path: Path) -> None:
    run = write(replace(MUON, stage=3), tmp_path / "run")
    template = write_dumps(run, tmp_path / "dumps")
    like = write(MUON, tmp_path / "like")
    with pytest.raises(UnsupportedError, match=r"00\.pt: .*Muon.*stage 3 with like="):
        streamshard.inspect(template, like=like)
    like = write(replace(MUON, stage=3, world_size=1), tmp_path / "like-3")
    assert streamshard.inspect(template, like=like).groups[0].parameters == len(GROUPS[0])


SCRIPT_ORDER = (tuple(GROUPS[0][index] for index in (3, 1, 0, 2)), *GROUPS[1:])
"""How the training script passes the parameters, before Muon sorts them."""
STAGE_3 = replace(MUON, stage=3, groups=SCRIPT_ORDER)


def order(run_dir: Path, stage: int) -> list[str]:
    """Names of the first group's parameters as a model file lists them."""
    name = "zero_pp_rank_0_mp_rank_00" if stage == 3 else "mp_rank_00"
    return list(load(run_dir / TAG / f"{name}_model_states.pt")["param_shapes"][0])


def test_stages_1_and_2_have_parameters_sorted_by_size(tmp_path: Path) -> None:
    run = write(STAGE_3, tmp_path / "run")
    streamshard.repartition(run, tmp_path / "out", world_size=2, zero_stage=2)
    assert order(tmp_path / "out", 2) == ["wide", "up.0", "up.1", "down"]
    wholes = [MUON.values(MOMENTUM, name).flatten() for name, _ in GROUPS[0]]
    state = optimizer_state(tmp_path / "out", 1)
    assert torch.equal(momentum(state), torch.cat(wholes).bfloat16())


def test_the_order_of_stage_3_is_that_of_a_reference_and_never_guessed(tmp_path: Path) -> None:
    run, store, out = write(MUON, tmp_path / "run"), tmp_path / "run.zarr", tmp_path / "out"
    streamshard.convert(run, store)
    for source in (run, store):
        with pytest.raises(UnsupportedError, match=r"Muon.*zero\.Init.*like="):
            streamshard.repartition(source, out, world_size=2, zero_stage=3)
    like = write(replace(STAGE_3, world_size=1), tmp_path / "like")
    streamshard.repartition(store, out, world_size=2, zero_stage=3, like=like)
    assert order(out, 3) == [name for name, _ in SCRIPT_ORDER[0]]
    streamshard.repartition(out, tmp_path / "back", world_size=4, zero_stage=2)
    assert order(tmp_path / "back", 2) == order(run, 2)
    for rank in range(4):
        states = optimizer_state(tmp_path / "back", rank), optimizer_state(run, rank)
        assert torch.equal(*map(momentum, states))


@pytest.mark.parametrize(
    ("like", "kind", "message"),
    [
        (MUON, UnsupportedError, "like="),
        (
            replace(STAGE_3, groups=(GROUPS[0][:-1], *GROUPS[1:])),
            DisagreementError,
            "not of the sa",
        ),
    ],
)
def test_a_reference_must_be_of_stage_3_and_of_the_job(
    tmp_path: Path, like: Job, kind: type[SourceError], message: str
) -> None:
    run, other = write(MUON, tmp_path / "run"), write(like, tmp_path / "like")
    with pytest.raises(kind, match=message):
        streamshard.repartition(run, tmp_path / "out", world_size=2, zero_stage=3, like=other)


def test_one_size_of_parameters_has_one_order(tmp_path: Path) -> None:
    run = write(replace(MUON, groups=(GROUPS[0][1:3], *GROUPS[1:])), tmp_path / "run")
    streamshard.repartition(run, tmp_path / "out", world_size=2, zero_stage=3)
    assert order(tmp_path / "out", 3) == ["up.0", "up.1"]
    with pytest.raises(UsageError, match="leave like= out"):
        streamshard.repartition(run, tmp_path / "again", world_size=2, zero_stage=3, like=run)
