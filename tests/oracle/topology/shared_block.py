"""A block whose hidden units are shared among tensor-parallel ranks."""

from typing import Any, TypeAlias

import torch
from torch import distributed, nn
from torch.autograd.function import FunctionCtx

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
        """Add the units of all ranks up."""
        own = self.down(torch.tanh(self.up(spread(self.norm(hidden), self.group))))
        return hidden + summed(own, self.group)


def spread(value: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the same value on all ranks; the gradients of all come back."""
    out: torch.Tensor = _Spread.apply(value, group)  # type: ignore[no-untyped-call]
    return out


def summed(value: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum over all ranks; each gets its gradient."""
    out: torch.Tensor = _Sum.apply(value, group)  # type: ignore[no-untyped-call]
    return out


class _Spread(torch.autograd.Function):
    """The same value for all ranks; the gradients of all come back."""

    @staticmethod
    def forward(ctx: FunctionCtx, value: torch.Tensor, group: object) -> torch.Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        return value.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _total(gradient, ctx.group), None  # type: ignore[attr-defined]


class _Sum(torch.autograd.Function):
    """The sum over all ranks; each gets its gradient."""

    @staticmethod
    def forward(_ctx: FunctionCtx, value: torch.Tensor, group: object) -> torch.Tensor:
        return _total(value, group)

    @staticmethod
    def backward(_ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def _total(value: torch.Tensor, group: Group) -> torch.Tensor:
    total = value.clone()
    if group is not None:
        distributed.all_reduce(total, group=group)
    return total
