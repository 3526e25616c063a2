"""`verify --health`: which numbers the tensors of every kind of checkpoint hold."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamshard
from streamshard.errors import UsageError
from tests.cli.conftest import in_process as program
from tests.fabricated import edit, wrapped, write
from tests.verify.conftest import KINDS, SMALL, TINY, Of


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_of_floats_is_measured(made: Of, kind: str) -> None:
    """Padding is not: in memory it was whatever lay there."""
    path = made(kind)
    found = streamshard.verify(path, health=True)
    assert found.is_good
    with streamshard.open(path) as opened:
        for name in opened:
            states = {} if opened[name].tied_to else opened[name].states
            for state, tensor in states.items():
                values = np.asarray(tensor).astype(np.float64)
                health = found.health[f"state/{state}/{name}"]
                assert health.numel == values.size
                assert health.largest == np.abs(values).max()
                assert health.rms == pytest.approx(np.sqrt((values**2).mean()), rel=1e-5)
    assert not any("blob" in name for name in found.health)


@pytest.mark.parametrize(("stage", "value"), [(1, math.nan), (2, math.inf), (3, -math.inf)])
def test_one_number_that_is_none_is_a_problem(tmp_path: Path, stage: int, value: float) -> None:
    run = write(replace(SMALL, stage=stage), tmp_path / "run")
    assert streamshard.verify(run, health=True).is_good
    poison(run, "exp_avg_sq", value)
    assert streamshard.verify(run).is_good
    found = streamshard.verify(run, health=True)
    (problem,) = found.problems
    what = "1 NaN" if math.isnan(value) else "1 infinite"
    assert (problem.kind, what in problem.message) == ("unhealthy", True)
    assert "/exp_avg_sq/" in problem.message
    done = program("verify", run, "--health")
    assert done.code == 6
    assert what in done.out


def poison(run: Path, state: str, value: float) -> None:
    """Put a value into one element of an optimizer's state of the first rank."""

    def change(content: dict[str, Any]) -> None:
        wrapped(content["optimizer_state_dict"])["state"][0][state].view(-1)[1] = value

    edit(sorted(run.rglob("*optim_states.pt"))[0], change)


def test_the_table_and_the_document_hold_it(made: Of) -> None:
    shown = program("verify", made("native-2"), "--health", "-v").out
    assert "infinite  zero  largest" in shown.replace("   ", "  ")
    document = json.loads(program("verify", made("native-2"), "--health", "--json").out)
    assert document["health"]["state/fp32/w"].keys() == {
        "numel", "nans", "infinities", "zeros", "largest", "rms",
    }  # fmt: skip


def test_it_is_not_asked_of_a_comparison(made: Of) -> None:
    with pytest.raises(UsageError, match="not computed of tensors that are compared"):
        streamshard.verify(made("native-1"), against=made("native-2"), health=True)


def test_second_moments_that_stayed_zero_are_told(tmp_path: Path) -> None:
    run = write(TINY, tmp_path / "run")

    def zero(content: dict[str, Any]) -> None:
        for group in wrapped(content["optimizer_state_dict"])["state"].values():
            group["exp_avg_sq"].zero_()

    assert not any("are zero" in note for note in streamshard.verify(run, health=True).notes)
    for path in run.rglob("*optim_states.pt"):
        edit(path, zero)
    found = streamshard.verify(run, health=True)
    assert found.is_good
    assert any("All second moments (exp_avg_sq) are zero" in note for note in found.notes)
