"""Models with frozen weights that share memory with each other, or have names that share them."""

import torch
from torch import nn

from tests.oracle.models import WIDTH, TinyLanguageModel


class Adapted(TinyLanguageModel):
    """A frozen embedding, tied with the output head, and trained layers: as with LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.weight.requires_grad_(False)


class AllTrained(TinyLanguageModel):
    """Nothing is frozen."""

    def __init__(self) -> None:
        super().__init__()
        for param in self.parameters():
            param.requires_grad_(True)


class Sharing(TinyLanguageModel):
    """Frozen parameters that are parts of another's memory.

    DeepSpeed below stage 3 takes parameters for one if they begin at the same address.
    """

    def __init__(self) -> None:
        super().__init__()
        table = torch.rand(6, WIDTH)
        self.table = nn.Parameter(table, requires_grad=False)
        self.first_rows = nn.Parameter(table[:2], requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Add a constant to the loss."""
        loss: torch.Tensor = super().forward(tokens)
        return loss + (self.table.sum() + self.first_rows.sum()).float()


class Twice(Sharing):
    """Two frozen parameters that are one in memory, though not one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.same_again = nn.Parameter(self.table.data, requires_grad=False)


class Empty(TinyLanguageModel):
    """Parameters without elements, which all begin at address 0; stage 3 cannot gather them."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 5), requires_grad=False)
        self.nothing_else = nn.Parameter(torch.empty(3, 0), requires_grad=False)
        self.nothing_trained = nn.Parameter(torch.empty(0))
