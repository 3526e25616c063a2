"""Files of FSDP's ranks in parts that are compared without ranks."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.oracle.values import value_differences

OF_PROCESS = ("_hash", "_pg_registry")
"""Attributes of a mesh that each process has of its own."""


def plain(value: Any, *, names_groups: bool = True) -> Any:  # noqa: ANN401
    """Return a value with the parts of its DTensors, which no ranks are needed to compare."""
    if isinstance(value, DTensor):
        mesh = {k: plain(v) for k, v in vars(value.device_mesh).items() if k not in OF_PROCESS}
        if not names_groups:
            mesh.pop("_dim_group_names", None)
        spec = {k: v for k, v in vars(value._spec).items() if k not in ("mesh", "_hash")}
        local = value._local_tensor
        return {"local": local, "mesh": mesh, "spec": repr(spec), "device": value.device.type}
    if isinstance(value, dict):
        return {key: plain(part, names_groups=names_groups) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part, names_groups=names_groups) for part in value]
    return repr(value) if type(value).__module__.startswith("torch.distributed") else value


def load(path: Path) -> Any:  # noqa: ANN401
    """Load a torch file with all that is in it."""
    return torch.load(path, weights_only=False)


def rank_differences(ours: Path, theirs: Path, *, names_groups: bool = True) -> list[str]:
    """List how what two files hold differs, but for the random states of their ranks.

    `names_groups`: whether the names of the groups of ranks are compared too.
    """
    one, other = (plain(load(path), names_groups=names_groups) for path in (ours, theirs))
    for held in (one, other):
        held.pop("rng", None)
    return list(value_differences(one, other, ours.name))
