"""Jobs of the ranks that train with FSDP, and save and load a file for each rank, as verl does."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

MESH_NAMES = ("ddp", "fsdp")
"""Those of verl's `create_device_mesh`."""


class RankModel(nn.Module):
    """Sizes that no count of ranks divides, tied and frozen weights, buffers, bf16 next to fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.narrow = nn.Linear(6, 7, dtype=torch.bfloat16)
        self.frozen = nn.Parameter(torch.randn(5, 6), requires_grad=False)
        self.scale = nn.Parameter(torch.full((1,), 1.5))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.freq: Tensor
        self.register_buffer("freq", torch.arange(5.0))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * self.scale
        x = x + self.frozen.sum(0) * self.freq.sum()
        narrow: Tensor = self.narrow(x.bfloat16()).float().square().mean()
        whole: Tensor = self.head(x).square().mean()
        return narrow + whole


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + cast(Tensor, self.down(torch.tanh(self.up(self.norm(x)))))


class Narrow(nn.Linear):
    pass


class JoinedModel(nn.Module):
    """What FSDP1 joins to flat parameters: trained weights of one dtype, tied ones once."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.narrow = Narrow(6, 7, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        narrow: Tensor = self.narrow(x.bfloat16()).float().square().mean()
        whole: Tensor = self.head(self.norm(x)).square().mean()
        return narrow + whole


@dataclass(frozen=True)
class SaveRanks:
    """Train a fresh model with FSDP, and save a file of each kind for each rank."""

    save_dir: Path
    truth_path: Path
    mesh: tuple[int, ...]
    steps: int = 2
    keyed: str = "numbers"
    """What the optimizer's states are listed by: `numbers`, `names`, or `flat` names."""
    version: int = 2
    """Of FSDP."""
    seed: int = 5


@dataclass(frozen=True)
class LoadRanks:
    """Load such files into a fresh model, write what it holds, train on, and save again."""

    load_dir: Path
    held_path: Path
    mesh: tuple[int, ...]
    keyed: str = "numbers"
    version: int = 2
    further_steps: int = 0
    save_dir: Path | None = None


Job = SaveRanks | LoadRanks


def run(job: Job) -> None:
    torch.manual_seed(job.seed if isinstance(job, SaveRanks) else 99)
    mesh = init_device_mesh("cpu", job.mesh, mesh_dim_names=MESH_NAMES[-len(job.mesh) :])
    model = _joined(mesh) if job.version == 1 else _sharded(mesh)
    lr = 1e-2 if isinstance(job, SaveRanks) else 7.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.8, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    if isinstance(job, SaveRanks):
        _train(model, optimizer, scheduler, job.steps)
        _save(job.save_dir, model, optimizer, scheduler, job)
        _write_truth(model, optimizer, job.truth_path)
        _train(model, optimizer, scheduler, 2)
        _write_truth(model, optimizer, after(job.truth_path))
    else:
        _load(job, model, optimizer, scheduler)
        if job.save_dir is not None:
            _save(job.save_dir, model, optimizer, scheduler, job)
        _write_truth(model, optimizer, job.held_path)
        _train(model, optimizer, scheduler, job.further_steps)
        _write_truth(model, optimizer, after(job.held_path))
    distributed.barrier()


def _sharded(mesh: DeviceMesh) -> nn.Module:
    model = RankModel()
    for part in (*model.blocks, model.narrow):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _joined(mesh: DeviceMesh) -> nn.Module:
    model = FullyShardedDataParallel(
        JoinedModel(),
        device_mesh=mesh,
        auto_wrap_policy=ModuleWrapPolicy({Block, Narrow}),
        device_id=torch.device("cpu"),
    )
    FullyShardedDataParallel.set_state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=True),
        ShardedOptimStateDictConfig(offload_to_cpu=True),
    )
    return model


def after(path: Path) -> Path:
    """Where the truth lies after further steps."""
    return path.with_suffix(".after")


def _train(model: nn.Module, optimizer: Any, scheduler: Any, steps: int) -> None:  # noqa: ANN401
    for _ in range(steps):
        # The same batch on every rank: gradients do not depend on the count of ranks.
        model(torch.arange(13).reshape(1, 13)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def rank_path(directory: Path, kind: str) -> Path:
    """Return the file of this rank, by verl's names."""
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    return directory / f"{kind}_world_size_{ranks}_rank_{rank}.pt"


def _save(directory: Path, model: nn.Module, optimizer: Any, scheduler: Any, job: Job) -> None:  # noqa: ANN401
    """Save as verl does; by names, as jobs do that use torch's functions for state dicts."""
    directory.mkdir(parents=True, exist_ok=True)
    states = optimizer.state_dict()
    if job.keyed != "numbers":
        options = StateDictOptions(flatten_optimizer_state_dict=job.keyed == "flat")
        states = get_optimizer_state_dict(model, optimizer, options=options)
    torch.save(model.state_dict(), rank_path(directory, "model"))
    torch.save(states, rank_path(directory, "optim"))
    extra = {"lr_scheduler": scheduler.state_dict(), "rng": {"cpu": torch.get_rng_state()}}
    torch.save(extra, rank_path(directory, "extra_state"))
    if distributed.get_rank() == 0:
        config = {"FSDP_version": job.version, "world_size": distributed.get_world_size()}
        (directory / "fsdp_config.json").write_text(json.dumps(config, indent=4))


def _load(job: LoadRanks, model: nn.Module, optimizer: Any, scheduler: Any) -> None:  # noqa: ANN401
    weights = torch.load(rank_path(job.load_dir, "model"), weights_only=False)
    states = torch.load(rank_path(job.load_dir, "optim"), weights_only=False)
    extra = torch.load(rank_path(job.load_dir, "extra_state"), weights_only=False)
    if job.keyed == "numbers":
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=job.keyed == "flat")
        set_model_state_dict(model, weights)
        set_optimizer_state_dict(model, optimizer, states, options=options)
    scheduler.load_state_dict(extra["lr_scheduler"])


def _write_truth(model: nn.Module, optimizer: Any, path: Path) -> None:  # noqa: ANN401
    states: dict[str, dict[str, Tensor]]
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            weights = model.state_dict()
            states = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    else:
        whole = StateDictOptions(full_state_dict=True)
        weights = get_model_state_dict(model, options=whole)
        names = [name for name, _ in model.named_parameters()]
        held = optimizer.state_dict()["state"]
        meshes = [getattr(param, "device_mesh", None) for param in model.parameters()]
        states = {names[n]: _whole(one, meshes[n]) for n, one in held.items()}
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    if distributed.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        truth = {"weights": weights, "states": states, "groups": groups}
        torch.save(truth, path)


def _whole(states: Mapping[str, Any], mesh: Any) -> dict[str, Tensor]:  # noqa: ANN401
    return {
        state: value
        if not isinstance(value, DTensor)
        else DTensor.from_local(
            value.to_local(), mesh, value.placements, shape=value.shape, stride=value.stride()
        ).full_tensor()
        for state, value in states.items()
    }
