"""Universal checkpoints of ours load in real engines, and are what DeepSpeed's converter makes."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from tests.oracle.cases import ALIGNED, BF16, BF16_OPTIMIZER, FP16, ROUND_ROBIN, SUB_GROUPS
from tests.oracle.compare import differences
from tests.oracle.files import load_comparable
from tests.oracle.jobs import Resume, Train
from tests.oracle.models import Case, merged
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.truth import Truth
from tests.oracle.universal import universal_of
from tests.oracle.values import value_differences

SAVED_AT, LOADED_AT = 3, 2
AMSGRAD = Case(
    "z2-amsgrad", 2, "bf16",
    optimizer=partial(torch.optim.AdamW, amsgrad=True),
)  # fmt: skip
CASES = [*BF16, FP16[1], ROUND_ROBIN, ALIGNED, SUB_GROUPS, BF16_OPTIMIZER, AMSGRAD]
AS_DEEPSPEED = [*BF16, ALIGNED, SUB_GROUPS]
"""Those that DeepSpeed's own converter gets right: not round robin, nor amsgrad's third state."""


def universal(case: Case) -> Case:
    """The job that loads: it says in its config that a universal checkpoint is to be loaded.

    Not under round robin: DeepSpeed's loader then puts parameters into each other's places.
    """
    case = BF16[1] if case is ROUND_ROBIN else case
    overrides = merged(case.ds_overrides, {"checkpoint": {"load_universal": True}})
    return replace(case, name=f"{case.name}-universal", ds_overrides=overrides)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case trained, exported, and loaded at another world size."""
    root = tmp_path_factory.mktemp("universal")
    train = [Train(c, root / c.name, root / f"{c.name}.saved.pt") for c in CASES]
    require_success(run_jobs(SAVED_AT, train, root / "ranks"))
    for case in CASES:
        streamshard.export(
            root / case.name, root / f"{case.name}-out", format="universal", verify=True
        )
    load = [
        Resume(universal(c), root / f"{c.name}-out", root / f"{c.name}.loaded.pt") for c in CASES
    ]
    require_success(run_jobs(LOADED_AT, load, root / "ranks"))
    return root


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_engine_of_another_world_size_holds_what_was_saved(case: Case, loaded: Path) -> None:
    saved, found = (
        # Neither frozen weights nor buffers are restored from universal checkpoints.
        replace(Truth.load(loaded / f"{case.name}.{when}.pt"), frozen={}, buffers={})
        for when in ("saved", "loaded")
    )
    if case.zero_stage == 3:
        # All param groups get the hyper-parameters of the first.
        saved, found = replace(saved, groups=[]), replace(found, groups=[])
    if case is BF16_OPTIMIZER:
        saved, found = replace(saved, scaler={}), replace(found, scaler={})
    assert differences(saved, found) == []


@pytest.mark.parametrize("case", AS_DEEPSPEED, ids=lambda case: case.name)
def test_deepspeeds_converter_makes_the_same(case: Case, loaded: Path, tmp_path: Path) -> None:
    """Of the source as we do, and of files for other ranks as of the source."""
    tag = (loaded / case.name / "latest").read_text()
    theirs = universal_of(loaded / case.name, tmp_path / tag)
    ours = loaded / f"{case.name}-out" / tag
    latest = (tmp_path / "latest_universal").read_text()
    assert latest == (loaded / f"{case.name}-out" / "latest_universal").read_text()
    params = Truth.load(loaded / f"{case.name}.saved.pt").states["fp32"]
    for name in params:
        files = sorted(path.name for path in (theirs / "zero" / name).iterdir())
        assert files == sorted(path.name for path in (ours / "zero" / name).iterdir())
        for file in files:
            before, after = (read(place / "zero" / name / file) for place in (theirs, ours))
            assert list(value_differences(before, after, f"{name}/{file}")) == []
    if case in (BF16[1], SUB_GROUPS):
        out = tmp_path / "out"
        streamshard.repartition(loaded / case.name, out, world_size=LOADED_AT)
        of_out = universal_of(out, tmp_path / "of-out")
        for path in (theirs / "zero").glob("*/*.pt"):
            same = of_out / path.relative_to(theirs)
            assert list(value_differences(read(path), read(same), str(path))) == []
    models = sorted(path.name for path in theirs.glob("*model_states.pt"))
    assert models == sorted(path.name for path in ours.glob("*model_states.pt"))
    for file in models:
        before, after = load_comparable(theirs / file), load_comparable(ours / file)
        assert list(value_differences(before, after, file)) == []
    before, after = (read(place / "zero" / "optimizer_state.pt") for place in (theirs, ours))
    if case.zero_stage == 3:
        before, after = without_shards(before), without_shards(after)
    assert list(value_differences(before, after, "optimizer_state")) == []


def without_shards(state: dict[str, Any]) -> dict[str, Any]:
    """Leave out rank 0's shards, which DeepSpeed's converter leaves in, and no one reads."""
    inner = state["optimizer_state_dict"]
    steps = {unit: {"step": entry["step"]} for unit, entry in inner["state"].items()}
    return {**state, "fp32_flat_groups": [], "optimizer_state_dict": {**inner, "state": steps}}


def read(path: Path) -> Any:  # noqa: ANN401
    return torch.load(path, weights_only=False)
