"""Checkpoints of DeepSpeed's engines go on in PyTorch: plain AdamW, FSDP2, torchtitan, Accelerate.

All engines train in one start of the ranks, and each world size that loads is started once.
"""

from pathlib import Path

import pytest
import torch

import streamshard
from tests.oracle import fsdp_loading
from tests.oracle.cases import BF16, FP32, SUB_GROUPS
from tests.oracle.compare import relative_distance
from tests.oracle.fsdp_loading import Held, LoadDcp, Loader
from tests.oracle.jobs import Train, after_path
from tests.oracle.models import Case
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.truth import Truth
from tests.oracle.values import value_differences

SAVED_AT, STEPS, FURTHER = 2, 3, 5
CASES = [FP32[1], FP32[2], BF16[1], BF16[2], SUB_GROUPS]
LAYOUTS: dict[Loader, str] = {
    "nested": "torch", "flattened": "torch", "titan": "titan", "accelerate": "accelerate",
}  # fmt: skip
LOADS: list[tuple[Case, Loader, int]] = [
    (FP32[1], "nested", 1),
    (BF16[2], "flattened", 1),
    (FP32[1], "nested", 2),
    (FP32[2], "flattened", 3),
    (FP32[2], "titan", 2),
    (BF16[1], "titan", 3),
    (FP32[1], "accelerate", 3),
    (BF16[2], "accelerate", 2),
    (SUB_GROUPS, "nested", 3),
]
"""Each stage, layout and way to load; one rank loads without FSDP."""
TOLERANCE = 1e-4
"""How far from the uninterrupted run, as a share of the movement since the save.

Measured at most: 5.2e-6. Other numbers of ranks add the same gradients up in another order.
"""


def name_of(one: tuple[Case, Loader, int]) -> str:
    case, loader, ranks = one
    return f"{case.name}-{loader}-{ranks}"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case trained, exported in every layout, and loaded."""
    root = tmp_path_factory.mktemp("dcp")
    train = [
        Train(c, root / c.name, root / f"{c.name}.saved.pt", steps=STEPS, further_steps=FURTHER)
        for c in CASES
    ]
    require_success(run_jobs(SAVED_AT, train, root / "ranks"))
    for case in CASES:
        for layout in sorted(set(LAYOUTS.values())):
            streamshard.export(
                root / case.name, root / f"{case.name}-{layout}",
                format="dcp", layout=layout, verify=True,
            )  # fmt: skip
    for ranks in (1, 2, 3):
        load = [
            LoadDcp(
                one[0],
                root / f"{one[0].name}-{LAYOUTS[one[1]]}",
                one[1],
                root / f"{name_of(one)}.held.pt",
                further_steps=FURTHER if one[0].dtype == "fp32" else 0,
                is_sharded=ranks > 1,
            )
            for one in LOADS
            if one[2] == ranks
        ]
        require_success(run_jobs(ranks, load, root / "ranks", do=fsdp_loading.run))
    return root


@pytest.mark.parametrize("one", LOADS, ids=name_of)
def test_all_that_was_trained_is_there_bit_for_bit(
    one: tuple[Case, Loader, int], root: Path
) -> None:
    saved = Truth.load(root / f"{one[0].name}.saved.pt")
    held = Held.load(root / f"{name_of(one)}.held.pt")
    weights = {**saved.states["fp32"], **_wide(saved.frozen), **_wide(saved.buffers)}
    weights["head.weight"] = weights["embed.weight"]
    assert list(value_differences(weights, dict(held.weights), "weights")) == []
    for state in saved.states.keys() - {"fp32"}:
        assert list(value_differences(saved.states[state], held.states[state], state)) == []
    assert held.states.keys() == {*saved.states, "step"} - {"fp32"}
    assert {float(step) for step in held.states["step"].values()} == {float(STEPS)}
    assert {(step.dtype, step.dim()) for step in held.states["step"].values()} == {
        (torch.float32, 0)
    }


@pytest.mark.parametrize("one", LOADS, ids=name_of)
def test_param_groups_are_those_that_were_saved(one: tuple[Case, Loader, int], root: Path) -> None:
    saved = Truth.load(root / f"{one[0].name}.saved.pt")
    held = Held.load(root / f"{name_of(one)}.held.pt")
    wanted = [{**group["hyper_parameters"], "params": group["params"]} for group in saved.groups]
    found = {tuple(group["params"]): group for group in held.groups}
    assert len(wanted) == len(found)
    for group in wanted:
        assert list(value_differences(group, found[tuple(group["params"])], "group")) == []


@pytest.mark.parametrize("one", [one for one in LOADS if one[0].dtype == "fp32"], ids=name_of)
def test_training_goes_on_as_it_would_have(one: tuple[Case, Loader, int], root: Path) -> None:
    saved_path, held_path = root / f"{one[0].name}.saved.pt", root / f"{name_of(one)}.held.pt"
    saved, wanted = Truth.load(saved_path), Truth.load(after_path(saved_path))
    found = Held.load(after_path(held_path))
    states = {**found.states, "fp32": found.weights}
    for state, tensors in wanted.states.items():
        for name, tensor in tensors.items():
            off = relative_distance(tensor, states[state][name], saved.states[state][name])
            assert off <= TOLERANCE, f"{state} of {name} is off by {off:.3g}"
    assert {float(step) for step in found.states["step"].values()} == {float(STEPS + FURTHER)}


def _wide(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cast floats to the dtype of the export."""
    return {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}
