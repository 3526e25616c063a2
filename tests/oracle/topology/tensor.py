"""Tensor parallelism as DeepSpeed does it to any model (AutoTP)."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tests.oracle.models import HIDDEN, VOCABULARY, Case, TinyLanguageModel, Topology
from tests.oracle.topology.engine import initialize
from tests.oracle.truth import Engine


@dataclass(frozen=True)
class TensorParallel(Topology):
    """Every layer's rows or columns on `degree` ranks next to each other.

    The model's odd sizes make the shares of the ranks unequal.
    """

    degree: int
    fused: bool = False
    """Whether the layers that are cut by rows consist of two, of different sizes, each cut by
    itself."""

    def config(self) -> Mapping[str, Any]:
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
        torch.manual_seed(seed)
        model = (case.model or TinyLanguageModel)()
        return initialize(case, model, case.groups(model, scale))

    @property
    def ranks_of_a_replica(self) -> int:
        return self.degree


@dataclass(frozen=True)
class LlamaInParts(TensorParallel):
    """A small Llama with tied embeddings, cut as DeepSpeed cuts any model that it knows."""

    def config(self) -> Mapping[str, Any]:
        return {"tensor_parallel": {"autotp_size": self.degree}}

    def start(self, case: Case, seed: int, scale: float) -> Engine:
        transformers: Any = importlib.import_module("transformers")
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, tie_word_embeddings=True,
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2,
        )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_config(config)
        params = list(model.parameters())
        with torch.no_grad():
            for param in params:
                param.mul_(scale)
        groups = [
            {"params": [param for param in params if param.dim() > 1], "lr": 0.01},
            {"params": [param for param in params if param.dim() == 1], "weight_decay": 0.0},
        ]
        return initialize(case, model, groups)

    def step(self, engine: Engine, step: int) -> None:
        """Take one step; ranks that share a model see the same samples."""
        tokens = self.batch(step)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
