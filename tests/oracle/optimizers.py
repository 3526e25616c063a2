"""Optimizers of DeepSpeed's and of torch's, as the ranks make them."""

import importlib
import os
from pathlib import Path
from typing import Any

import torch

ParamGroups = list[dict[str, Any]]


def missing_extension(name: str | None) -> str:
    """Why what needs this C++ extension of DeepSpeed's cannot run here; empty where it can."""
    if name is None:
        return ""
    # Not where DeepSpeed builds by itself: what is found there may have to be built again, for
    # minutes, or be locked for ever by a process that was killed.
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root and list(Path(root).glob(f"**/{name}/{name}.so")):
        return ""
    message = f"DeepSpeed's {name} takes minutes to build"
    return f"{message}; set TORCH_EXTENSIONS_DIR to where it is built already"


def deepspeed_cpu_adam(groups: ParamGroups) -> torch.optim.Optimizer:
    """DeepSpeed's AdamW for offloaded states."""
    return _made("adam", "DeepSpeedCPUAdam", groups)


def deepspeed_fused_adam(groups: ParamGroups) -> torch.optim.Optimizer:
    """DeepSpeed's AdamW for states on the device."""
    return _made("adam", "FusedAdam", groups)


def deepspeed_cpu_lion(groups: ParamGroups) -> torch.optim.Optimizer:
    """DeepSpeed's Lion for offloaded states."""
    return _made("lion", "DeepSpeedCPULion", groups)


def deepspeed_cpu_adagrad(groups: ParamGroups) -> torch.optim.Optimizer:
    """DeepSpeed's Adagrad for offloaded states."""
    return _made("adagrad", "DeepSpeedCPUAdagrad", groups)


def adam_with_tensors(groups: ParamGroups) -> torch.optim.Optimizer:
    """AdamW whose learning rates are tensors, each param group's its own."""
    return torch.optim.AdamW([{**group, "lr": torch.tensor(group["lr"])} for group in groups])


def _made(module: str, name: str, groups: ParamGroups) -> torch.optim.Optimizer:
    # Imported by the ranks only: the package takes seconds to import.
    optimizer: torch.optim.Optimizer = getattr(
        importlib.import_module(f"deepspeed.ops.{module}"), name
    )(groups)
    return optimizer
