"""Checkpoints taken to another world size load in DeepSpeed bit for bit, and training goes on."""

import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import streamshard
from streamshard.errors import UnsupportedError, UsageError
from tests.oracle.cases import (
    ALIGNED,
    BF16,
    BF16_OPTIMIZER,
    FIRST_LIGHT,
    FP16,
    ROUND_ROBIN,
    STAGE_0,
    Casting,
)
from tests.oracle.files import file_differences, padding_found
from tests.oracle.laws import *  # noqa: F403
from tests.oracle.models import Case
from tests.oracle.reshardings import Places, Resharding, carry
from tests.oracle.truth import Tensors
from tests.oracle.values import value_differences

RESHARDINGS = FIRST_LIGHT
OF_CASE = {one.case: one for one in FIRST_LIGHT}
SOURCES = [one for one in OF_CASE.values() if one.case not in STAGE_0[1:]]
"""Every case once. What stage 0 keeps in 16 bits has a test of its own."""
ARCHIVED = [BF16[2], FP16[1], ROUND_ROBIN, ALIGNED, BF16_OPTIMIZER]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """All of them done, and consolidated by DeepSpeed where it can."""
    return carry(FIRST_LIGHT, tmp_path_factory.mktemp("first-light"), consolidates=True)


def each(ones: list[Resharding]) -> pytest.MarkDecorator:
    """Ask about these alone."""
    return pytest.mark.parametrize("one", ones, ids=lambda one: one.name, indirect=True)


@each([one for one in FIRST_LIGHT if isinstance(one, Casting)])
def test_masters_are_cast(one: Resharding, places: Places) -> None:
    dtypes = [
        {tensor.dtype for tensors in truth.states.values() for tensor in tensors.values()}
        for truth in (places.saved(one), places.resumed(one))
    ]
    assert sorted(map(str, dtypes)) == ["{torch.bfloat16}", "{torch.float32}"]


def test_padding_below_stage_3_is_one_value(places: Places) -> None:
    flat = {places.source(one) for one in FIRST_LIGHT if one.case.zero_stage < 3}
    assert sum(map(padding_found, flat)) > 0


@each(list(OF_CASE.values()))
def test_verify_finds_nothing_wrong_and_no_difference(one: Resharding, places: Places) -> None:
    source, store = places.source(one), places.store(one)
    out, resaved = places.out(one), places.resaved(one)
    for path in (source, store, out, resaved):
        found = streamshard.verify(path)
        assert (found.problems, found.differences) == ((), ())
        assert found.checked > 20
    pairs = [(store, source)]
    if not isinstance(one, Casting):
        pairs += [(resaved, out)]
    if one.trains_alike:
        pairs += [(out, source), (resaved, store)]
    for path, other in pairs:
        found = streamshard.verify(path, against=other)
        assert (found.problems, found.differences) == ((), ())
        assert found.tensors > 20


@each([one for one in FIRST_LIGHT if one.consolidates])
def test_zero_to_fp32_agrees(one: Resharding, places: Places) -> None:
    source, out = (
        torch.load(places.merged_path(directory), weights_only=False)
        for directory in (places.source(one), places.out(one))
    )
    # Stage 1 keeps no list of the frozen weights, and they take on the dtype of the module.
    if one.case.zero_stage != one.resuming.zero_stage or not one.trains_alike:
        for name in places.resumed(one).frozen:
            for merged in (source, out):
                merged.pop(name, None)
    assert list(value_differences(source, out, "converted")) == []


def exported(source: Path, out: Path, dtype: str = "fp32") -> Tensors:
    """Export a checkpoint, and load the file with the library."""
    streamshard.export(source, out, dtype=dtype, verify=True)
    found: Tensors = safetensors.torch.load_file(out / "model.safetensors")
    return found


def wide(tensors: Tensors) -> Tensors:
    """Cast what is not a count to float32, as an export does."""
    return {n: t.detach().float() if t.is_floating_point() else t for n, t in tensors.items()}


@each(SOURCES)
def test_an_export_holds_what_the_engine_held(
    one: Resharding, places: Places, tmp_path: Path
) -> None:
    truth = places.saved(one)
    assert truth.frozen
    held = wide({**truth.states["fp32"], **truth.frozen, **truth.buffers})
    found = exported(places.source(one), tmp_path / "out")
    assert list(value_differences(held, found, "engine")) == []
    if one.consolidates:
        theirs = torch.load(places.merged_path(places.source(one)))
        # Tied weights are there twice, and those of stage 1 that are frozen are not.
        assert torch.equal(theirs.pop("head.weight"), theirs["embed.weight"])
        if one.case.zero_stage == 1:
            assert not truth.frozen.keys() & theirs.keys()
            theirs |= truth.frozen
        assert list(value_differences(wide(theirs), found, "zero_to_fp32")) == []


@each([OF_CASE[case] for case in STAGE_0])
def test_without_zero_it_stays_so_and_another_stage_begins_from_the_weights(
    one: Resharding, places: Places, tmp_path: Path
) -> None:
    """The message names `export`; in 16 bits it writes what the module holds, and no cast of it."""
    source, dtype = places.source(one), one.case.dtype
    message = r"saved without ZeRO \(stage 0\), whose optimizer numbers the parameters"
    with pytest.raises(UnsupportedError, match=message):
        streamshard.repartition(source, tmp_path / "out", world_size=3, zero_stage=2)
    if dtype != "fp32":
        with pytest.raises(UsageError, match=f"export them with dtype={dtype}"):
            streamshard.export(source, tmp_path / "wide")
    assert list(tmp_path.iterdir()) == []
    streamshard.export(source, tmp_path / "out", dtype=dtype, format="torch")
    found = torch.load(tmp_path / "out" / "pytorch_model.bin")
    (path,) = source.glob("*/mp_rank_00_model_states.pt")
    module = torch.load(path, weights_only=False)["module"]
    assert list(value_differences(dict(module), dict(found), "module")) == []


@pytest.mark.parametrize("case", ARCHIVED, ids=lambda case: case.name)
def test_an_archive_gives_the_files_back(case: Case, places: Places, tmp_path: Path) -> None:
    """When the original is gone; engines load such files."""
    saved, run, archive = places.source(OF_CASE[case]), tmp_path / "run", tmp_path / "archive"
    rebuilt = tmp_path / "rebuilt"
    tag, newer = (saved / "latest").read_text(), ("global_step8", "global_step9")
    shutil.copytree(saved, run)
    for later in newer:
        shutil.copytree(run / tag, run / later)
    (run / "latest").write_text(newer[-1])
    at_once: dict[str, Any] = {"min_age": timedelta(0), "grace": timedelta(0)}
    found = streamshard.compact(run, archive, keep_last=2, delete=True, **at_once)
    assert found.problems == ()
    found = streamshard.compact(run, archive, purge=[tag], grace=timedelta(0))
    assert found.tags[0].action == "purged"
    assert not list(run.glob(".streamshard.trash/**/*.pt"))
    assert {path.name for path in run.glob("global_step*")} == {*newer}
    streamshard.repartition(archive / f"{tag}.zarr", rebuilt)
    assert file_differences(saved / tag, rebuilt / tag) == []
    for path in saved.iterdir():
        assert path.is_dir() or path.read_bytes() == (rebuilt / path.name).read_bytes()
    assert {path.name for path in rebuilt.iterdir()} == {path.name for path in saved.iterdir()}
