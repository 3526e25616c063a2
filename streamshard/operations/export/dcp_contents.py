"""Chooses what a distributed checkpoint holds, under which keys, and turns it into files."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from streamshard.engine.run.work import Fixed, Trailer
from streamshard.errors import UnsupportedError
from streamshard.formats.checkpoint import Checkpoint, ModelPart, ParamGroup
from streamshard.formats.dcp import dcp_names, dcp_writer
from streamshard.formats.dcp.dcp_writer import (
    ItemFrame,
    ItemPlace,
    PlacedEntry,
    StatePath,
    serialize_metadata,
)
from streamshard.formats.dcp.optimizer_state import DECOUPLED, STEP, missing_keys, step_of
from streamshard.formats.deepspeed.ds_config import decouples_weight_decay
from streamshard.formats.pickle.inert import Node
from streamshard.formats.torch.torch_tensor import Tensor, storages_in, tensor_of
from streamshard.model import ITEMSIZE, MASTER, Literal, Whole
from streamshard.operations.export.weights import Weights, only_model_part
from streamshard.transfer.file_layout import Elements, FileLayout, fixed_files
from streamshard.verb_options import ACCELERATE, TITAN

_NAMELESS: Final = (
    "saved without ZeRO (stage 0), whose optimizer does not name the parameters, and a distributed "
    "checkpoint holds their states by name: export the weights alone, as safetensors"
)
_NO_STATES: Final = (
    "Saved before the optimizer's first step: there are param groups, but no states. Load the "
    "model alone."
)
_CLASSES: Final = {True: "AdamW", False: "Adam", None: "AdamW or Adam, whichever the job has"}
"""Whether weight decay is decoupled → torch's class that does so."""
_LEFT_OUT: Final = (
    "Not in it, as they have no common form: LR scheduler, loss scaler, data position, client "
    "state. Begin the new scheduler at the count of steps that the optimizer has done."
)
_LOADS: Final = {
    "torch": (
        "Load it with torch.distributed.checkpoint.load into {'model': ..., 'optim': ...}, the "
        "two state dicts of get_state_dict; the optimizer's may be flattened."
    ),
    TITAN: (
        "Give torchtitan --checkpoint.folder (this directory) and --checkpoint."
        "exclude_from_loading lr_scheduler,dataloader,train_state; its own counters begin at 0."
    ),
    ACCELERATE: (
        "accelerator.load_state(this directory) loads it, with FSDP2 and SHARDED_STATE_DICT."
    ),
}


@dataclass(frozen=True, slots=True)
class DcpEntry:
    """A tensor to write, or another value."""

    paths: tuple[StatePath, ...]
    """More than one if it is tied, or loaders know it by several keys."""
    content: Whole | bytes
    """The source's tensor, or the elements; of another value its whole item."""
    dtype: str = ""
    """Empty for a value that is no tensor."""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DcpContents:
    """What a distributed checkpoint holds."""

    folders: Mapping[str, Sequence[DcpEntry]]
    """Directory, empty for the target itself → what is in it."""
    notes: tuple[str, ...]


def choose_contents(checkpoint: Checkpoint, chosen: Weights, layout: str) -> DcpContents:
    """Choose what goes into a distributed checkpoint: weights, optimizer states, param groups.

    `chosen`: the weights, with their names in the target.
    `layout`: `torch`, `titan` or `accelerate`.
    """
    model_part = only_model_part(checkpoint)
    if not model_part.groups:
        if not checkpoint.foreign:
            raise UnsupportedError(_NAMELESS)
        reason = f"{checkpoint.foreign}, which does not tell the states of an optimizer by name."
        raise UnsupportedError(" ".join((reason, *checkpoint.remarks)).removesuffix("."))
    keys = _Keys(layout)
    model: list[DcpEntry] = [
        DcpEntry(tuple(map(keys.weight, w.names)), Whole(w.tensor), w.dtype, w.shape)
        for w in chosen.weights
    ]
    optimizer = _OptimizerEntries(checkpoint, model_part, chosen, keys)
    entries = list(optimizer.all())
    folders: dict[str, Sequence[DcpEntry]] = {"": [*model, *entries]}
    if layout == TITAN:
        folders = {dcp_names.titan_folder(_steps(model_part)): folders[""]}
    elif layout == ACCELERATE:
        folders = {dcp_names.ACCELERATE_MODEL: model, dcp_names.ACCELERATE_OPTIMIZER: entries}
    return DcpContents(folders, (_LOADS[layout], _LEFT_OUT, *optimizer.notes()))


def _steps(model_part: ModelPart) -> int:
    """Return the count of steps, which torchtitan names a checkpoint by."""
    steps = model_part.model_state.get("global_steps")
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
        message = "global_steps is not in the checkpoint, and torchtitan names checkpoints by it"
        raise UnsupportedError(message)
    return steps


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys that a loader asks for."""

    layout: str

    def weight(self, name: str) -> StatePath:
        return (name,) if self.layout == TITAN else (dcp_names.MODEL, name)

    @property
    def optimizer(self) -> str:
        return dcp_names.OPTIM if self.layout == "torch" else dcp_names.OPTIMIZER

    def state(self, name: str, state: str) -> StatePath:
        if self.layout == TITAN:
            return self.optimizer, f"{dcp_names.STATE}.{name}.{state}"
        # Flattened or not, the key is the same.
        return self.optimizer, dcp_names.STATE, name, state

    def hyper_parameter(self, group: int, params: Sequence[str], key: str) -> tuple[StatePath, ...]:
        """Return the keys of a hyper-parameter: by the group, and flattened by each parameter."""
        root, groups = self.optimizer, dcp_names.PARAM_GROUPS
        nested: StatePath = (root, groups, group, key)
        flat = [(root, f"{groups}.{name}.{key}") for name in params]
        nests = self.layout != TITAN
        flattens = self.layout != ACCELERATE and key != dcp_names.PARAMS
        return (*([nested] if nests else []), *(flat if flattens else []))


@dataclass(slots=True)
class _OptimizerEntries:
    """Makes the entries of the optimizer, and remembers what a note has to say."""

    checkpoint: Checkpoint
    model_part: ModelPart
    weights: Weights
    keys: _Keys
    added: dict[str, None] = field(default_factory=dict)
    """Keys that were added to param groups."""

    def all(self) -> Iterator[DcpEntry]:
        """Yield state after state, each in the order of the parameters, then param groups."""
        groups, index = self.model_part.groups, self.checkpoint.tensor_index()
        # A parameter may be stored under another name: a prefix may be stripped.
        first = {weight.tensor: weight.names[0] for weight in self.weights.weights}
        names = [
            [first[index[self.model_part.name, MASTER, name]] for name in group.params]
            for group in groups
        ]
        states = dict.fromkeys(state for group in groups for state in group.cut_states)
        for state in states:
            for group, stored in zip(groups, names, strict=True):
                if state in group.cut_states:
                    for name, param in zip(stored, group.params, strict=True):
                        number = index[self.model_part.name, state, param]
                        tensor = self.checkpoint.tensors[number]
                        path = self.keys.state(name, state)
                        yield DcpEntry((path,), Whole(number), tensor.dtype, tensor.shape)
        for number, (group, stored) in enumerate(zip(groups, names, strict=True)):
            yield from self._scalars(group, stored)
            yield from self._group(number, group, stored)

    def _scalars(self, group: ParamGroup, stored: Sequence[str]) -> Iterator[DcpEntry]:
        """Yield the states that are one value for all parameters of a group."""
        for key, state in group.common_states.items():
            paths = tuple(self.keys.state(name, key) for name in stored)
            if paths and key == STEP:
                yield DcpEntry(paths, step_of(state), "float32")
            elif paths:
                yield self._value(paths, state.node())

    def _group(self, number: int, group: ParamGroup, stored: Sequence[str]) -> Iterator[DcpEntry]:
        saved = self.model_part.wrapped_optimizer["param_groups"][group.number]
        missing = missing_keys(saved, decouples=decouples_weight_decay(self.checkpoint.config))
        self.added |= dict.fromkeys(missing)
        values = {**saved, **missing, dcp_names.PARAMS: list(stored)}
        for key, value in values.items():
            paths = self.keys.hyper_parameter(number, stored, key)
            if paths:
                yield self._value(paths, value)

    def _value(self, paths: tuple[StatePath, ...], value: Node) -> DcpEntry:
        tensor = tensor_of(value)
        if tensor is not None and _is_whole(tensor):
            return DcpEntry(paths, _content(tensor), tensor.dtype, tensor.shape)
        if next(storages_in(value), None) is not None:
            key = ".".join(map(str, paths[0]))
            message = f"'{key}' holds tensors inside of another object, or parts of storages"
            raise UnsupportedError(message)
        return DcpEntry(paths, dcp_writer.value_item(value))

    def notes(self) -> Iterator[str]:
        """Say what torch's optimizers have and the checkpoint lacks."""
        if self.added:
            yield (
                "Keys that torch's optimizer has in its param groups and the checkpoint lacks, "
                f"with torch's defaults: {', '.join(self.added)}."
            )
        if DECOUPLED in self.added:
            chosen = _CLASSES[decouples_weight_decay(self.checkpoint.config)]
            yield f"Load it into {chosen}, for the same kind of weight decay."
        if any(group.states is None for group in self.model_part.groups):
            yield _NO_STATES


def _is_whole(tensor: Tensor) -> bool:
    """Tell whether a tensor is all of its storage, as it is there."""
    return tensor.is_dense and tensor.start == 0 and tensor.numel == tensor.storage.numel


def _content(tensor: Tensor) -> Whole | bytes:
    """Return the bytes of a storage, or the source's tensor that holds them."""
    content = tensor.storage.content
    if isinstance(content, Literal):
        return content.data
    if not isinstance(content, Whole):
        raise TypeError(f"a storage with {content}")
    return content


class DcpFiles:
    """Places the items of a distributed checkpoint, in one file for each directory."""

    def __init__(self, contents: DcpContents) -> None:
        self.notes = contents.notes
        self.files: dict[str, list[tuple[DcpEntry, ItemPlace]]] = {}
        """File → the items in it, in order."""
        self._metadata: dict[str, bytes] = {}
        self._entries = [entry for entries in contents.folders.values() for entry in entries]
        for folder, entries in contents.folders.items():
            self._place(f"{folder}/" if folder else "", entries)

    def _place(self, prefix: str, entries: Sequence[DcpEntry]) -> None:
        """Give every item of a directory its place, and serialize the metadata."""
        name, end, placed = dcp_names.ITEM_FILE, 0, []
        for entry in entries:
            places = []
            for first, shape in dcp_writer.chunks(entry.shape, ITEMSIZE.get(entry.dtype, 1)):
                nbytes = _frame_of(entry, shape).nbytes
                places.append(ItemPlace(name, end, nbytes, first, shape))
                end += nbytes
            self.files.setdefault(prefix + name, []).extend((entry, place) for place in places)
            placed.append(PlacedEntry(entry.paths, tuple(places), entry.dtype, entry.shape))
        self._metadata[prefix + dcp_names.METADATA] = serialize_metadata(placed)

    def documents(self) -> Mapping[str, bytes]:
        """Return the metadata of each directory."""
        return self._metadata

    def tensors(self) -> int:
        return sum(bool(entry.dtype) for entry in self._entries)

    def layouts(self) -> Iterator[FileLayout]:
        for path, items in self.files.items():
            yield FileLayout(path, [piece for item in items for piece in _pieces(*item)])
        yield from fixed_files(self._metadata, is_last=True)


def _frame_of(entry: DcpEntry, shape: tuple[int, ...]) -> ItemFrame:
    """Return what is known without reading the source of the item with a part of an entry."""
    if isinstance(entry.content, Whole):
        return dcp_writer.tensor_frame(entry.dtype, shape)
    frame = dcp_writer.tensor_frame(entry.dtype, shape) if entry.dtype else None
    return ItemFrame(frame.around(entry.content) if frame else entry.content, (b"",), 0)


def _pieces(entry: DcpEntry, place: ItemPlace) -> Iterator[Fixed | Elements]:
    frame = _frame_of(entry, place.shape)
    yield Fixed(frame.head)
    if not isinstance(entry.content, Whole) or not frame.content_bytes:
        yield Fixed(b"".join(frame.tail))
        return
    name, start = str(entry.paths[0][-1]), place.first * math.prod(place.shape[1:])
    trailer = Trailer(frame.tail)
    yield Elements(entry.content, frame.content_bytes, entry.dtype, start, trailer, name)
