"""What ranks of PyTorch's own training do with a distributed checkpoint: load it, and train on."""

import gc
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.oracle.fsdp_training import sharded
from tests.oracle.jobs import after_path
from tests.oracle.models import Case, TinyLanguageModel, batch_of, warm_up

Loader = Literal["nested", "flattened", "titan", "accelerate"]


@dataclass(frozen=True)
class LoadDcp:
    """Load a distributed checkpoint into a fresh model and AdamW, and train on."""

    case: Case
    checkpoint: Path
    """Target of an export."""
    loader: Loader
    held_path: Path
    """For what is held after loading."""
    further_steps: int = 0
    is_sharded: bool = True
    """Whether FSDP2 shards the model; else it is a plain one on a single rank."""


@dataclass(frozen=True)
class Held:
    """What the ranks hold together, by full tensors."""

    weights: dict[str, torch.Tensor]
    """The module's state dict."""
    states: dict[str, dict[str, torch.Tensor]]
    """State → parameter → value, the `step` of each among them."""
    groups: list[dict[str, Any]]
    """Param groups, with sorted names of parameters."""

    @classmethod
    def load(cls, path: Path) -> "Held":
        return cls(**torch.load(path, weights_only=False))


def run(job: LoadDcp) -> None:
    """Do a job in this rank, and leave the process fit for the next one."""
    torch.manual_seed(77)
    model = (job.case.model or TinyLanguageModel)()
    model = model.float()
    if job.is_sharded:
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        model = sharded(model, mesh, "torch")
    # Other hyper-parameters than were saved: whatever is right afterwards came from the file.
    optimizer = torch.optim.AdamW(job.case.groups(model, 1.7))
    # As a job does that goes on: a scheduler keeps a key of its own in param groups.
    torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
    if job.loader == "titan":
        _load_as_titan(job, model, optimizer)
    elif job.loader == "accelerate":
        _load_with_accelerate(job, model, optimizer)
    else:
        _load(job, model, optimizer)
    _write(_held(model, optimizer), job.held_path)
    if job.further_steps:
        done = int(next(iter(optimizer.state.values()))["step"])
        for step in range(done, done + job.further_steps):
            _step(model, optimizer, step)
        _write(_held(model, optimizer), after_path(job.held_path))
    del model, optimizer
    gc.collect()
    distributed.barrier()


def _load(job: LoadDcp, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=job.loader == "flattened")
    weights, states = get_state_dict(model, optimizer, options=options)
    load_checkpoint({"model": weights, "optim": states}, checkpoint_id=job.checkpoint)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=weights,
        optim_state_dict=states,
        options=options,
    )


def _load_as_titan(job: LoadDcp, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Follow torchtitan's conventions: weights at the root, the optimizer's state flattened."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights = model.state_dict()
    states = get_optimizer_state_dict(model, optimizer, options=options)
    found = sorted(job.checkpoint.glob("step-*"))
    load_checkpoint({**weights, "optimizer": states}, checkpoint_id=found[-1])
    model.load_state_dict(weights)
    set_optimizer_state_dict(model, optimizer, states, options=options)


@dataclass(frozen=True)
class _CpuAccelerator:
    """What Accelerate's functions ask of an accelerator; its own has no FSDP without a GPU."""

    is_fsdp2: bool = True

    def wait_for_everyone(self) -> None:
        distributed.barrier()


def _load_with_accelerate(job: LoadDcp, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Call what `Accelerator.load_state` calls."""
    accelerate: Any = importlib.import_module("accelerate")
    accelerate.PartialState(cpu=True)  # its log asks for this
    utils: Any = importlib.import_module("accelerate.utils")
    plugin = utils.FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", reshard_after_forward=True
    )
    accelerator, place = _CpuAccelerator(), str(job.checkpoint)
    utils.load_fsdp_model(plugin, accelerator, model, place)
    utils.load_fsdp_optimizer(plugin, accelerator, optimizer, model, place)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One optimizer step on this rank's slice of the global batch, as the DeepSpeed jobs take."""
    optimizer.zero_grad()
    batch = batch_of(distributed.get_rank(), distributed.get_world_size(), step)
    model(batch).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * warm_up(step + 1)


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> Held:
    """Gather what all ranks hold. A collective call."""
    names = {param: name for name, param in model.named_parameters()}
    states: dict[str, dict[str, torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            for key, value in optimizer.state[param].items():
                states.setdefault(key, {})[names[param]] = _full(value)
    return Held(
        weights={name: _full(value) for name, value in model.state_dict().items()},
        states=states,
        groups=[
            {
                **{k: v for k, v in group.items() if k != "params"},
                "params": sorted(names[param] for param in group["params"]),
            }
            for group in optimizer.param_groups
        ],
    )


def _full(value: torch.Tensor) -> torch.Tensor:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().clone()


def _write(held: Held, path: Path) -> None:
    if distributed.get_rank() == 0:
        torch.save(vars(held), path)
