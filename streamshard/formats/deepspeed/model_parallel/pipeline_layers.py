"""Reads the files of a pipeline's layers, which hold its buffers, frozen and 16-bit weights.

A layer's file names tensors as the layer does. The stages' files list them under names that are
unique in the model, as `PipelineModule.state_dict` has them: these begin with the layer's number
(`12.`), or, for a module that several layers share, with its key (`tied_modules.embed.`). Which
layers share a module is in no file. But no stage lists tensors under such a layer's number, and
the layer's file has the names and shapes of the module. Its values are compared with those of the
module before anything is made of them (`LayerCopy`). Where several tensor-parallel ranks share a
stage, each has a file of each layer; what one rank has is read like a pipeline of its own.
"""

import math
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final, Protocol

from streamshard.errors import Option, UnsupportedError, raise_first
from streamshard.formats.checkpoint import Checkpoint, LayerFile, ModuleEntry
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.model_parallel.missing_layers import listed_in, missing_layers
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import LAYER_FILE, degrees_of
from streamshard.formats.deepspeed.read.model_files import ModelFile
from streamshard.formats.deepspeed.read.module_reader import ModuleReader
from streamshard.formats.deepspeed.read.rank_files import require_dict
from streamshard.formats.pickle.inert import Node, show_few
from streamshard.formats.pickle.node_checks import of_file
from streamshard.formats.torch import torch_file
from streamshard.formats.torch.torch_tensor import Storage, make_tensor, tensor_of
from streamshard.formats.torch.tree_copy import copied
from streamshard.io.readable import Readable
from streamshard.model import BLOB, FILE, MASTER, LogicalTensor, Note, Whole

_PREFIX: Final = re.compile(r"(tied_modules\.[^.]+\.|\d+\.)")
_TIED: Final = "tied_modules."


@dataclass(frozen=True, slots=True)
class LayerCopy:
    """A tensor of a layer's file that must hold what another place holds of the same tensor."""

    path: Path
    """The layer's file."""
    name: str
    dtype: str
    numel: int
    row: int
    """Row of the cutting that says where it is."""
    like: int
    """Row of what it must be equal to: the master weights, of which it is a cast, or a tensor of
    the first file that has it."""
    like_dtype: str


@dataclass(frozen=True, slots=True)
class TensorInFile:
    """A tensor that lies in one piece in a file of a layer."""

    file: int
    """Number of the logical tensor that has the file's bytes."""
    offset: int
    """Byte offset in the file."""
    numel: int
    dtype: str


class KeptFiles(Protocol):
    """The files that a source keeps, wherever their bytes are."""

    def path(self, file: int) -> Path:
        """Return what messages call the file with this number of its logical tensor."""

    def open(self, file: int) -> AbstractContextManager[Readable]:
        """Open the file with this number."""


def with_layers(
    checkpoint: Checkpoint, kept: KeptFiles
) -> tuple[Checkpoint, Sequence[TensorInFile], Sequence[LayerCopy]]:
    """Return a pipeline's checkpoint as if the stages' modules had the tensors of its layers.

    The bytes of the layers' files are blobs of it. With it come the places of the tensors that are
    after those of the stages, and then of the copies; and these.
    """
    files = sorted(_files(checkpoint, kept), key=lambda file: file.number)
    # Those of a tag have been checked on opening, those in a store have not.
    raise_first(
        missing_layers(
            PurePosixPath(checkpoint.tag),
            [listed_in(model_part) for model_part in checkpoint.model_parts],
            [file.path.name for file in files],
        )
    )
    degree = degrees_of(checkpoint).tensor
    ranks = [_OneRank(checkpoint, rank, degree) for rank in range(degree)]
    # The bytes of the layers' files are no sidecars of what has their tensors.
    tensors = [
        replace(t, state=BLOB) if t.state == FILE and _layer_in(t.name) else t
        for t in checkpoint.tensors
    ]
    parts: list[TensorInFile] = []
    layers: list[LayerFile] = []
    entries: dict[int, list[ModuleEntry]] = defaultdict(list)
    for rank in ranks:
        rank.take([file for file in files if file.tensor_rank == rank.number], kept)
        layers += rank.assign(entries, tensors, parts)
    index, copies = checkpoint.tensor_index(), list[LayerCopy]()
    for copy, part in (found for rank in ranks for found in rank.copies(index, tensors)):
        # Copies lie after the tensors, and are none of the checkpoint's.
        copies.append(replace(copy, row=len(tensors) + len(copies)))
        parts.append(part)
    notes = dict.fromkeys(note for rank in ranks for note in rank.notes())
    pipeline = replace(
        checkpoint,
        tensors=tuple(tensors),
        model_parts=tuple(
            replace(model_part, module=tuple(entries[number]))
            for number, model_part in enumerate(checkpoint.model_parts)
        ),
        layers=tuple(layers),
        files=tuple(file for file in checkpoint.files if not _layer_in(file.path)),
        notes=(*checkpoint.notes, *map(Note, notes)),
    )
    return pipeline, parts, copies


def _files(checkpoint: Checkpoint, kept: KeptFiles) -> Iterator["_File"]:
    for number, tensor in enumerate(checkpoint.tensors):
        match = _layer_in(tensor.name) if tensor.state == FILE else None
        if match is not None:
            yield _File(int(match[1]), int(match[2] or 0), kept.path(number), number)


def refilled(
    layers: Sequence[LayerFile],
    tensors: Sequence[LogicalTensor],
    fill: Callable[[LogicalTensor, Storage], Storage],
    what: Option | Path,
) -> tuple[LayerFile, ...]:
    """Return files of layers, or of experts, with other tensors in the place of theirs.

    `tensors`: those of their checkpoint, which `what` names in messages.
    `fill`: returns the storage of another tensor for one of them, and its storage.
    """

    def storage(saved: Storage) -> Storage:
        if not isinstance(saved.content, Whole):
            message = "has a file of a layer with a state that is no tensor of the model"
            raise UnsupportedError(f"{what}: {message}")
        return fill(tensors[saved.content.tensor], saved)

    for layer in layers:
        if layer.state is None:
            message = f"{what}, {layer.name}: of a module that several layers share, which are"
            raise UnsupportedError(f"{message} alike: not known which, so it cannot be written")
    states = copied(tuple(layer.state for layer in layers), storage)
    return tuple(replace(layer, state=state) for layer, state in zip(layers, states, strict=True))


def as_one_module(checkpoint: Checkpoint) -> Checkpoint:
    """Return a pipeline's only stage as if its module were in the model file, not in layers."""
    model_part = checkpoint.model_parts[0]
    buffers = [entry.name for entry in model_part.module if entry.kind == "buffer"]
    overrides: dict[str, Node] = {
        names.MODULE_STATE: {},
        names.BUFFER_NAMES: buffers,
        names.SHARED_PARAMS: {},
    }
    state = {key: overrides.get(key, node) for key, node in model_part.model_state.items()}
    return replace(checkpoint, model_parts=(replace(model_part, model_state=state),), layers=())


def beginning_of(name: str) -> str | None:
    """Return the number or the key with which the name of a layer's tensor begins, if it does.

    >>> beginning_of("12.bias"), beginning_of("tied_modules.embed.weight"), beginning_of("bias")
    ('12.', 'tied_modules.embed.', None)
    """
    match = _PREFIX.match(name)
    return None if match is None else match[1]


def in_order(entries: Sequence[ModuleEntry]) -> tuple[ModuleEntry, ...]:
    """Sort entries as the state dict of a pipeline on one stage has them."""
    return tuple(sorted(entries, key=lambda entry: order_of(entry.name)))


def order_of(name: str) -> tuple[int, int]:
    """Return the place of a tensor's layer: shared modules come first, then layer by layer.

    >>> sorted(["10.bias", "2.bias", "tied_modules.embed.weight"], key=order_of)
    ['tied_modules.embed.weight', '2.bias', '10.bias']
    """
    first = name.partition(".")[0]
    return (0, 0) if name.startswith(_TIED) else (1, int(first) if first.isdecimal() else -1)


@dataclass(frozen=True, slots=True)
class _File:
    """The file of a layer, or of one tensor-parallel rank's part of it."""

    number: int
    """Of the layer."""
    tensor_rank: int
    path: Path
    file: int
    """Number of the logical tensor that has its bytes."""

    def read(self, kept: KeptFiles, *, with_checksums: bool) -> Mapping[str, Node]:
        """Read the layer's state dict; `with_checksums`, where torch recorded none."""
        with kept.open(self.file) as content:
            layer = require_dict(torch_file.read_content(content, self.path, self.file), self.path)
            for storage in layer.storages.values() if with_checksums else ():
                if storage.crc32 is None:
                    storage.crc32 = torch_file.checksum_in(content, storage, self.path)
        state: Mapping[str, Node] = layer.root
        return state


class _OneRank:
    """Reads the layers' files of one tensor-parallel rank of each stage."""

    def __init__(self, checkpoint: Checkpoint, rank: int, degree: int) -> None:
        self.number = rank
        self._checkpoint = checkpoint
        states = [model_part.model_state for model_part in checkpoint.model_parts]
        self._shared: dict[str, str] = {
            k: v for one in states for k, v in (one.get(names.SHARED_PARAMS) or {}).items()
        }
        """Tied names, as the stages list them."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        """Of trained parameters."""
        self._known: dict[str, dict[str, int]] = defaultdict(dict)
        """Beginning of names → the names that stages list, each with its first model part."""
        self._buffers: dict[str, None] = {}
        for number in range(rank, len(checkpoint.model_parts), degree):
            model_part = checkpoint.model_parts[number]
            trained = checkpoint.master_shapes(model_part)
            self._shapes |= trained
            listed = model_part.model_state.get(names.BUFFER_NAMES) or []
            self._buffers |= dict.fromkeys(listed)
            for name in (*trained, *listed):
                if beginning := beginning_of(name):
                    self._known[beginning].setdefault(name, number)
        self._module: dict[str, Node] = {}
        """The state dict of the whole module."""
        self._taken: list[tuple[_File, str | None, Mapping[str, Node]]] = []
        """Each file, with the beginning of its names in the module, and what it holds."""
        self._rows: dict[str, int] = {}
        """Name in the module → number of the tensor."""

    def take(self, files: Sequence[_File], kept: KeptFiles) -> None:
        for file in files:
            with of_file(file.path):
                # Tied tensors are compared by their checksums.
                state = file.read(kept, with_checksums=bool(self._shared))
                prefix = self._prefix_of(file, state)
            self._taken.append((file, prefix, state))
            for name, node in state.items() if prefix is not None else ():
                self._module.setdefault(f"{prefix}{name}", node)

    def _prefix_of(self, file: _File, state: Mapping[str, Node]) -> str | None:
        """Return with what the names of a file's tensors begin in the module.

        None if the file only has the trained weights of one of several shared modules that are
        alike: it is not known of which, and their master weights are known.
        """
        layer_prefix = f"{file.number}."
        if layer_prefix in self._known:
            return layer_prefix
        prefixes = [
            prefix
            for prefix in self._known
            if prefix.startswith(_TIED) and self._is_of(prefix, state)
        ]
        if len(prefixes) < 2:
            return prefixes[0] if prefixes else layer_prefix
        extra = [name for name in state if f"{prefixes[0]}{name}" not in self._shapes]
        if extra:
            message = f"has '{extra[0]}' of a module that several layers share, of"
            raise UnsupportedError(
                f"{message} {show_few(prefixes)}, which are alike: not known which", path=file.path
            )
        return None

    def _is_of(self, prefix: str, state: Mapping[str, Node]) -> bool:
        """Tell whether a file has all tensors of a shared module."""
        for name in self._known[prefix]:
            tensor = tensor_of(state.get(name.removeprefix(prefix)))
            if tensor is None or self._shapes.get(name, tensor.shape) != tensor.shape:
                return False
        return True

    def assign(
        self,
        entries: Mapping[int, list[ModuleEntry]],
        tensors: list[LogicalTensor],
        parts: list[TensorInFile],
    ) -> Iterator[LayerFile]:
        """Yield each file, and add the module's tensors to the model parts' and to all."""
        first, model_parts = len(tensors), self._checkpoint.model_parts
        root: dict[str, Node] = {
            names.MODULE_STATE: self._module,
            names.BUFFER_NAMES: list(self._buffers),
            names.SHARED_PARAMS: self._shared,
        }
        directory = self._taken[0][0].path.parent
        whole = ModelFile(directory, -1, root)
        reader = ModuleReader([whole], self._checkpoint.layout.stage, {})
        rank_entries = reader.entries(self._shapes)
        reader.assign(rank_entries, first=0, model_part="")
        for number, tensor in enumerate(reader.tensors):
            self._rows[tensor.name] = first + number
            parts.append(TensorInFile(*reader.whole[number], tensor.numel, tensor.dtype))
            tensors.append(replace(tensor, model_part=model_parts[self._owner(tensor.name)].name))
        for entry in rank_entries:
            entries[self._owner(entry.name)].append(entry)
        by_name = {entry.name: entry for entry in rank_entries}
        for file, prefix, saved in self._taken:
            state = None if prefix is None else self._state(prefix, saved, by_name)
            yield LayerFile(file.path.name, state)

    def _state(
        self, prefix: str, saved: Mapping[str, Node], entries: Mapping[str, ModuleEntry]
    ) -> Node:
        """Return a file's state dict with the module's tensors in the place of its own."""
        state: OrderedDict[str, Node] = OrderedDict()
        vars(state).update(getattr(saved, "__dict__", {}))
        storages: dict[str, Storage] = {}
        for name, node in saved.items():
            entry = entries[f"{prefix}{name}"]
            row = self._rows.get(entry.held_as)
            if row is None:
                state[name] = node
                continue
            storage = Storage(entry.dtype, math.prod(entry.shape), Whole(row))
            state[name] = make_tensor(storages.setdefault(entry.held_as, storage), entry.shape)
        return state

    def _owner(self, name: str) -> int:
        """Return the model part of the first stage that lists a tensor of the same layer."""
        return min(self._known.get(beginning_of(name) or "", {"": self.number}).values())

    def copies(
        self, index: Mapping[tuple[str, str, str], int], tensors: Sequence[LogicalTensor]
    ) -> Iterator[tuple[LayerCopy, TensorInFile]]:
        """Yield each tensor of each file of a shared module, with its place.

        `index`: the stages' tensors by name.
        `tensors`: those of the stages and of the module.
        """
        model_parts = self._checkpoint.model_parts
        for file, prefix, state in self._taken:
            if prefix is None or not prefix.startswith(_TIED):
                continue
            for name, tensor in ((f"{prefix}{name}", tensor_of(state[name])) for name in state):
                if tensor is None or name not in self._rows:
                    continue
                like = index.get((model_parts[self._owner(name)].name, MASTER, name))
                like = self._rows[name] if like is None else like
                found = tensor.require_contiguous(f"{file.path}: '{name}'")
                dtype = tensors[like].dtype
                copy = LayerCopy(file.path, name, found.dtype, found.numel, -1, like, dtype)
                yield copy, TensorInFile(*found.location, found.numel, found.dtype)

    def notes(self) -> Iterator[str]:
        """Say what no file holds."""
        lost = [name for name in self._buffers if name not in self._module]
        if lost:
            yield f"Buffers that the stages list, and no layer's file holds: {show_few(lost)}."


def _layer_in(path: str) -> re.Match[str] | None:
    return LAYER_FILE.fullmatch(PurePosixPath(path).name)
