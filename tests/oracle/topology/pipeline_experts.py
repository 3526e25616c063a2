"""DeepSpeed's mixture of experts in layers of a pipeline, on both of its stages."""

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn

from tests.oracle.models import VOCABULARY, WIDTH, Block, Case
from tests.oracle.topology.experts import Expert
from tests.oracle.topology.pipeline import Pipe, Pipeline, Scale, logits_of

EXPERTS = 2


@dataclass(frozen=True)
class PipelineExperts(Pipeline):
    """A pipeline whose stages have a layer of two experts each, on a rank of their own."""

    def _layers(self, pipe: Pipe) -> list[object]:
        return [
            pipe.TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH),
            pipe.LayerSpec(Scale),
            pipe.LayerSpec(Block),
            pipe.LayerSpec(Mixture),
            # Here the second stage begins.
            pipe.LayerSpec(Mixture),
            pipe.LayerSpec(Scale),
            pipe.LayerSpec(nn.LayerNorm, WIDTH),
            pipe.TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH, forward_fn=logits_of),
        ]

    def _groups(
        self, case: Case, model: nn.Module, seed: int, scale: float
    ) -> Iterable[dict[str, Any]]:
        """Give every rank experts of its own, in param groups of their own."""
        torch.manual_seed(1000 * seed + distributed.get_rank())
        for module in model.modules():
            if isinstance(module, Expert):
                module.reset()
        utils: Any = importlib.import_module("deepspeed.moe.utils")
        groups = [{**group, "name": group["role"]} for group in case.groups(model, scale)]
        divided: list[dict[str, Any]] = utils.split_params_into_different_moe_groups_for_optimizer(
            groups
        )
        return divided


class Mixture(nn.Module):
    """A layer of experts, with a way around it."""

    def __init__(self) -> None:
        super().__init__()
        layer: Any = importlib.import_module("deepspeed.moe.layer")
        # Room for all tokens at one expert: which are dropped would depend on the ranks.
        room = {"capacity_factor": float(EXPERTS), "use_rts": False}
        self.experts = layer.MoE(WIDTH, Expert(), num_experts=EXPERTS, ep_size=2, **room)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.experts(hidden)[0]
        return hidden + mixed
