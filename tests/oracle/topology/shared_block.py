"""A block whose hidden units are shared among tensor-parallel ranks."""

from typing import Any, TypeAlias

import torch
from torch import distributed, nn

from tests.oracle.models import HIDDEN, WIDTH

# A group of ranks, or None where there is one rank.
Group: TypeAlias = Any


class SharedBlock(nn.Module):
    """A residual block of which each of the ranks that share it holds other hidden units."""

    def __init__(self) -> None:
        super().__init__()
        self.group: Group = None
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        own = self.down(torch.tanh(self.up(spread(self.norm(hidden), self.group))))
        return hidden + summed(own, self.group)


def spread(value: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the same value on all ranks; the gradients of all come back."""
    same = value.clone()
    if group is not None:
        same.register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: _total(gradient, group)
        )
    return same


def summed(value: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum over all ranks; each gets its gradient."""
    return value if group is None else _total(value, group)


def _total(value: torch.Tensor, group: Group) -> torch.Tensor:
    total = value.clone()
    distributed.all_reduce(total.detach(), group=group)
    return total
