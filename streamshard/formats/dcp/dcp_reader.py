"""Reads a distributed checkpoint of PyTorch into logical tensors, with the places of their bytes.

It holds a model and the states of its optimizer, each tensor cut into boxes. It does not tell what
a DeepSpeed job needs as well: see `grafting/reference.py`.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Final

import numpy as np

from streamshard.errors import CorruptFileError, IncompleteError, UnsupportedError
from streamshard.formats.checkpoint import ModuleEntry, ParamGroup, Reading
from streamshard.formats.dcp import dcp_names
from streamshard.formats.dcp.dcp_names import PARAMS
from streamshard.formats.dcp.item_reader import ItemFiles, TensorPlaces
from streamshard.formats.dcp.metadata_reader import (
    Index,
    SavedTensor,
    is_distributed,
    join,
    read_index,
)
from streamshard.formats.dcp.optimizer_state import SavedGroup, SavedOptimizer
from streamshard.formats.dcp.state_names import StateKeys, sort_keys
from streamshard.formats.deepspeed.read.model_part import optimizer_tensors
from streamshard.formats.foreign_checkpoint import Weight, foreign_checkpoint, module_entries
from streamshard.formats.pickle.inert import show, show_few
from streamshard.formats.pickle.node_checks import of_file
from streamshard.io.files import require_inside
from streamshard.layout.boxes import NotTiledError, grid_of
from streamshard.layout.cutting import CuttingBuilder
from streamshard.model import (
    ITEMSIZE,
    MASTER,
    MODULE,
    LogicalTensor,
    Note,
    NoteKind,
    Slot,
    SourceFile,
)

_WHAT: Final = "a distributed checkpoint of PyTorch"
_ACCELERATE: Final = (dcp_names.ACCELERATE_MODEL, dcp_names.ACCELERATE_OPTIMIZER)
"""Directories of a model and of its optimizer in one that Accelerate or Trainer saves."""


@dataclass(frozen=True, slots=True)
class Distributed:
    """A distributed checkpoint whose index and items were read."""

    root: Path
    index: Index
    keys: StateKeys
    files: tuple[SourceFile, ...]
    places: Mapping[str, TensorPlaces]
    groups: Callable[[], list[SavedGroup]]
    """Reads the optimizer's param groups."""
    what: str = _WHAT
    remarks: tuple[str, ...] = ()
    """What else the user should know."""
    unread: str = ""
    """Why the optimizer's state is not read, although it is there."""
    unrecorded: tuple[str, ...] = ()
    """What else a job needs that it does not tell."""
    boxes_in: str = dcp_names.METADATA
    """Name of the file that lists the boxes; empty if those that hold them do."""

    def tensor(self, key: str) -> SavedTensor:
        return self.index.tensors[key]

    def weight(self, name: str) -> SavedTensor:
        return self.index.tensors[self.keys.weights[name]]

    def key_of(self, tensor: LogicalTensor) -> str:
        if tensor.state in (MASTER, MODULE):
            return self.keys.weights[tensor.name]
        return self.keys.states[tensor.name][tensor.state]

    @property
    def world_size(self) -> int:
        """Count of files of the model, or of its optimizer: ranks, unless one has several."""
        kinds = Counter((file.path.parent, file.path.suffix) for file in self.files)
        return max(kinds.values(), default=0)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Say what is in it that is neither the model's nor the optimizer's."""
        extras = self.keys.extras
        note = f"Not read, as it is neither the model's nor the optimizer's: {show_few(extras)}."
        return (*[note] * bool(extras), *[self.unread] * bool(self.unread), *self.remarks)


def parts_of(root: Path) -> list[Path]:
    """List the directories with an index that make up the checkpoint at a path; none if it is none.

    Usually it is the directory itself. Accelerate and HF Trainer save two inside of theirs.
    """
    if is_distributed(root):
        return [root]
    inside = [root / name for name in _ACCELERATE]
    parts = [directory for directory in inside if is_distributed(directory)]
    if parts and parts[0] != inside[0]:
        message = f"holds the optimizer alone, {_ACCELERATE[0]} is not next to it"
        raise IncompleteError(message, path=root)
    return parts


def index_of(root: Path) -> Index:
    """Read the index of a distributed checkpoint, or the joint one of its two parts."""
    parts = parts_of(root)
    for part in parts:
        require_inside(part, root)
        require_inside(part / dcp_names.METADATA, root)
    return reduce(join, map(read_index, parts))


def open_distributed(root: Path, param_names: Set[str] = frozenset()) -> Distributed:
    """Read the index of a distributed checkpoint, and the headers of its items.

    `param_names`: those of the model's parameters, if they are known.
    """
    index = index_of(root)
    with of_file(root):
        keys = sort_keys(index, param_names)
        files = ItemFiles(index)
        places = locate(index, keys, files)
        optimizer = SavedOptimizer(index, keys, files, places)
        groups, unread = optimizer.groups, keys.unread
        return Distributed(root, index, keys, files.files, places, groups, unread=unread)


def locate(index: Index, keys: StateKeys, files: ItemFiles) -> dict[str, TensorPlaces]:
    """Find the elements of all tensors of a model and of its optimizer."""
    options = (*keys.groups.values(), *keys.copies.values())
    owned = [*keys.weights.values()]
    for by_name in (*keys.states.values(), *options):
        owned += by_name.values()
    return files.locate({key: index.tensors[key] for key in owned if key in index.tensors})


def as_it_is(dcp: Distributed) -> Reading:
    """Return a distributed checkpoint as it is: without what a DeepSpeed job needs as well."""
    root = dcp.root
    with of_file(root):
        saved = dcp.groups()
        groups = tuple(_group(dcp, number, group) for number, group in enumerate(saved))
        trained = {name for group in groups for name in group.params}
        entries = tuple(module_entries(_weights(dcp), trained))
    shapes = {name: dcp.weight(name).shape for name in dcp.keys.weights}
    tensors = [*optimizer_tensors(groups, shapes, ""), *module_tensors(entries)]
    checkpoint = foreign_checkpoint(
        dcp.what,
        root.name,
        dcp.world_size,
        tensors,
        entries,
        groups,
        # A flattened optimizer does not tell which parameters with equal options shared a group.
        [{**group.options, **({} if dcp.keys.by_parameter else {PARAMS: []})} for group in saved],
        notes=[
            Note(text, NoteKind.UNREAD if text == dcp.unread else NoteKind.LEFT_OUT)
            for text in dcp.left_out
        ],
        unrecorded=unrecorded(dcp, groups, entries),
    )
    builder = CuttingBuilder([ITEMSIZE[tensor.dtype] for tensor in tensors])
    for number, key in enumerate(map(dcp.key_of, tensors)):
        boxes = dcp.tensor(key), dcp.places[key]
        place_boxes(builder, number, key, *boxes, root / dcp.boxes_in)
    return Reading(checkpoint, builder.build(), dcp.files)


def _group(dcp: Distributed, number: int, group: SavedGroup) -> ParamGroup:
    absent = [name for name in group.params if name not in dcp.keys.weights]
    if absent:
        message = f"its optimizer lists {show_few(absent)}, which no model in it has. Save the"
        raise UnsupportedError(f"{message} whole model")
    dtypes = {dcp.weight(name).dtype: name for name in group.params}
    if len(dtypes) > 1:
        listed = " and ".join(f"'{name}' is {dtype}" for dtype, name in dtypes.items())
        message = f"{listed}, in one param group: ZeRO keeps groups of one dtype. Save the"
        raise UnsupportedError(f"{message} weights that are trained in float32")
    return ParamGroup(group.params, next(iter(dtypes), "float32"), group.states, number)


def _weights(dcp: Distributed) -> Iterator[Weight]:
    for name, key in dcp.keys.weights.items():
        tensor, places = dcp.tensor(key), dcp.places[key]
        columns = (places.file, places.offset, tensor.offsets) if len(tensor.items) else ()
        yield name, tensor.dtype, tensor.shape, [column.tobytes() for column in columns]


def unrecorded(
    dcp: Distributed, groups: Sequence[ParamGroup], entries: Sequence[ModuleEntry]
) -> Iterator[str]:
    """Name what a job needs that neither the checkpoint nor a job's config tells."""
    bare = [name for group in groups if group.states is None for name in group.params]
    if bare or not groups:
        yield f"the optimizer's states{f' of {show_few(bare)}' if bare else ''}"
        if dcp.keys.unread:
            yield dcp.keys.unread.removesuffix(".")
        return
    yield from dcp.unrecorded
    place = {entry.name: number for number, entry in enumerate(entries)}
    orders = [[place[name] for name in group.params] for group in groups]
    if dcp.keys.by_parameter:
        yield "the order of the parameters: its optimizer is flattened, and lists none"
    elif any(order != sorted(order) for order in orders):
        # FSDP1 may list them as its flat parameters hold them, which no DeepSpeed job does.
        model = "its model" if dcp.index.paths else "its index, which does not record the model's"
        yield f"the order of the parameters: its param groups have another one than {model}"
    others = [entry.name for entry in entries if entry.kind != "param"]
    if others:
        yield f"whether {show_few(others)} are frozen weights, buffers, or tied to other weights"
    empty = [entry.name for entry in entries if 0 in entry.shape]
    if empty:
        yield f"who trains {show_few(empty)}, without elements"
    half = [name for group in groups for name in group.params if group.master_dtype != "float32"]
    if half:
        yield f"fp32 master weights of {show_few(half)}"


def module_tensors(entries: Iterable[ModuleEntry]) -> list[LogicalTensor]:
    """List the logical tensors of what is not trained."""
    return [
        LogicalTensor(MODULE, entry.name, entry.dtype, entry.shape)
        for entry in entries
        if entry.kind not in ("param", "alias", "extra")
    ]


def place_boxes(
    builder: CuttingBuilder,
    number: int,
    name: str,
    saved: SavedTensor,
    places: TensorPlaces,
    listed_in: Path,
) -> None:
    """Place a tensor that was cut into boxes, which must fill it."""
    if not math.prod(saved.shape):
        builder.place(number, 0, 0, 0)
        return
    try:
        grid = grid_of(saved.shape, saved.offsets, saved.sizes)
    except NotTiledError as error:
        message = f"{show(name)} of {show(saved.shape)}: {error}"
        raise CorruptFileError(message, path=listed_in) from error
    pieces = Slot(places.file, places.offset, np.prod(saved.sizes, axis=1, dtype=np.int64))
    builder.place_boxes(number, builder.slot(pieces), grid)
