"""Sequence parallelism (Ulysses), with the groups of ranks that DeepSpeed makes for it."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional

from tests.oracle.models import SEQUENCE, VOCABULARY, WIDTH, Block, Case, Topology
from tests.oracle.topology.engine import initialize
from tests.oracle.truth import Engine

HEADS, HEAD_WIDTH = 6, 2


@dataclass(frozen=True)
class SequenceParallel(Topology):
    """Every sample's tokens on `degree` ranks next to each other."""

    degree: int

    @property
    def ranks_of_a_replica(self) -> int:
        return self.degree

    def start(self, case: Case, seed: int, scale: float) -> Engine:
        parallel: Any = importlib.import_module(
            "deepspeed.runtime.sequence_parallel.parallel_state_sp"
        )
        parallel.initialize_sequence_parallel(self.degree)
        torch.manual_seed(seed)
        model = AttentionModel(parallel.get_sequence_parallel_group())
        return initialize(case, model, case.groups(model, scale), mpu=parallel)

    def step(self, engine: Engine, step: int) -> None:
        """Take one step; ranks that share samples see other tokens of them."""
        tokens, part = self.batch(step), distributed.get_rank() % self.degree
        share = (SEQUENCE - 1) // self.degree
        mine = slice(share * part, share * (part + 1))
        loss = engine(tokens[:, :-1][:, mine], tokens[:, 1:][:, mine])
        # DeepSpeed adds the gradients of these ranks up, and takes the mean over the others.
        engine.backward(loss / self.degree)
        engine.step()


@dataclass(frozen=True)
class SequenceMesh(Topology):
    """The same by two numbers in the configuration, of which DeepSpeed makes a mesh.

    It adds no gradients up over the ranks of a sequence, so these train on the same tokens here.
    """

    data: int
    degree: int = 2

    @property
    def ranks_of_a_replica(self) -> int:
        return self.degree

    def config(self) -> Mapping[str, Any]:
        return {"data_parallel_size": self.data, "sequence_parallel_size": self.degree}

    def start(self, case: Case, seed: int, scale: float) -> Engine:
        """Make an engine of a model whose ranks need no others."""
        torch.manual_seed(seed)
        model = AttentionModel(None)
        model.attention = WholeHeads()
        return initialize(case, model, case.groups(model, scale))

    def step(self, engine: Engine, step: int) -> None:
        tokens = self.batch(step)
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
        engine.step()


class Heads(nn.Module):
    """Attention to all positions, of the heads that are here."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return mixed.transpose(1, 2).contiguous()


class WholeHeads(Heads):
    """The same where all heads are here, called as `DistributedAttention` is."""

    def forward(  # type: ignore[override]
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _batch_dimension: int
    ) -> torch.Tensor:
        return super().forward(query, key, value)


class AttentionModel(nn.Module):
    """Attention across all ranks of a sequence, a block, and a tied head."""

    running: torch.Tensor

    def __init__(self, sequence_group: object) -> None:
        super().__init__()
        layer: Any = importlib.import_module("deepspeed.sequence.layer")
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.gain = nn.Parameter(torch.rand(1) + 0.5)
        self.mix = nn.Parameter(torch.rand(2))
        # No bias: that of the keys would make no difference, and its gradient be mere noise.
        self.parts = nn.Linear(WIDTH, 3 * HEADS * HEAD_WIDTH, bias=False)
        self.attention = layer.DistributedAttention(Heads(), sequence_group, gather_idx=1)
        self.join = nn.Linear(HEADS * HEAD_WIDTH, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("running", torch.rand(WIDTH))

    def forward(self, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) * self.gain + self.mix.sum()
        hidden = hidden + self.running.to(hidden.dtype)
        parts = self.parts(hidden).unflatten(2, (3, HEADS, HEAD_WIDTH)).unbind(2)
        hidden = hidden + self.join(self.attention(*parts, 0).flatten(2))
        logits = self.head(self.block(hidden)).float()
        return functional.cross_entropy(logits.flatten(0, 1), following.flatten())
