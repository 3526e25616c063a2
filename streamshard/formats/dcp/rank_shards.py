"""Reads the safetensors files of ranks, as PyTorch's HuggingFaceStorageWriter saves them.

`shard-00002-model-00001-of-00001.safetensors` is of the second rank. Its header says where in the
whole tensor each part begins. The whole shape is recorded nowhere: a tensor ends where its last
part does (torch 2.13: `_hf_utils.py`, `hf_storage.py`). With `distributed_checkpoint=True`
transformers (5.24: `distributed/checkpoint.py`) saves a model so, and its optimizer as an ordinary
distributed checkpoint, which is read if it lies next to these files.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final

from streamshard.errors import CorruptFileError, DisagreementError, IncompleteError, Option
from streamshard.formats import safetensors_file
from streamshard.formats.dcp import dcp_names
from streamshard.formats.dcp.dcp_reader import Distributed, locate
from streamshard.formats.dcp.item_reader import ItemFiles, TensorPlaces
from streamshard.formats.dcp.metadata_reader import (
    Index,
    SavedTensor,
    is_distributed,
    join,
    read_index,
)
from streamshard.formats.dcp.optimizer_state import SavedOptimizer
from streamshard.formats.dcp.state_names import StateKeys, sort_keys
from streamshard.formats.pickle.inert import show
from streamshard.formats.pickle.node_checks import LIMIT_NUMEL, name_of, of_file
from streamshard.formats.safetensors_file import Stored
from streamshard.io.entries import identify, is_directory, paths_in
from streamshard.io.files import require_inside, require_regular
from streamshard.model import SourceFile
from streamshard.sizes import counted

_SHARD: Final = re.compile(r"shard-(\d{5,9})-model-(\d{5,9})-of-(\d{5,9})\.safetensors")
_WHAT: Final = "a distributed checkpoint in safetensors files of ranks"


def is_of_shards(directory: Path) -> bool:
    """Tell whether a directory holds such files."""
    return is_directory(directory) and any(_SHARD.fullmatch(p.name) for p in paths_in(directory))


def files_of(directory: Path) -> list[Path]:
    """List the files of all ranks, rank by rank; those of a rank that lacks are asked for."""
    paths = {
        (int(match[1]), int(match[2]), int(match[3])): path
        for path in sorted(paths_in(directory))
        if (match := _SHARD.fullmatch(path.name))
    }
    ranks, parts, counts = (set(column) for column in zip(*paths, strict=True))
    if len(counts) > 1:
        few = " and ".join(f"-of-{number:05d}" for number in sorted(counts)[:2])
        message = f"files of two saves, {few}: move those of one elsewhere"
        raise DisagreementError(message, path=directory)
    for what, have, last in (("shard", ranks, max(ranks)), ("model", parts, max(counts))):
        lacking = next(number for number in count(1) if number not in have)
        if lacking < last or (what == "model" and lacking == last):
            message = f"no file {what}-{lacking:05d} of {last}; copy it from the node that saved it"
            raise IncompleteError(message, path=directory)
    return [paths[key] for key in sorted(paths)]


def open_shards(directory: Path) -> Distributed:
    """Read the headers of all ranks' files, and the optimizer next to them."""
    model, files = _read_model(directory)
    optimizer = Index({}, {}, {}, ())
    if is_distributed(directory):
        require_inside(directory / dcp_names.METADATA, directory)
        optimizer = read_index(directory)
    with of_file(directory):
        index, items = join(optimizer, model), ItemFiles(optimizer)
        keys = sort_keys(index, model.tensors.keys())
        has_checked = _require_ends(directory, keys, index)
        places = locate(optimizer, keys, items)
        for name in model.tensors:
            held = index.tensors[name].items
            places[name] = TensorPlaces(held.file, held.offset)
        groups = SavedOptimizer(index, keys, items, places).groups
    remarks = () if has_checked else (_untold(len(files)),)
    joined = (*items.files, *files)
    return Distributed(directory, index, keys, joined, places, groups, _WHAT, remarks, boxes_in="")


def _untold(files: int) -> str:
    return (
        f"Nothing in these files tells how many ranks saved them. There is no gap in "
        f"{counted(files, 'file')}; but if those of the last ranks are missing, tensors end too "
        f"early. 'streamshard export' with {Option('like')} checks the names and shapes."
    )


def _require_ends(directory: Path, keys: StateKeys, index: Index) -> bool:
    """Refuse weights that end before their states do; tell whether any state told."""
    has_checked = False
    for name, states in keys.states.items():
        weight = index.tensors[keys.weights[name]].shape
        for key in states.values():
            state = index.tensors[key].shape if key in index.tensors else ()
            if not weight or len(state) != len(weight):
                continue
            if any(whole > seen for whole, seen in zip(state, weight, strict=True)):
                message = f"{show(key)} is {list(state)}, the parts of its weight end at"
                message = f"{message} {list(weight)}: are the files of the last ranks missing?"
                message = f"{message} Copy them from the nodes that saved them"
                raise IncompleteError(message, path=directory)
            has_checked = True
    return has_checked


@dataclass(slots=True)
class _SeenTensor:
    """A tensor by the parts of it that were found so far."""

    first: Path
    dtype: str
    ends: list[int]
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    items: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, file: int, stored: Stored, begin: Sequence[int], path: Path) -> None:
        tensor, what = stored.tensor, show(stored.tensor.name)
        if len(begin) != len(tensor.shape):
            raise CorruptFileError(f"its part of {what}, {list(tensor.shape)}, begins at {begin}")
        if (tensor.dtype, len(begin)) != (self.dtype, len(self.ends)):
            ours, theirs = f"{tensor.dtype} of {len(begin)}", f"{self.dtype} of {len(self.ends)}"
            message = f"{what} is {ours} dimensions, in {self.first.name} {theirs}"
            raise DisagreementError(message, path=path)
        both = zip(begin, tensor.shape, strict=True)
        self.ends = [max(e, b + size) for e, (b, size) in zip(self.ends, both, strict=True)]
        if 0 not in tensor.shape:
            self.boxes.append((tuple(begin), tensor.shape))
            self.items.append((file, stored.offset, tensor.nbytes))


def _read_model(directory: Path) -> tuple[Index, tuple[SourceFile, ...]]:
    paths = files_of(directory)
    parts: dict[str, _SeenTensor] = {}
    files: list[SourceFile] = []
    for number, path in enumerate(paths):
        require_regular(path, directory)
        files.append(identify(path))
        stored, begins = safetensors_file.read_parts(path)
        with of_file(path):
            for one in stored:
                name = name_of(one.tensor.name)
                tensor = _SeenTensor(path, one.tensor.dtype, [0] * len(one.tensor.shape))
                parts.setdefault(name, tensor).add(number, one, _begin(name, begins), path)
    for name, tensor in parts.items():
        if math.prod(tensor.ends) > LIMIT_NUMEL:
            message = f"the parts of {show(name)} reach to {tensor.ends}, which no tensor does"
            raise CorruptFileError(message, path=directory)
    tensors = {
        name: SavedTensor.of(tensor.dtype, tuple(tensor.ends), tensor.boxes, tensor.items)
        for name, tensor in parts.items()
    }
    where = {name: (name,) for name in tensors}
    return Index(tensors, {}, where, tuple(paths)), tuple(files)


def _begin(name: str, begins: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    if name not in begins:
        raise CorruptFileError(f"does not say where its part of {show(name)} begins")
    return begins[name]
