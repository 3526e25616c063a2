"""Reads the files of a pipeline's layers, which hold its buffers, frozen and 16-bit weights.

A layer's file names tensors as the layer does. The stages' files list them under names that are
unique in the model, as `PipelineModule.state_dict` has them: these begin with the layer's number
(`12.`), or, for a module that several layers share, with its key (`tied_modules.embed.`). Which
layers share a module is in no file. But no stage lists tensors under such a layer's number, and
the layer's file has the names and shapes of the module. Its values are compared with those of the
module before anything is made of them (`LayerCopy`).
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final

import numpy as np

from streamshard.errors import IncompleteError, UnsupportedError
from streamshard.formats.checkpoint import Checkpoint, ModuleEntry, Reading
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.read.model_files import ModelFile
from streamshard.formats.deepspeed.read.module_reader import ModuleReader
from streamshard.formats.deepspeed.read.rank_files import read_dict
from streamshard.formats.pickle.inert import Node
from streamshard.formats.pickle.node_checks import of_file
from streamshard.formats.torch.torch_tensor import Tensor, tensor_of
from streamshard.formats.torch.tree_comparison import show_few
from streamshard.model import BLOB, FILE, ITEMSIZE, MASTER, LogicalTensor

_LAYER_FILE: Final = re.compile(r"layer_(\d+)-model_states\.pt")
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
class WithLayers:
    """A pipeline's checkpoint with the tensors of its layers, as if the stages' modules had them.

    The bytes of the layers' files are blobs of it.
    """

    reading: Reading
    copies: Sequence[LayerCopy]


@dataclass(frozen=True, slots=True)
class _Layer:
    number: int
    path: Path
    file: int
    """Number of the source file."""


def with_layers(source: Reading) -> WithLayers:
    """Add the tensors of the layers' files to a pipeline's checkpoint.

    Raises
    ------
    IncompleteError
        The file of a layer is missing that a stage trains.
    UnsupportedError
        It is not known which tensors a file holds.
    DisagreementError, CorruptFileError
        A tensor is not the one that the stages' files list.
    """
    return _Adding(source).run()


def as_one_module(checkpoint: Checkpoint) -> Checkpoint:
    """Return a pipeline's only stage as if its module were in the model file, not in layers."""
    family = checkpoint.families[0]
    buffers = [entry.name for entry in family.module if entry.kind == "buffer"]
    own: dict[str, Node] = {
        names.MODULE_STATE: {},
        names.BUFFER_NAMES: buffers,
        names.SHARED_PARAMS: {},
    }
    state = {key: own.get(key, node) for key, node in family.model_state.items()}
    return replace(
        checkpoint,
        families=(replace(family, model_state=state),),
        files=tuple(f for f in checkpoint.files if not _layer_in(f.path)),
    )


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


class _Adding:
    """Adds the layers' tensors to one checkpoint."""

    def __init__(self, source: Reading) -> None:
        self._source = source
        self._checkpoint: Checkpoint = source.checkpoint
        self._shapes: dict[str, tuple[int, ...]] = {}
        """Of trained parameters."""
        self._known: dict[str, dict[str, int]] = defaultdict(dict)
        """Beginning of names → the names that stages list, each with the first stage's number."""
        self._buffers: dict[str, None] = {}
        for number, family in enumerate(self._checkpoint.families):
            trained = {
                k: v for held in self._checkpoint.group_shapes(family) for k, v in held.items()
            }
            self._shapes |= trained
            listed = family.model_state.get(names.BUFFER_NAMES) or []
            self._buffers |= dict.fromkeys(listed)
            for name in (*trained, *listed):
                if match := _PREFIX.match(name):
                    self._known[match[1]].setdefault(name, number)
        self._module: dict[str, Node] = {}
        """The state dict of the whole module."""
        self._again: list[tuple[str, Tensor, Path]] = []
        """Tensors of shared modules, of each file that holds them."""
        self._rows: list[tuple[int, int, int, str]] = []
        """(file, offset, numel, dtype) of each row that is added to the cutting."""

    def run(self) -> WithLayers:
        """Read all files, and place what they hold."""
        layers = sorted(self._layers(), key=lambda layer: layer.number)
        self._require_files({layer.number for layer in layers})
        for layer in layers:
            with of_file(layer.path):
                self._take(layer, read_dict(layer.path, layer.file).root)
        entries, tensors = self._entries(layers[0].path.parent)
        index = self._checkpoint.tensor_index()
        owned: dict[int, list[ModuleEntry]] = defaultdict(list)
        for entry in entries:
            owned[self._owner(entry.name)].append(entry)
        families = tuple(
            replace(family, module=tuple(owned[number]))
            for number, family in enumerate(self._checkpoint.families)
        )
        first = len(self._checkpoint.tensors)
        at = {tensor.name: first + number for number, tensor in enumerate(tensors)}
        copies = tuple(self._copies(index, at, first))
        held = [
            replace(t, state=BLOB) if t.state == FILE and _layer_in(t.name) else t
            for t in self._checkpoint.tensors
        ]
        names_of = [family.name for family in families]
        held += [replace(t, family=names_of[self._owner(t.name)]) for t in tensors]
        checkpoint = replace(
            self._checkpoint,
            tensors=tuple(held),
            families=families,
            notes=(*self._checkpoint.notes, *self._notes()),
        )
        file, offset, numel = (
            np.array([row[column] for row in self._rows], np.int64) for column in range(3)
        )
        itemsize = np.array([ITEMSIZE[row[3]] for row in self._rows], np.int64)
        cutting = self._source.cutting.with_places(file, offset, numel, itemsize)
        return WithLayers(replace(self._source, checkpoint=checkpoint, cutting=cutting), copies)

    def _layers(self) -> Iterator[_Layer]:
        cutting = self._source.cutting
        for row, tensor in enumerate(self._checkpoint.tensors):
            match = _layer_in(tensor.name) if tensor.state == FILE else None
            if match is not None:
                file = int(cutting.file[cutting.first_piece[row]])
                yield _Layer(int(match[1]), self._source.files[file].path, file)

    def _require_files(self, present: set[int]) -> None:
        for prefix, listed in self._known.items():
            if not prefix.startswith(_TIED) and int(prefix[:-1]) not in present:
                message = f"layer_{int(prefix[:-1]):02d}-model_states.pt: missing, in which"
                message = f"{self._checkpoint.tag}/{message} '{next(iter(listed))}' is"
                raise IncompleteError(f"{message}: copy it from the node that saved it")

    def _take(self, layer: _Layer, held: Mapping[str, Node]) -> None:
        """Take the tensors of one file, under their names in the module."""
        prefix = self._prefix_of(layer, held)
        if prefix is None:
            return
        for name, node in held.items():
            full, tensor = f"{prefix}{name}", tensor_of(node)
            self._module.setdefault(full, node)
            if prefix.startswith(_TIED) and tensor is not None:
                self._again.append((full, tensor, layer.path))

    def _prefix_of(self, layer: _Layer, held: Mapping[str, Node]) -> str | None:
        """Return with what the names of a file's tensors begin in the module.

        None if the file only has the trained weights of one of several shared modules that are
        alike: it is not known of which, and their master weights are known.
        """
        own = f"{layer.number}."
        if own in self._known:
            return own
        found = [
            prefix
            for prefix in self._known
            if prefix.startswith(_TIED) and self._is_of(prefix, held)
        ]
        if len(found) < 2:
            return found[0] if found else own
        beside = [name for name in held if f"{found[0]}{name}" not in self._shapes]
        if beside:
            message = f"{layer.path}: has '{beside[0]}' of a module that several layers share, of"
            raise UnsupportedError(f"{message} {show_few(found)}, which are alike: not known which")
        return None

    def _is_of(self, prefix: str, held: Mapping[str, Node]) -> bool:
        """Tell whether a file has all tensors of a shared module."""
        for name in self._known[prefix]:
            tensor = tensor_of(held.get(name.removeprefix(prefix)))
            if tensor is None or self._shapes.get(name, tensor.shape) != tensor.shape:
                return False
        return True

    def _entries(self, place: Path) -> tuple[Sequence[ModuleEntry], Sequence[LogicalTensor]]:
        """Classify the module's tensors, and add a row for each."""
        states = [family.model_state for family in self._checkpoint.families]
        shared = {k: v for one in states for k, v in (one.get(names.SHARED_PARAMS) or {}).items()}
        root: dict[str, Node] = {
            names.MODULE_STATE: self._module,
            names.BUFFER_NAMES: list(self._buffers),
            names.SHARED_PARAMS: shared,
        }
        reader = ModuleReader([ModelFile(place, -1, root)], self._checkpoint.layout.stage, {})
        entries = reader.entries(self._shapes)
        placed = reader.place(entries, first=0, family="").whole
        for number, tensor in enumerate(reader.tensors):
            self._rows.append((*placed[number], tensor.numel, tensor.dtype))
        return entries, reader.tensors

    def _owner(self, name: str) -> int:
        """Return the number of the first stage that lists a tensor of the same layer."""
        match = _PREFIX.match(name)
        return min(self._known.get(match[1] if match else "", {"": 0}).values())

    def _copies(
        self, index: Mapping[tuple[str, str, str], int], at: Mapping[str, int], first: int
    ) -> Iterator[LayerCopy]:
        """Add a row for each tensor of each file of a shared module, and say what it is equal to.

        Parameters
        ----------
        index, at
            The places of the stages' tensors, and of those of the module.
        first
            Count of the stages' tensors.
        """
        families = self._checkpoint.families
        for name, tensor, path in self._again:
            if name not in at:
                continue
            master = index.get((families[self._owner(name)].name, MASTER, name))
            like = at[name] if master is None else master
            row = first + len(self._rows)
            found = tensor.require_contiguous(f"{path}: '{name}'")
            self._rows.append((*found.place, found.numel, found.dtype))
            dtype = self._checkpoint.tensors[like].dtype if master is not None else found.dtype
            yield LayerCopy(path, name, found.dtype, found.numel, row, like, dtype)

    def _notes(self) -> Iterator[str]:
        lost = [name for name in self._buffers if name not in self._module]
        if lost:
            yield f"Buffers that the stages list, and no layer's file holds: {show_few(lost)}."


def _layer_in(path: str) -> re.Match[str] | None:
    return _LAYER_FILE.fullmatch(PurePosixPath(path).name)
