"""Checkpoints of FSDP with copies on several ranks keep the model's order of the parameters.

Of copies torch saves one, on the rank that has least to save, so that its index lists the keys in
another order than the model has them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import parallel

import streamshard
from tests.fabricated import load
from tests.oracle.ranks import require_success, run_jobs

pytestmark = pytest.mark.engine

CONFIG = {
    "train_batch_size": 6,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
}
RANKS, RESUMED = 4, 3


@dataclass(frozen=True)
class TrainMesh:
    """Train a step on a mesh of two times two ranks, and save as torch does."""

    save_dir: Path
    is_hybrid: bool
    """Whether the second dimension of the mesh shards and the first has copies (HSDP). Else the
    second one cuts linear layers and leaves norms whole (TP)."""


def model() -> nn.Sequential:
    """Make a model all of whose tensors are trained, the large ones not first."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 4)
    )


def do(job: TrainMesh) -> None:
    """Do a job in this rank."""
    trained: Any = model()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("first", "second"))
    if not job.is_hybrid:
        plan: dict[str, Any] = {"1": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
        trained = parallel.parallelize_module(trained, mesh["second"], plan)
    fsdp.fully_shard(trained, mesh=mesh if job.is_hybrid else mesh["first"])
    params = list(trained.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [param for param in params if param.ndim > 1]},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    torch.manual_seed(distributed.get_rank() // (1 if job.is_hybrid else 2))
    trained(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(trained, optimizer)
    save_distributed({"model": weights, "optimizer": states}, checkpoint_id=job.save_dir)
    distributed.barrier()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save on both kinds of mesh."""
    root = tmp_path_factory.mktemp("order")
    saves = [TrainMesh(root / "hybrid", True), TrainMesh(root / "tensors", False)]
    require_success(run_jobs(RANKS, saves, root / "ranks", do))
    return root


@pytest.mark.parametrize("kind", ["hybrid", "tensors"])
def test_a_config_stands_in_for_a_reference(kind: str, root: Path, tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(CONFIG))
    out = tmp_path / "out"
    streamshard.repartition(root / kind, out, world_size=RESUMED, ds_config_file=config)
    assert streamshard.verify(out, against=root / kind).is_good
    held = load(out / kind / "mp_rank_00_model_states.pt")
    wanted = [name for name, _ in model().named_parameters()]
    assert list(held["module"]) == wanted
    matrices = [name for name, param in model().named_parameters() if param.ndim > 1]
    rest = [name for name in wanted if name not in matrices]
    assert [list(unit) for unit in held["param_shapes"]] == [matrices, rest]
