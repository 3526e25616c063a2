"""Weights that a model file holds in two places: both are kept, or the file is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from streamshard.errors import SourceError
from tests.fabricated import edit, load, write
from tests.job import TAG, Job

Model = dict[str, Any]


def model_file(run: Path) -> Path:
    return sorted((run / TAG).glob("*model_states.pt"))[0]


def _other_fragment(model: Model) -> None:
    model["frozen_param_fragments"]["old.weight"] = model["module"]["old.weight"] + 1


def _other_part(model: Model) -> None:
    """Of a storage of the same bytes."""
    whole = torch.arange(20, dtype=torch.bfloat16)
    model["module"]["old.weight"] = whole[:15].view(5, 3)
    model["frozen_param_fragments"]["old.weight"] = whole.clone()[5:].view(5, 3)


def _not_in_a_row(model: Model) -> None:
    model["module"]["old.weight"] = model["module"]["old.weight"].t().contiguous().t()


def _no_module_weight(model: Model) -> None:
    del model["module"]["old.weight"]


def _frozen_buffer(model: Model) -> None:
    model["buffer_names"].append("old.weight")


def _weight_for_placeholder(model: Model) -> None:
    model["module"]["embed.weight"] = torch.ones(11, 4)


REFUSED: dict[str, tuple[int, Callable[[Model], None], str]] = {
    "other values": (2, _other_fragment, "'old.weight'.* with other values than 'module'"),
    "another part": (2, _other_part, "'old.weight'.* with other values than 'module'"),
    "not in a row": (2, _not_in_a_row, "'old.weight' is not stored as its elements in a row"),
    "not in the module": (2, _no_module_weight, "'old.weight'.*: it is not there"),
    "not in the module, cut": (3, _no_module_weight, "'old.weight'.*: it is not there|different"),
    "frozen and a buffer": (2, _frozen_buffer, "'old.weight'.*: it is a buffer"),
    "not a placeholder": (3, _weight_for_placeholder, "has 44 values of 'embed.weight'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_copies_that_differ_are_refused(name: str, tmp_path: Path) -> None:
    stage, change, message = REFUSED[name]
    run = write(Job(stage=stage), tmp_path / "run")
    edit(model_file(run), change)
    with pytest.raises(SourceError, match=message):
        streamshard.inspect(run)


@pytest.mark.parametrize("stage", [1, 2])
def test_names_listed_as_tied_are_kept_apart_where_values_differ(
    stage: int, tmp_path: Path
) -> None:
    run = write(Job(stage=stage), tmp_path / "run")

    def change(model: Model) -> None:
        model["module"]["head.weight"] = model["module"]["embed.weight"] + 1

    edit(model_file(run), change)
    streamshard.convert(run, tmp_path / "run.zarr")
    streamshard.repartition(run, tmp_path / "out", world_size=3, verify=True)
    streamshard.repartition(tmp_path / "run.zarr", tmp_path / "of-store", world_size=3)
    wanted = load(model_file(run))["module"]
    for out in (tmp_path / "out", tmp_path / "of-store"):
        found = load(model_file(out))
        for name in ("head.weight", "embed.weight"):
            assert torch.equal(found["module"][name], wanted[name])
        # As DeepSpeed has it, which lists below stage 3 whatever begins at one address.
        assert found["shared_params"] == {"head.weight": "embed.weight"}
        assert streamshard.verify(out, against=run).differences == ()


def test_tied_weights_that_were_saved_twice_stay_tied(tmp_path: Path) -> None:
    """Pipeline layers and whatever has experts are cloned before they are saved."""
    run = write(Job(), tmp_path / "run")

    def change(model: Model) -> None:
        model["module"]["head.weight"] = model["module"]["embed.weight"].clone()
        model["module"]["embed.weight"] = model["module"]["embed.weight"].clone()

    edit(model_file(run), change)
    assert streamshard.inspect(run).tied == {"head.weight": "embed.weight"}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_kept_beside_the_weights_comes_along(stage: int, tmp_path: Path) -> None:
    """A tie of what is not in the module, and a config that client state went over."""
    run = write(Job(stage=stage), tmp_path / "run")

    def change(model: Model) -> None:
        model["shared_params"]["tail.weight"] = "embed.weight"
        model["ds_config"] = {"mine": 1}

    edit(model_file(run), change)
    streamshard.convert(run, tmp_path / "run.zarr")
    for source in ("run", "run.zarr"):
        out = tmp_path / f"{source}-out"
        streamshard.repartition(tmp_path / source, out, world_size=3, verify=True)
        found = load(model_file(out))
        tied = {"tail.weight": "embed.weight", "head.weight": "embed.weight"}
        assert (found["shared_params"], found["ds_config"]) == (tied, {"mine": 1})
