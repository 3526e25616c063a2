"""Tensor parallelism as DeepSpeed does it to any model (AutoTP)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from tests.oracle.models import HIDDEN, Case, TinyLanguageModel
from tests.oracle.topology.engine import batch_of, finish, initialize
from tests.oracle.truth import Engine


@dataclass(frozen=True)
class TensorParallel:
    """Every layer's rows or columns on `degree` ranks next to each other.

    The model's odd sizes make the shares of the ranks unequal.
    """

    degree: int
    fused: bool = False
    """Whether the layers that are cut by rows consist of two, of different sizes, each cut by
    itself."""

    def config(self) -> Mapping[str, Any]:
        """Return which layers are split, and how."""
        column: dict[str, Any] = {
            "patterns": [r".*\.up\.(weight|bias)$"],
            "partition_type": "column",
        }
        if self.fused:
            column |= {"shape": [[12, HIDDEN - 12], -1], "partition_dim": 0}
        row = {"patterns": [r".*\.middle\.(weight|bias)$"], "partition_type": "row"}
        layers = {"use_default_specs": False, "layer_specs": [column, row]}
        return {"tensor_parallel": {"autotp_size": self.degree, "partition_config": layers}}

    def start(self, case: Case, seed: int, scale: float) -> Engine:
        """Make an engine of the whole model, which DeepSpeed then splits."""
        torch.manual_seed(seed)
        model = TinyLanguageModel()
        return initialize(case, model, case.groups(model, scale))

    def step(self, engine: Engine, step: int) -> None:
        """Take one step; ranks that share a model see the same samples."""
        replicas = distributed.get_world_size() // self.degree
        loss = engine(batch_of(distributed.get_rank() // self.degree, replicas, step))
        engine.backward(loss)
        engine.step()

    def finish(self, engine: Engine) -> None:
        """End the engine."""
        finish(engine)
