"""Distributed checkpoints as torch writes them, with any boxes, without processes or engines."""

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a box begins, and its lengths."""


def rows(shape: Sequence[int], parts: int) -> list[Box]:
    """Cut as FSDP does: equal parts of the first dimension, the last ones shorter or empty."""
    if not shape:
        return [((), ())]
    share, found = -(-shape[0] // parts), []
    for part in range(parts):
        start = min(part * share, shape[0])
        length = min(share, shape[0] - start)
        found.append(((start, *[0] * (len(shape) - 1)), (length, *shape[1:])))
    return found


def mesh(shape: Sequence[int], parts: Sequence[int]) -> list[Box]:
    """Cut along several dimensions, as a mesh of devices does."""
    boxes: list[Box] = [((), ())]
    for length, count in zip(shape, parts, strict=True):
        share = -(-length // count)
        cuts = [(at, min(share, length - at)) for at in range(0, length, share)]
        boxes = [((*o, at), (*s, n)) for o, s in boxes for at, n in cuts]
    return boxes


@dataclass
class Saved:
    tensors: dict[str, tuple[torch.Tensor, list[Box]]]
    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    files: int = 2

    def key(self, *path: object, nested: bool = True) -> str:
        """Return the key of a path; of a flattened optimizer, all behind the root was joined."""
        text = ".".join(map(str, path))
        self.paths[text] = path if nested else (path[0], ".".join(map(str, path[1:])))
        return text

    def write(self, directory: Path) -> Metadata:
        """Write the items round about over the files, then the index."""
        directory.mkdir(parents=True, exist_ok=True)
        held = [io.BytesIO() for _ in range(self.files)]
        stored: dict[MetadataIndex, _StorageInfo] = {}
        listed: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}

        def add(index: MetadataIndex, item: object) -> None:
            number = len(stored) % self.files
            file = held[number]
            start = file.tell()
            torch.save(item, file)
            length = file.tell() - start
            stored[index] = _StorageInfo(f"__{number}_0.distcp", start, length)

        for key, (tensor, boxes) in self.tensors.items():
            chunks = []
            for number, (offsets, sizes) in enumerate(boxes):
                part = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
                add(MetadataIndex(key, offsets, number), tensor[part].clone())
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            properties = TensorProperties.create_from_tensor(tensor)
            listed[key] = TensorStorageMetadata(properties, tensor.size(), chunks)
        for key, value in self.values.items():
            add(MetadataIndex(key), value)
            listed[key] = BytesStorageMetadata()
        for number, file in enumerate(held):
            (directory / f"__{number}_0.distcp").write_bytes(file.getvalue())
        metadata = Metadata(listed, self.paths or None, stored, version="1.0.0")
        save_index(metadata, directory)
        return metadata


def save_index(metadata: Metadata, directory: Path) -> None:
    """Write `.metadata` as torch does."""
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def adamw(
    shapes: Mapping[str, Sequence[int]],
    *,
    cut: Mapping[str, list[Box]] | None = None,
    buffers: Mapping[str, torch.Tensor] | None = None,
    groups: Sequence[Sequence[str]] | None = None,
    style: str = "torch",
    files: int = 2,
    step: float = 3.0,
    seed: int = 0,
) -> Saved:
    """Make up a model and its AdamW as `get_state_dict` returns them.

    Parameters
    ----------
    cut
        The boxes of a parameter and of its states; by default rows for two ranks.
    style
        `torch` (nested), `titan` (flattened, without `model.`), `tutorial` (`app.…`), or `both`
        (nested, with flattened param groups besides).
    """
    generator = torch.Generator().manual_seed(seed)
    cut = cut or {name: rows(shape, 2) for name, shape in shapes.items()}
    at: tuple[str, ...] = ("app",) if style == "tutorial" else ()
    optimizer = (*at, "optim" if style == "tutorial" else "optimizer")
    model = () if style == "titan" else (*at, "model")
    made = Saved({}, files=files)
    weights = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    for name, tensor in {**weights, **(buffers or {})}.items():
        boxes = cut.get(name) or [((0,) * tensor.ndim, tuple(tensor.shape))]
        made.tensors[made.key(*model, name)] = tensor, boxes
    nested = style != "titan"
    for number, params in enumerate(groups or [list(shapes)]):
        options = {"lr": 1e-3 / (number + 1), "betas": (0.9, 0.999), "eps": 1e-8}
        options |= {"weight_decay": 0.1 * (number == 0)}
        for name in params:
            held: dict[str, tuple[torch.Tensor, list[Box]]] = {
                state: (torch.rand(*shapes[name], generator=generator), cut[name])
                for state in ("exp_avg", "exp_avg_sq")
            }
            held["step"] = torch.tensor(step), rows((), 1)
            for state, value in held.items():
                made.tensors[made.key(*optimizer, "state", name, state, nested=nested)] = value
        by_name = params if style in ("titan", "both") else []
        for option, given in options.items():
            for name in by_name:
                key = made.key(*optimizer, "param_groups", name, option, nested=False)
                made.values[key] = given
            if nested:
                made.values[made.key(*optimizer, "param_groups", number, option)] = given
        if nested:
            made.values[made.key(*optimizer, "param_groups", number, "params")] = list(params)
    return made
