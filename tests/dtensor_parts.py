"""Files of FSDP's ranks in parts that are compared without ranks."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.oracle.values import value_differences

OF_PROCESS = ("_hash", "_pg_registry")
"""Attributes of a mesh that each process has of its own."""


def plain(value: Any) -> Any:  # noqa: ANN401
    """Return a value with the parts of its DTensors, which no ranks are needed to compare."""
    if isinstance(value, DTensor):
        mesh = {k: plain(v) for k, v in vars(value.device_mesh).items() if k not in OF_PROCESS}
        if len(value.placements) > 1:
            mesh.pop("_dim_group_names", None)
        spec = {k: v for k, v in vars(value._spec).items() if k not in ("mesh", "_hash")}
        local = value._local_tensor
        return {"local": local, "mesh": mesh, "spec": repr(spec), "device": value.device.type}
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return repr(value) if type(value).__module__.startswith("torch.distributed") else value


def load(path: Path) -> Any:  # noqa: ANN401
    """Load a torch file with all that is in it."""
    return torch.load(path, weights_only=False)


def rank_differences(ours: Path, theirs: Path) -> list[str]:
    """List how what two files hold differs, but for the random states of their ranks."""
    one, other = plain(load(ours)), plain(load(theirs))
    for held in (one, other):
        held.pop("rng", None)
    return list(value_differences(one, other, ours.name))
