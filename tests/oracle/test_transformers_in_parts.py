"""A model of transformers' that AutoTP cuts by its own rules, at ZeRO stage 3."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import streamshard
from tests.oracle.compare import differences
from tests.oracle.jobs import Resume, Train
from tests.oracle.models import VOCABULARY, Case
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.topology.engine import batch_of, initialize
from tests.oracle.topology.tensor import TensorParallel
from tests.oracle.truth import Engine, Truth

FROM, TO = 4, 2


@dataclass(frozen=True)
class LlamaInParts(TensorParallel):
    """A small Llama with tied embeddings, cut as DeepSpeed cuts any model that it knows."""

    def config(self) -> Mapping[str, Any]:
        """Return nothing but the degree."""
        return {"tensor_parallel": {"autotp_size": self.degree}}

    def start(self, case: Case, seed: int, scale: float) -> Engine:
        """Make an engine of the whole model, which DeepSpeed then splits."""
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
        replicas = distributed.get_world_size() // self.degree
        tokens = batch_of(distributed.get_rank() // self.degree, replicas, step)
        model: Any = engine
        engine.backward(model(input_ids=tokens, labels=tokens).loss)
        engine.step()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Path]:
    """What 4 ranks save, two of which share a model; the truth is next to it."""
    root = tmp_path_factory.mktemp("llama")
    case = Case("llama-in-parts", 3, "bf16", topology=LlamaInParts(2))
    train = Train(case, root / "run", root / "run.pt")
    require_success(run_jobs(FROM, [train], root / "ranks"))
    return case, root / "run"


@pytest.mark.parametrize("is_live", [False, True], ids=["from files", "directly"])
def test_it_resumes_on_other_ranks(
    saved: tuple[Case, Path], tmp_path: Path, *, is_live: bool
) -> None:
    case, run = saved
    source = run if is_live else tmp_path / "out"
    if not is_live:
        streamshard.repartition(run, source, world_size=TO)
    resume = Resume(case, source, tmp_path / "loaded.pt", reshards=is_live)
    require_success(run_jobs(TO, [resume], tmp_path / "ranks"))
    assert differences(Truth.load(run.with_suffix(".pt")), Truth.load(tmp_path / "loaded.pt")) == []
