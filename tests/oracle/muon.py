"""Jobs that train with DeepSpeed's Muon, and a model whose matrices make its momentum awkward."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tests.oracle.models import WIDTH, Case, TinyLanguageModel, merged


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
