"""Expert parallelism with DeepSpeed's own mixture-of-experts layer, alone and beside tensor
parallelism."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import distributed, nn
from torch.nn import functional

from tests.oracle.models import SEQUENCE, VOCABULARY, WIDTH, Block, Case, Topology
from tests.oracle.topology.engine import initialize
from tests.oracle.topology.grid import TensorGrid, gather_flat
from tests.oracle.topology.shared_block import SharedBlock, spread, summed
from tests.oracle.truth import Engine

# DeepSpeed has no types.
Group: TypeAlias = Any


@dataclass(frozen=True)
class ExpertParallel(Topology):
    """Two layers of experts, each spread over `degrees` of its own of the data-parallel ranks."""

    degrees: tuple[int, int]
    counts: tuple[int, int] = (4, 2)
    """How many experts each layer has."""
    data_first: bool = False
    """Whether the ranks that share experts are next to each other, not those of one set of all."""
    max_group: int | None = None
    """Elements of a rank's experts above which their param group is divided; None as by default."""
    tensor: int = 1
    """Tensor-parallel ranks, each of which has other hidden units of a block, and of experts."""
    freezes: bool = False
    """Whether one bias of each expert is not trained."""

    def config(self) -> Mapping[str, Any]:
        """Return nothing but the order of the ranks: the rest is in the model."""
        return {"use_data_before_expert_parallelism": True} if self.data_first else {}

    def start(self, case: Case, seed: int, scale: float) -> Engine:
        """Make an engine whose experts all start from other values."""
        utils: Any = importlib.import_module("deepspeed.moe.utils")
        torch.manual_seed(seed)
        model = MixtureModel(self)
        # Every rank builds the same ones; those that share experts take the first one's.
        torch.manual_seed(1000 * seed + distributed.get_rank())
        for module in model.modules():
            if isinstance(module, Expert):
                module.reset()
                module.down.bias.requires_grad_(not self.freezes)
        grid = TensorGrid(self.tensor) if self.tensor > 1 else None
        if grid is not None:
            gather_flat()
            _share(model, grid)
        groups = [{**group, "name": group["role"]} for group in case.groups(model, scale)]
        most = {} if self.max_group is None else {"max_group_size": self.max_group}
        groups = utils.split_params_into_different_moe_groups_for_optimizer(groups, **most)
        return initialize(case, model, groups, **({} if grid is None else {"mpu": grid}))

    @property
    def ranks_of_a_replica(self) -> int:
        return self.tensor


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.group: Group = None
        self.up = nn.Linear(WIDTH, 5)
        self.down = nn.Linear(5, WIDTH)

    def reset(self) -> None:
        self.up.reset_parameters()
        self.down.reset_parameters()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return summed(self.down(torch.tanh(self.up(spread(hidden, self.group)))), self.group)


class MixtureModel(nn.Module):
    """A block, two layers of experts of which one has a part that all share, and a tied head."""

    running: torch.Tensor

    def __init__(self, parallel: ExpertParallel) -> None:
        super().__init__()
        layer: Any = importlib.import_module("deepspeed.moe.layer")
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.gain = nn.Parameter(torch.rand(1) + 0.5)
        self.mix = nn.Parameter(torch.rand(2))
        self.block = Block()
        self.shared = SharedBlock() if parallel.tensor > 1 else nn.Identity()
        self.mixtures = nn.ModuleList(
            layer.MoE(
                WIDTH,
                Expert(),
                num_experts=count,
                ep_size=degree,
                # Room for all tokens at one expert: which are dropped would depend on the ranks.
                capacity_factor=float(count),
                use_rts=False,
                use_residual=residual,
                enable_expert_tensor_parallelism=parallel.tensor > 1,
            )
            for count, degree, residual in zip(
                parallel.counts, parallel.degrees, (False, True), strict=True
            )
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        # Around zero: a shift of all features alike sends all tokens to the same few experts.
        self.register_buffer("running", torch.rand(SEQUENCE, WIDTH) - 0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) * self.gain
        hidden = self.block(hidden + self.mix.sum() * self.running.to(hidden.dtype))
        hidden = self.shared(hidden)
        for mixture in self.mixtures:
            # Without the loss that balances the experts: it is not a mean over the samples.
            mixed, _, _ = mixture(hidden)
            hidden = hidden + mixed
        logits = self.head(hidden).float()
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _share(model: MixtureModel, grid: TensorGrid) -> None:
    """Give this rank hidden units of its own of the block, and of the experts."""
    for module in model.modules():
        if isinstance(module, SharedBlock | Expert):
            module.group = grid.get_model_parallel_group()
            for param in (*module.up.parameters(), *module.down.parameters()):
                # So that the norm for clipping counts the gradients of all ranks.
                param.tensor_model_parallel = True  # type: ignore[attr-defined]
        if isinstance(module, SharedBlock):
            with torch.no_grad():
                module.up.weight.mul_(1 + grid.get_model_parallel_rank())
                module.down.weight.div_(3 + grid.get_model_parallel_rank())
