"""Muon's momentum, which stages 1 and 2 keep whole and on several ranks, and its order."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.oracle.laws import *  # noqa: F403
from tests.oracle.models import WIDTH, Case, TinyLanguageModel, merged
from tests.oracle.momentum import KEY
from tests.oracle.reshardings import Places, Resharding
from tests.oracle.truth import Truth


class WideBlock(nn.Module):
    """A block with a matrix that is more than half of all matrices, and one of two elements."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 101, bias=False)
        self.mix = nn.Parameter(torch.rand(1, 2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.wide(hidden)).mean(-1, keepdim=True)
        out: torch.Tensor = hidden + inner * self.mix.sum()
        return out


class MatrixModel(TinyLanguageModel):
    """Five matrices in one param group and a tiny one in another.

    On 4 ranks the largest is on 3 of them, and a rank has parts of 3; ranks own nothing of the
    tiny one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(WideBlock())


def muon(
    name: str, stage: int, overrides: Mapping[str, Any] | None = None, *, zero_init: bool = False
) -> Case:
    """Muon for the matrices, with AdamW for the rest, as DeepSpeed's configuration makes it."""
    # Without torch_adam the rest would get FusedAdam, which has to be built first.
    params = {"lr": 2e-3, "momentum": 0.9, "weight_decay": 0.01, "torch_adam": True}
    common = {
        "optimizer": {"type": "Muon", "params": params},
        # Stage 3 refuses Muon with reduce_scatter.
        "zero_optimization": {"reduce_scatter": False},
    }
    return Case(
        f"z{stage}-muon{name}",
        stage,
        "bf16",
        merged(common, overrides or {}),
        optimizer=None,
        zero_init=zero_init,
        model=MatrixModel,
    )


DEVICE_1, DEVICE_2 = muon("", 1), muon("", 2)
ROUND_ROBIN = muon("-round-robin", 2, {"zero_optimization": {"round_robin_gradients": True}})
ALIGNED = muon("-aligned", 2, {"zero_optimization": {"parameter_alignment": True}})
OFFLOAD = muon(
    "-offload",
    2,
    {
        "zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}},
        "zero_force_ds_cpu_optimizer": False,
    },
)
BF16_OPTIMIZER = muon("-bf16-optimizer", 1, {"data_types": {"grad_accum_dtype": "fp32"}})
STAGE_3, ZERO_INIT = muon("", 3), muon("-zero-init", 3, zero_init=True)


class OfMuon(Resharding):
    """A job that trains with Muon; measured at most 0.15 of noise, in a parameter of 2 elements."""

    @property
    def trains_alike(self) -> bool:
        """BF16_Optimizer clips the gradients, other optimizers what Muon makes of them."""
        return BF16_OPTIMIZER not in (self.case, self.resuming)

    def alike(self, saved: Truth, resumed: Truth) -> tuple[Truth, Truth]:
        """Cast the momentum to the dtype of the masters, as torch's loading does."""
        masters, momentum = saved.states["fp32"], saved.states[KEY]
        cast = {name: value.to(masters[name].dtype) for name, value in momentum.items()}
        return super().alike(replace(saved, states={**saved.states, KEY: cast}), resumed)

    def is_known(self, line: str) -> bool:
        """Loading makes fp32 of the momentum, until the next step."""
        return line.endswith(f"['{KEY}']: dtype torch.bfloat16 != torch.float32")


RESHARDINGS = [
    OfMuon(DEVICE_2, 4, 3),
    OfMuon(DEVICE_1, 2, 4, resume=DEVICE_2),
    OfMuon(ROUND_ROBIN, 4, 3),
    OfMuon(OFFLOAD, 4, 3, resume=ALIGNED),
    OfMuon(DEVICE_2, 4, 3, resume=OFFLOAD),
    OfMuon(BF16_OPTIMIZER, 4, 3, resume=DEVICE_2),
    OfMuon(DEVICE_2, 4, 3, resume=BF16_OPTIMIZER),
    OfMuon(STAGE_3, 4, 3),
    OfMuon(ZERO_INIT, 4, 3, resume=DEVICE_1),
    # What tells the order of stage 3 is a save of that job.
    OfMuon(DEVICE_2, 4, 3, resume=ZERO_INIT, like=ZERO_INIT),
]
"""With 4 ranks a matrix lies on 3 of them, one of which has parts of 3."""


def test_the_job_is_as_awkward_as_it_says(places: Places) -> None:
    one = RESHARDINGS[0]
    assert set(places.saved(one).states) == {"fp32", "exp_avg", "exp_avg_sq", KEY}
    held = [_momentum(path) for path in _optimizer_files(places.source(one))]
    lengths = [{group: len(value) for group, value in rank.items()} for rank in held]
    wide, up, down = 101 * 13, 29 * 13, 13 * 19
    assert lengths == [{0: wide, 3: 2}, {0: wide}, {0: wide + 2 * up}, {0: up + 2 * down}]
    assert {value.dtype for rank in held for value in rank.values()} == {torch.bfloat16}
    assert torch.equal(held[0][0], held[1][0])


def test_the_momentum_in_files_is_the_engine_s(one: Resharding, places: Places) -> None:
    both = (_optimizer_files(directory) for directory in (places.out(one), places.resaved(one)))
    for ours, theirs in (map(_momentum, paths) for paths in zip(*both, strict=True)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[group].float(), theirs[group]) for group in ours)


def _optimizer_files(directory: Path) -> list[Path]:
    tag = directory / (directory / "latest").read_text()
    return sorted(tag.glob("*_optim_states.pt"))


def _momentum(path: Path) -> dict[int, torch.Tensor]:
    """The momentum in a rank's file, by param group."""
    state: dict[str, Any] = torch.load(path, weights_only=False)["optimizer_state_dict"]
    wrapped = state.get("base_optimizer_state") or state["optimizer_state_dict"]
    return {group: held[KEY] for group, held in wrapped["state"].items() if KEY in held}
