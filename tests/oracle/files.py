"""Compare two native checkpoint tag directories file by file, value by value."""

import hashlib
import math
from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import combinations
from pathlib import Path
from typing import Any, TypeAlias

import torch

from streamshard.formats.deepspeed.names import QUANTISED
from streamshard.operations.compact.tag_checks import padding_alike
from streamshard.source.source import open_source
from tests.oracle.values import value_differences

Content: TypeAlias = Any
"""Whatever was unpickled: its keys and their types are DeepSpeed's."""


def digests(tree: Path) -> dict[str, str]:
    """Every file below `tree` with the digest of its bytes."""
    return {
        str(path.relative_to(tree)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(tree.rglob("*"))
        if path.is_file()
    }


def padding_found(run_dir: Path) -> int:
    """Hold an engine's padding below stage 3 to be one value; returns how many bytes it has."""
    told = padding_alike(open_source(run_dir))
    return int(told.removesuffix(" bytes").replace(",", ""))


def file_differences(left: Path, right: Path) -> list[str]:
    """Every difference between two tag directories, with the path that leads to it.

    Ignored are two things only. The padding of ZeRO-3 masters and frozen shards: DeepSpeed leaves
    uninitialised memory in it. And the attributes DeepSpeed hangs on ZeRO-3 masters (``ds_id``):
    they count the engines made in a process, and no loader reads them.
    """
    names = {path.name for path in left.iterdir()}, {path.name for path in right.iterdir()}
    found = [f"{name}: only in {left}" for name in sorted(names[0] - names[1])]
    found += [f"{name}: only in {right}" for name in sorted(names[1] - names[0])]
    for name in sorted(names[0] & names[1]):
        if not name.endswith(".pt"):
            if (left / name).read_bytes() != (right / name).read_bytes():
                found.append(f"{name}: bytes differ")
            continue
        contents = load_comparable(left / name), load_comparable(right / name)
        found += value_differences(*contents, name)
        found += _aliasing_differences(*contents, name)
    return found


def load_comparable(path: Path) -> Content:
    """A file's content with what may be anything set to zero."""
    content = torch.load(path, map_location="cpu", weights_only=False)
    optimizer = content.get("optimizer_state_dict")
    for states in _states(optimizer or {}):
        # bitsandbytes wraps some of them, and loads them in either form.
        states.update(states.pop(QUANTISED, {}))
    if optimizer is not None and optimizer.get("zero_stage") == 3:
        _clear_padding_of_masters(optimizer, path)
    elif content.get("frozen_param_fragments") is not None:
        _clear_padding_of_frozen(content, path)
    return content


def _states(optimizer: dict[str, Any]) -> list[dict[str, Any]]:
    inner = optimizer.get("base_optimizer_state") or optimizer.get("optimizer_state_dict")
    return [*inner["state"].values()] if isinstance(inner, dict) and "state" in inner else []


def _clear_padding_of_masters(optimizer: dict[str, Any], path: Path) -> None:
    """Zero each parameter's padding in this rank's flat masters."""
    count, rank = optimizer["partition_count"], _data_parallel_rank(path)
    sharing = optimizer.get("ds_zero_partition_groups") or [
        {"partition_count": count, "partition_rank": rank} for _ in optimizer["fp32_flat_groups"]
    ]
    model_file = path.with_name(
        path.name.removeprefix("bf16_").replace("optim_states", "model_states")
    )
    shapes = torch.load(model_file, map_location="cpu", weights_only=False)["param_shapes"]
    for sub_group, flat, own in zip(shapes, optimizer["fp32_flat_groups"], sharing, strict=True):
        offset = 0
        for shape in sub_group.values():
            shard = -(-math.prod(shape) // own["partition_count"])
            real = _real_numel(math.prod(shape), shard, own["partition_rank"])
            flat.detach()[offset + real : offset + shard] = 0
            offset += shard
        assert offset == flat.numel(), f"{path.name}: {flat.numel()} masters, shapes say {offset}"


def _clear_padding_of_frozen(content: dict[str, Any], path: Path) -> None:
    """Zero the padding of this rank's frozen shards; stage 2 keeps them whole, without any."""
    rank = _data_parallel_rank(path) if path.name.startswith("zero_pp_rank_") else 0
    for name, fragment in content["frozen_param_fragments"].items():
        full = math.prod(content["frozen_param_shapes"][name])
        fragment.detach().flatten()[_real_numel(full, fragment.numel(), rank) :] = 0


def _real_numel(full: int, shard: int, rank: int) -> int:
    """How many of the `shard` elements of `rank` belong to the parameter's `full` ones."""
    return min(max(full - rank * shard, 0), shard)


def _data_parallel_rank(path: Path) -> int:
    return int(path.name.partition("zero_pp_rank_")[2].partition("_")[0])


def _aliasing_differences(left: object, right: object, name: str) -> Iterator[str]:
    """Pairs of tensors that share elements in one file and not in the other.

    A tied weight must not become two weights, and two states must not come to share one ``step``:
    torch keeps what is shared in a file shared in the process that loads it.
    """
    shared = _overlaps(left), _overlaps(right)
    for pair in sorted(shared[0] - shared[1]):
        yield f"{name}: {' and '.join(pair)} share memory on the left only"
    for pair in sorted(shared[1] - shared[0]):
        yield f"{name}: {' and '.join(pair)} share memory on the right only"


def _overlaps(content: object) -> set[tuple[str, str]]:
    """The pairs of tensors in `content` that have bytes of one storage in common."""
    by_storage: dict[int, list[tuple[int, int, str]]] = {}
    for path, tensor in _tensors(content, ""):
        if tensor.numel():
            span = 1 + sum(
                (size - 1) * int(stride)
                for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            start = int(tensor.storage_offset()) * tensor.element_size()
            stop = start + span * tensor.element_size()
            storage = tensor.untyped_storage().data_ptr()
            by_storage.setdefault(storage, []).append((start, stop, path))
    return {
        (min(a, b), max(a, b))
        for extents in by_storage.values()
        for (a_start, a_stop, a), (b_start, b_stop, b) in combinations(extents, 2)
        if a_start < b_stop and b_start < a_stop
    }


def _tensors(value: object, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, below in value.items():
            yield from _tensors(below, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, below in enumerate(value):
            yield from _tensors(below, f"{path}[{index}]")
    elif hasattr(value, "__dict__") and not isinstance(value, Enum | type):
        yield from _tensors(vars(value), f"{path}.__dict__")
