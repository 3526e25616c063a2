"""Jobs of the ranks that train with FSDP, and save with torch's distributed checkpoint."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.device_mesh import init_device_mesh

from tests.oracle import jobs as work
from tests.oracle.models import TinyLanguageModel, batch_of, param_groups, warm_up

Style = Literal["torch", "titan", "accelerate", "fsdp1"]


@dataclass(frozen=True)
class TrainSharded:
    """Train a fresh model with FSDP, save it, write the truth of that moment, and go on."""

    save_dir: Path
    truth_path: Path
    style: Style = "torch"
    tensor_parallel: int = 1
    steps: int = 3
    further_steps: int = 5
    seed: int = 11
    model: Callable[[], nn.Module] = TinyLanguageModel


Model = Any
"""A module after `fully_shard`, or inside of `FullyShardedDataParallel`."""


def run(job: TrainSharded | work.Job) -> None:
    if isinstance(job, TrainSharded):
        _train(job)
        distributed.barrier()
    else:
        work.run(job)


def _train(job: TrainSharded) -> None:
    torch.manual_seed(job.seed)
    model = job.model()
    ranks = distributed.get_world_size() // job.tensor_parallel
    mesh = init_device_mesh("cpu", (ranks, job.tensor_parallel), mesh_dim_names=("dp", "tp"))
    rank = mesh.get_local_rank("dp")
    if job.tensor_parallel > 1 and isinstance(model, TinyLanguageModel):
        _cut_for_tensors(model, mesh["tp"])
    engine = sharded(model, mesh["dp"], job.style)
    optimizer = torch.optim.AdamW(param_groups(model))
    base = [group["lr"] for group in optimizer.param_groups]
    for step in range(job.steps):
        _step(engine, optimizer, step, rank, ranks)
    _save(engine, optimizer, job)
    _write(engine, optimizer, job.truth_path)
    for step in range(job.further_steps):
        _step(engine, optimizer, step, rank, ranks)
        # As the job that goes on does, whose schedule begins anew.
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = lr * warm_up(step + 1)
    if job.further_steps:
        _write(engine, optimizer, work.after_path(job.truth_path))


def _cut_for_tensors(model: TinyLanguageModel, mesh: Any) -> None:  # noqa: ANN401
    """Cut linear layers along their rows or their columns."""
    parallel: Any = importlib.import_module("torch.distributed.tensor.parallel")
    plan = {
        "up": parallel.ColwiseParallel(output_layouts=_replicated()),
        "middle": parallel.RowwiseParallel(input_layouts=_replicated()),
        "down": parallel.RowwiseParallel(input_layouts=_replicated()),
    }
    for block in model.blocks:
        parallel.parallelize_module(block, mesh, plan)


def _replicated() -> Any:  # noqa: ANN401
    placements: Any = importlib.import_module("torch.distributed.tensor")
    return placements.Replicate()


def sharded(model: nn.Module, mesh: Any, style: Style) -> Model:  # noqa: ANN401
    """Let FSDP shard a model over the ranks of a mesh: FSDP1 for its own style, else FSDP2."""
    fsdp: Any = importlib.import_module("torch.distributed.fsdp")
    if style == "fsdp1":
        return fsdp.FullyShardedDataParallel(
            model, device_mesh=mesh, use_orig_params=True, device_id=torch.device("cpu")
        )
    for block in getattr(model, "blocks", ()):
        fsdp.fully_shard(block, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    return model


def _step(model: Model, optimizer: Any, step: int, rank: int, ranks: int) -> None:  # noqa: ANN401
    model(batch_of(rank, ranks, step)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _save(model: Model, optimizer: Any, job: TrainSharded) -> None:  # noqa: ANN401
    flat = StateDictOptions(flatten_optimizer_state_dict=job.style == "titan")
    weights, states = get_state_dict(model, optimizer, options=flat)
    if job.style == "titan":
        save_distributed(
            {**weights, "optimizer": states, "train_state": {"step": job.steps}},
            checkpoint_id=job.save_dir,
        )
    elif job.style == "accelerate":
        save_distributed({"model": weights}, checkpoint_id=job.save_dir / "pytorch_model_fsdp_0")
        save_distributed({"optimizer": states}, checkpoint_id=job.save_dir / "optimizer_0")
    else:
        save_distributed({"model": weights, "optimizer": states}, checkpoint_id=job.save_dir)


def _write(model: Model, optimizer: Any, path: Path) -> None:  # noqa: ANN401
    whole = StateDictOptions(full_state_dict=True)
    weights, optim = get_state_dict(model, optimizer, options=whole)
    if distributed.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"weights": weights, "optimizer": optim}, path)


def states_of(truth: dict[str, Any]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield state, parameter and whole tensor of what `_write` wrote."""
    for name, held in truth["optimizer"]["state"].items():
        yield "fp32", name, truth["weights"][name]
        for state, value in held.items():
            if state != "step":
                yield state, name, value
