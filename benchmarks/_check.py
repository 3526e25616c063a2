"""Checks a result element by element against the function that its source was made by.

Streams: files are mapped, arrays read chunk by chunk, so that neither size nor layout matters.
"""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr

from benchmarks._fabricate import SCRIPT, pieces
from benchmarks._layout import TAG, Leaf, NativeLayout
from benchmarks._model import MASTER, MODULE, STATES, Model, Run, Shape, values
from benchmarks._stand_ins import deepspeed_stand_ins


def native_differences(
    run_dir: Path, model: Model, *, stage: int, world_size: int
) -> Iterator[str]:
    """Yield every difference between a run directory and what DeepSpeed would have saved there."""
    expected = dict(NativeLayout(model, stage, world_size).files())
    listed = {*expected, SCRIPT[0], "latest"}
    found = {p.relative_to(run_dir).as_posix() for p in run_dir.rglob("*") if p.is_file()}
    if listed != found:
        yield f"{run_dir}: missing {sorted(listed - found)}, surplus {sorted(found - listed)}"
        return
    for relative, tree in expected.items():
        with deepspeed_stand_ins():
            loaded = torch.load(run_dir / relative, mmap=True, weights_only=False)
        yield from _node_differences(tree, loaded, relative)
    for relative, content in ((SCRIPT[0], SCRIPT[1]), ("latest", TAG.encode())):
        if (run_dir / relative).read_bytes() != content:
            yield f"{relative}: other content"


def _node_differences(tree: Any, loaded: Any, at: str) -> Iterator[str]:  # noqa: ANN401
    if isinstance(tree, Leaf):
        yield from _tensor_differences(tree, loaded, at)
    elif type(tree) is not type(loaded):
        yield f"{at}: {type(loaded).__name__} for {type(tree).__name__}"
    elif isinstance(tree, dict):
        if list(tree) != list(loaded):
            yield f"{at}: keys {list(loaded)} for {list(tree)}"
        for key in tree.keys() & loaded.keys():
            yield from _node_differences(tree[key], loaded[key], f"{at}[{key!r}]")
    elif isinstance(tree, list):
        if len(tree) != len(loaded):
            yield f"{at}: {len(loaded)} items for {len(tree)}"
        for index, (inner, other) in enumerate(zip(tree, loaded, strict=False)):
            yield from _node_differences(inner, other, f"{at}[{index}]")
    elif (vars(tree) if hasattr(tree, "__dict__") else tree) != (
        vars(loaded) if hasattr(loaded, "__dict__") else loaded
    ):
        yield f"{at}: {loaded!r:.80} for {tree!r:.80}"


def _tensor_differences(leaf: Leaf, tensor: torch.Tensor, at: str) -> Iterator[str]:
    said = (tensor.dtype, tuple(tensor.shape), tensor.requires_grad)
    wanted = (leaf.stored.dtype, leaf.shape, leaf.requires_grad)
    if said != wanted:
        yield f"{at}: {said} for {wanted}"
        return
    flat, position = tensor.detach().flatten(), 0
    for run in pieces(_cut(leaf)):
        yield from _piece_differences(run, flat[position : position + run.numel], at, position)
        position += run.numel


def _cut(leaf: Leaf) -> tuple[Run, ...]:
    """Return the part of a storage's runs that a tensor over it sees."""
    lower, upper, at, kept = leaf.start, leaf.start + math.prod(leaf.shape), 0, []
    for run in leaf.stored.runs:
        first, stop = max(at, lower), min(at + run.numel, upper)
        if stop > first:
            kept.append(Run(run.state, run.name, run.start + first - at, stop - first))
        at += run.numel
    return tuple(kept)


def _piece_differences(run: Run, actual: torch.Tensor, at: str, position: int) -> Iterator[str]:
    expected = values(run, actual.dtype)
    bits = {2: torch.int16, 4: torch.int32}[actual.element_size()]
    if torch.equal(actual.view(bits), expected.view(bits)):
        return
    unequal = (actual.view(bits) != expected.view(bits)).nonzero().flatten()
    first = int(unequal[0])
    wrong, right = actual[first].item(), expected[first].item()
    many = f"{len(unequal)} of {run.numel} differ"
    yield f"{at}: element {position + first} is {wrong!r} for {right!r} of {run}; {many}"


def store_differences(store: Path, model: Model, *, stage: int) -> Iterator[str]:
    """Yield every difference between a store's arrays and the model, as zarr-python reads them."""
    root = zarr.open_group(store, mode="r")
    for path, shape, dtype, run in _arrays(model, stage):
        array = root[path]
        stored = "uint16" if dtype == torch.bfloat16 else "float32"
        if not isinstance(array, zarr.Array) or (array.shape, str(array.dtype)) != (shape, stored):
            yield f"{path}: {array} for {shape} {stored}"
            continue
        for selection in _chunks(array):
            block = np.ascontiguousarray(array[selection])
            start = _first_element(shape, selection)
            actual = torch.from_numpy(block).view(dtype).flatten()
            whole = (Run(run.state, run.name, start, block.size),)
            for piece in pieces(whole):
                at = piece.start - start
                yield from _piece_differences(
                    piece, actual[at : at + piece.numel], path, piece.start
                )


def _arrays(model: Model, stage: int) -> Iterator[tuple[str, Shape, torch.dtype, Run]]:
    for name, shape in model.trained.items():
        for state in STATES:
            yield f"state/{state}/{name}", shape, torch.float32, Run(state, name, 0, 0)
        if stage < 3:
            yield f"module/{name}", shape, torch.bfloat16, Run(MASTER, name, 0, 0)
    for name, shape in model.frozen.items():
        yield f"module/{name}", shape, torch.bfloat16, Run(MODULE, name, 0, 0)
    for name, shape in model.buffers.items():
        yield f"module/{name}", shape, torch.float32, Run(MODULE, name, 0, 0)


def exported_differences(directory: Path, model: Model) -> Iterator[str]:
    """Yield every difference between exported safetensors files in fp32 and the model."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= _safetensors(path)
    expected = {
        **{name: (shape, MASTER, torch.float32) for name, shape in model.trained.items()},
        **{name: (shape, MODULE, torch.bfloat16) for name, shape in model.frozen.items()},
        **{name: (shape, MODULE, torch.float32) for name, shape in model.buffers.items()},
    }
    if found.keys() != expected.keys():
        yield f"{directory}: {sorted(found.keys() ^ expected.keys())} are there or not"
        return
    for name, (shape, state, dtype) in expected.items():
        if found[name].shape != shape:
            yield f"{name}: {tuple(found[name].shape)} for {shape}"
            continue
        for run in pieces((Run(state, name, 0, math.prod(shape)),)):
            piece = found[name].flatten()[run.start : run.start + run.numel]
            narrow = piece.to(dtype)
            if not torch.equal(narrow.float(), piece):
                yield f"{name}: not what {dtype} can hold"
            yield from _piece_differences(run, narrow, name, run.start)


def _safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a file of float32, mapped."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    for name, held in header.items():
        if name != "__metadata__":
            first, stop = held["data_offsets"]
            count = (stop - first) // np.dtype(np.float32).itemsize
            flat = np.memmap(path, np.float32, "c", 8 + length + first, (count,))
            yield name, torch.from_numpy(flat).reshape(held["shape"])


def _chunks(array: Any) -> Iterator[tuple[slice, ...]]:  # noqa: ANN401
    """Yield each chunk's selection; a chunk is a contiguous range, as the store promises."""
    steps = (
        range(0, length, chunk) for length, chunk in zip(array.shape, array.chunks, strict=True)
    )
    for corner in itertools.product(*steps):
        yield tuple(slice(at, at + n) for at, n in zip(corner, array.chunks, strict=True))


def _first_element(shape: Shape, selection: tuple[slice, ...]) -> int:
    corner = [part.start for part in selection]
    return int(np.ravel_multi_index(corner, shape)) if corner else 0
