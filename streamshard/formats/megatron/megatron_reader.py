"""Reads `torch_dist` checkpoints of Megatron: a distributed checkpoint with a file `common.pt`.

By `dist_checkpointing` and `optimizer` of megatron-core 0.13.1, 0.15.3 and 0.16.1. Keys are

    decoder.layers.0.mlp.linear_fc1.weight                           of the model; a tensor of all
    decoder.layers.mlp.linear_fc1.weight                             layers has them in front
    optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc1.weight   a state, or a master weight
    optimizer.distributed.dp_group_idx_0.gbuf_idx_0.….exp_avg        buffers of `dp_reshardable`
    decoder.layers.0.mlp.linear_fc1._extra_state/shard_0_1           any object of a rank

`common.pt` has what all ranks share: the optimizer's param groups without their parameters.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from streamshard.errors import CorruptFileError, DisagreementError, IncompleteError
from streamshard.formats.dcp import dcp_names
from streamshard.formats.dcp.dcp_reader import Distributed, locate
from streamshard.formats.dcp.item_reader import ItemFiles, TensorPlaces
from streamshard.formats.dcp.metadata_reader import Index, SavedTensor, is_distributed, read_index
from streamshard.formats.dcp.optimizer_state import (
    STEP,
    SavedGroup,
    common_states,
    is_plain,
    number_in,
)
from streamshard.formats.dcp.state_names import StateKeys
from streamshard.formats.deepspeed.states import Elementwise, Plain, Scalar, State
from streamshard.formats.pickle.inert import Node, show, show_few
from streamshard.formats.pickle.node_checks import of_file, require_unrolled
from streamshard.formats.torch import torch_file
from streamshard.formats.torch.torch_tensor import tensor_of
from streamshard.io.entries import is_directory, is_file, names_in, open_readable, read_all
from streamshard.io.files import require_inside, require_regular
from streamshard.model import ITEMSIZE
from streamshard.sizes import counted

COMMON: Final = "common.pt"
CONFIG: Final = "metadata.json"
"""File that says in which form the checkpoint is; it is written last."""
LATEST: Final = "latest_checkpointed_iteration.txt"
"""File of a run directory that names its newest checkpoint."""
_WHAT: Final = "a distributed checkpoint of Megatron"
_STATE: Final = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
_BUFFER: Final = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\..+")
_OBJECT: Final = re.compile(r"(.+)/shard_[\d.]+_[\d.]+")
_MASTERS: Final = ("fp32_param", "param", "master_param")
"""States that are master weights."""
_OPTIMIZER: Final = "optimizer"
_NOT_OPTIONS: Final = frozenset({dcp_names.PARAMS, STEP})
_ITERATION: Final = re.compile(r"iter_\d+|release")
_BACKEND: Final = b'"sharded_backend"'
_LIMIT_CONFIG: Final = 4096
Shape = tuple[int, ...]


def is_megatron(directory: Path) -> bool:
    """Tell whether a directory is a distributed checkpoint with files of Megatron's own."""
    if not is_distributed(directory):
        return False
    config = directory / CONFIG
    return COMMON in names_in(directory) or (
        is_file(config) and _BACKEND in read_all(config, _LIMIT_CONFIG)
    )


def latest_of(run_dir: Path) -> Path | None:
    """Return the directory of the newest checkpoint of a run; None if none is named."""
    named = run_dir / LATEST
    if not is_directory(run_dir) or not is_file(named):
        return None
    # verl has a file of this name too, and other directories.
    if not any(map(_ITERATION.fullmatch, names_in(run_dir))):
        return None
    text = read_all(named, 64).decode("ascii", "replace").strip()
    if text == "release":
        return run_dir / text
    if not text.isascii() or not text.isdecimal():
        raise CorruptFileError(f"names no iteration: {show(text)}", path=named)
    return run_dir / f"iter_{int(text):07d}"


def open_megatron(root: Path) -> Distributed:
    """Read the index of a checkpoint, the headers of its items, and its common file."""
    require_inside(root / dcp_names.METADATA, root)
    index = read_index(root)
    if not is_file(root / COMMON):
        message = "missing, Megatron keeps the optimizer's steps in it"
        raise IncompleteError(f"{message}; copy it from the node of rank 0", path=root / COMMON)
    require_regular(root / COMMON, root)
    if not is_file(root / CONFIG):
        message = "missing; Megatron writes it last, so this save did not come to its end"
        raise IncompleteError(f"{message}: take an earlier checkpoint", path=root / CONFIG)
    require_regular(root / CONFIG, root)
    with of_file(root):
        (keys, unread, remarks), files = _sorted(index), ItemFiles(index)
        places = locate(index, keys, files)
        tensors = dict(index.tensors)
        for key, shape in index.flattened.items():
            if key in places:
                tensors[key], places[key] = _unflattened(key, tensors[key], places[key], shape)
        index = replace(index, tensors=tensors)
        _require_shapes(keys, index)
    optimizer = _Common.read(root / COMMON) if keys.states else _Common([], {}, ())
    return Distributed(
        root,
        index,
        keys,
        files.files,
        places,
        partial(_groups, keys, index, optimizer),
        _WHAT,
        (*remarks, *optimizer.remarks()),
        unread,
    )


def _sorted(index: Index) -> tuple[StateKeys, str, list[str]]:
    """Return a checkpoint's keys, why its optimizer is not read, and what else is not read."""
    # Nothing tells which parameters share a param group, as in a flattened optimizer.
    keys, masters = StateKeys(by_parameter=True), dict[str, str]()
    buffers: list[str] = []
    for key in index.tensors:
        if match := _STATE.fullmatch(key):
            state, name = match.groups()
            own = masters if state in _MASTERS else keys.states.setdefault(name, {})
            if own.setdefault(name if own is masters else state, key) != key:
                raise CorruptFileError(f"{state} of {show(name)} is in it twice")
        elif _BUFFER.fullmatch(key):
            buffers.append(key)
        else:
            keys.weights[key] = key
    for name in (*keys.states, *masters):
        if name not in keys.weights:
            raise CorruptFileError(f"the optimizer has states of {show(name)}, not in the model")
    modules = [name for name in masters if keys.weights[name] != masters[name]]
    keys.weights |= masters
    objects = (m[1] if (m := _OBJECT.fullmatch(k)) else k for k in index.values)
    unread = (
        f"Not read: the optimizer's state, {counted(len(buffers), 'flat buffer')} (saved as "
        "dp_reshardable) in which nothing tells where a parameter lies. To keep it, load the "
        "checkpoint into Megatron, and save it with dist-ckpt-optim-fully-reshardable."
    )
    return keys, unread if buffers else "", list(_remarks(modules, objects))


def _remarks(modules: Sequence[str], objects: Iterable[str]) -> Iterator[str]:
    if modules:
        count = counted(len(modules), "parameter")
        yield f"Not read: the model's own weights of {count} whose master weights are read."
    if kinds := sorted({name.rpartition(".")[2] for name in objects}):
        yield f"Not read, as these are objects of Megatron's ranks, not tensors: {show_few(kinds)}."


def _require_shapes(keys: StateKeys, index: Index) -> None:
    """Refuse states with other elements than their parameters."""
    for name, own in keys.states.items():
        shape = index.tensors[keys.weights[name]].shape
        for key in own.values():
            if index.tensors[key].shape != shape:
                message = f"{show(key)} is {list(index.tensors[key].shape)}, its parameter"
                raise CorruptFileError(f"{message} {list(shape)}")


@dataclass(frozen=True, slots=True)
class _Common:
    """What the common file tells of the optimizer."""

    steps: Sequence[int]
    options: Mapping[str, Node]
    """Those that all param groups have alike."""
    differing: Sequence[str]

    @classmethod
    def read(cls, path: Path) -> "_Common":
        with of_file(path):
            root = torch_file.read(path, 0).root
            held = root.get(_OPTIMIZER) if isinstance(root, dict) else None
            require_unrolled((held,))
            optimizers = list(_optimizers(held))
            listed = [optimizer[dcp_names.PARAM_GROUPS] for optimizer in optimizers]
            groups = [group for own in listed if isinstance(own, list) for group in own]
            if not groups or not all(isinstance(group, dict) for group in groups):
                raise CorruptFileError("lists no param groups of the optimizer")
            steps = [_step(path, group[STEP]) for group in groups if group.get(STEP) is not None]
            for optimizer in optimizers:
                state = optimizer.get(dcp_names.STATE)
                if isinstance(state, dict) and "common_step" in state:
                    steps.append(_step(path, state["common_step"]))
            if len(set(steps)) > 1:
                few = " and ".join(map(str, sorted(set(steps))[:2]))
                raise DisagreementError(f"its param groups are at different steps, {few}")
        first, *other_groups = groups
        options = {key: value for key, value in first.items() if key not in _NOT_OPTIONS}
        every = dict.fromkeys(key for group in groups for key in group if key not in _NOT_OPTIONS)
        shared_options = {
            key: value
            for key, value in options.items()
            if is_plain(value) and all(_is_same(other, key, value) for other in other_groups)
        }
        return cls(steps, shared_options, [key for key in every if key not in shared_options])

    def remarks(self) -> Iterator[str]:
        if self.differing:
            yield (
                f"Not read: {show_few(self.differing)}, options in which Megatron's param groups "
                "differ: it does not save which parameters a group has."
            )


def _is_same(group: Mapping[str, Node], key: str, value: Node) -> bool:
    return key in group and repr(group[key]) == repr(value)


def _optimizers(node: Node) -> Iterator[Mapping[str, Node]]:
    """Yield the state dicts of torch's optimizers: one, or those of chained ones by number."""
    if not isinstance(node, dict):
        return
    if dcp_names.PARAM_GROUPS in node:
        yield node
    elif _OPTIMIZER in node:
        yield from _optimizers(node[_OPTIMIZER])
    else:
        for key, value in node.items():
            if isinstance(key, int):
                yield from _optimizers(value)


def _step(path: Path, node: Node) -> int:
    number = node
    if (tensor := tensor_of(node)) is not None and tensor.numel == 1:
        with open_readable(path) as source:
            data = source.read_at(tensor.offset, ITEMSIZE[tensor.dtype])
        number = number_in(STEP, Scalar(tensor.dtype, (), data))
    is_whole = isinstance(number, int) or (isinstance(number, float) and number.is_integer())
    if isinstance(number, bool) or not is_whole:
        raise CorruptFileError(f"{show(node)} is not a count of steps")
    return int(number)


def _groups(keys: StateKeys, index: Index, optimizer: _Common) -> list[SavedGroup]:
    states: dict[str, dict[str, State]] = {
        name: {s: Elementwise(index.tensors[key].dtype) for s, key in keys.states[name].items()}
        for name in keys.weights
        if name in keys.states
    }
    if not states:
        return []
    step = {STEP: Plain(optimizer.steps[0])} if optimizer.steps else {}
    common = {**step, **(common_states(states) or {})}
    return [SavedGroup(tuple(states), optimizer.options, common)]


def _unflattened(
    name: str, saved: SavedTensor, places: TensorPlaces, shape: Shape
) -> tuple[SavedTensor, TensorPlaces]:
    """Return a tensor in its own shape, cut into the boxes that make up the ranges.

    Megatron's distributed optimizer flattens and cuts boxes (`fully_sharded_model_space`): a tensor
    of [X, Y] in boxes of [x, y] is listed as one of [X / x, Y / y, x * y], and an item holds a
    range of a flattened box (`dist_checkpointing/strategies/torch.py` of megatron-core 0.13.1 and
    0.15.3; 0.16 saves no such tensors).
    """
    counts = saved.shape[:-1]
    box = tuple(length // max(1, count) for length, count in zip(shape, counts, strict=False))
    evenly = tuple(length * count for length, count in zip(box, counts, strict=False))
    if (
        not shape
        or len(counts) != len(shape)
        or evenly != shape
        or math.prod(box) != saved.shape[-1]
    ):
        message = f"{show(name)} of {show(shape)} is said to be flattened to {show(saved.shape)}"
        raise CorruptFileError(message)
    boxes: list[tuple[Shape, Shape]] = []
    places_in: list[tuple[int, int]] = []
    columns = saved.offsets.tolist(), saved.sizes.tolist()
    for item, ((*where, start), (*_, numel)) in enumerate(zip(*columns, strict=True)):
        corner = tuple(at * length for at, length in zip(where, box, strict=True))
        for offset, sizes, first in _boxes_of_range(box, start, start + numel):
            begin = tuple(a + b for a, b in zip(corner, offset, strict=True))
            boxes.append((begin, sizes))
            places_in.append((item, first - start))
    items, within = np.array(places_in, dtype=np.int64).reshape(-1, 2).T
    held = np.stack([saved.items.file, saved.items.offset, saved.items.nbytes], axis=1)[items]
    found = places.offset[items] + within * ITEMSIZE[saved.dtype]
    tensor = SavedTensor.of(saved.dtype, shape, boxes, held.tolist())
    return tensor, TensorPlaces(places.file[items], found)


def _boxes_of_range(box: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape, int]]:
    """Divide a range of the elements of a box into boxes: where, of which lengths, first element.

    >>> list(_boxes_of_range((3, 4), 2, 9))
    [((0, 2), (1, 2), 2), ((1, 0), (1, 4), 4), ((2, 0), (1, 1), 8)]
    """
    if len(box) == 1:
        yield (start,), (stop - start,), start
        return
    row = math.prod(box[1:])
    at = start
    while at < stop:
        number, inside = divmod(at, row)
        if inside or stop - at < row:  # a part of a row
            end = min((number + 1) * row, stop)
            for offset, sizes, found in _boxes_of_range(box[1:], inside, end - number * row):
                yield (number, *offset), (1, *sizes), found + number * row
        else:
            count = (stop - at) // row
            end = at + count * row
            yield (number, *[0] * (len(box) - 1)), (count, *box[1:]), at
        at = end
