"""Exported weights are what DeepSpeed consolidates itself, and what the engines held."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

import streamshard
from tests.oracle.cases import (
    BF16,
    BF16_OPTIMIZER,
    FIRST_LIGHT,
    LEGACY,
    STAGE_0,
    Resharding,
)
from tests.oracle.conftest import Places
from tests.oracle.models import Case
from tests.oracle.truth import Tensors, Truth

SOURCES: dict[str, tuple[Case, int]] = {
    f"{one.case.name}-of-{one.source}": (one.case, one.source)
    for one in FIRST_LIGHT
    if one.case not in STAGE_0[1:]
}
"""Every case as it was saved at every world size. `test_stage_0` has what stage 0 keeps in 16 bits,
where no file tells which master weights are whose."""


def exported(source: Path, out: Path, dtype: str = "fp32") -> Tensors:
    """Export a checkpoint, and load the file with the library."""
    streamshard.export(source, out, dtype=dtype, verify=True)
    found: Tensors = safetensors.torch.load_file(out / "model.safetensors")
    return found


def wide(tensors: Tensors) -> Tensors:
    """Cast what is not a count to float32, as an export does."""
    return {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}


def same(found: Tensors, wanted: Tensors) -> None:
    """Compare names, dtypes, shapes and bits."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        bits = [one.reshape(-1).view(torch.uint8) for one in (found[name], tensor.contiguous())]
        assert torch.equal(*bits), name


@pytest.mark.parametrize("name", SOURCES)
def test_it_holds_what_the_engine_held(name: str, light: Places, tmp_path: Path) -> None:
    source = light.source(*SOURCES[name])
    truth = Truth.load(light.truth_path(source))
    assert truth.frozen
    wanted = wide({**truth.states["fp32"], **truth.frozen, **truth.buffers})
    same(exported(source, tmp_path / "out"), wanted)


@pytest.mark.parametrize(
    "name",
    [n for n, (case, _) in SOURCES.items() if case not in (BF16_OPTIMIZER, *LEGACY, *STAGE_0)],
)
def test_it_holds_what_zero_to_fp32_makes(name: str, light: Places, tmp_path: Path) -> None:
    source = light.source(*SOURCES[name])
    theirs = torch.load(light.merged_path(source))
    # Tied weights are there twice, and those of stage 1 that are frozen are not.
    assert torch.equal(theirs.pop("head.weight"), theirs["embed.weight"])
    frozen = Truth.load(light.truth_path(source)).frozen.keys()
    found = exported(source, tmp_path / "out")
    if SOURCES[name][0].zero_stage == 1:
        assert not frozen & theirs.keys()
        found = {key: tensor for key, tensor in found.items() if key not in frozen}
    same(found, wide(theirs))


@pytest.mark.parametrize("one", FIRST_LIGHT[:15:5], ids=lambda one: one.name, indirect=True)
def test_of_a_store_and_of_another_world_size_it_is_the_same(
    one: Resharding, light: Places, tmp_path: Path
) -> None:
    roads = [light.source(one.case, one.source), light.store(one), light.out(one)]
    made = []
    for number, road in enumerate(roads):
        exported(road, tmp_path / str(number), dtype="bf16")
        made.append((tmp_path / str(number) / "model.safetensors").read_bytes())
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize("case", BF16[:2], ids=lambda case: case.name)
def test_in_the_modules_dtype_it_is_what_the_module_held(
    case: Case, light: Places, tmp_path: Path
) -> None:
    source = light.source(case, 4)
    truth = Truth.load(light.truth_path(source))
    found = exported(source, tmp_path / "out", dtype="bf16")
    for name, weight in {**truth.weights, **truth.frozen}.items():
        assert torch.equal(found[name], weight), name
