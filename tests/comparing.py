"""How files that a test makes are compared with those that fabricated jobs would have saved."""

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import streamshard
from tests.fabricated import load


def compare(found: Path, wanted: Path) -> None:
    """Require two tag directories to hold the same files with the same values."""
    names = sorted(path.name for path in wanted.iterdir())
    assert sorted(path.name for path in found.iterdir()) == names
    for name in names:
        assert differences(load(found / name), load(wanted / name), name) == []


def both_roads(run: Path, *, chunk_size: int = 100, **options: Any) -> tuple[Path, Path]:  # noqa: ANN401
    """Repartition a checkpoint directly, and by a store beside it; returns what both roads make."""
    store, outs = run.with_suffix(".zarr"), (run.with_name("direct"), run.with_name("of-store"))
    streamshard.convert(run, store, chunk_size=chunk_size)
    for source, out in zip((run, store), outs, strict=True):
        streamshard.repartition(source, out, **options)
    return outs


def differences(found: Any, wanted: Any, path: str = "") -> list[str]:  # noqa: ANN401
    """List where two loaded files differ, tensors bit by bit."""
    if type(found) is not type(wanted):
        return [f"{path}: {type(found)} for {type(wanted)}"]
    if isinstance(found, torch.Tensor):
        same = (
            (found.dtype, found.shape, found.requires_grad, vars(found))
            == (wanted.dtype, wanted.shape, wanted.requires_grad, vars(wanted))
            and bits(found) == bits(wanted)
        )  # fmt: skip
        return [] if same else [f"{path}: {found} for {wanted}"]
    if isinstance(found, Mapping):
        if list(found) != list(wanted):
            return [f"{path}: keys {list(found)} for {list(wanted)}"]
        pairs = [(found[key], wanted[key], f"{path}/{key}") for key in found]
    elif isinstance(found, list | tuple):
        if len(found) != len(wanted):
            return [f"{path}: {len(found)} items for {len(wanted)}"]
        both = zip(found, wanted, strict=True)
        pairs = [(one, other, f"{path}/{i}") for i, (one, other) in enumerate(both)]
    elif isinstance(found, enum.Enum) or not hasattr(found, "__dict__"):
        return [] if found == wanted else [f"{path}: {found!r} for {wanted!r}"]
    else:
        pairs = [(vars(found), vars(wanted), path)]
    return [line for pair in pairs for line in differences(*pair)]


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return np.asarray(flat.numpy()).tobytes() if tensor.numel() else b""
