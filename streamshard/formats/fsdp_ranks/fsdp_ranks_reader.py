"""Reads files of FSDP's ranks, `model_world_size_N_rank_R.pt` and so on, as verl saves them.

A rank's model file is the state dict of its model: DTensors (FSDP2, HSDP, FSDP with tensor
parallelism) or ShardedTensors (FSDP1), and tensors that every rank has whole. Next to it are the
optimizer's state (`optimizer_files`), and the scheduler's with the rank's random states. verl 0.8
and 0.9.1 write them with `torch.save` (`verl/utils/checkpoint/fsdp_checkpoint_manager.py`), SkyRL
so too (`skyrl_train/distributed/fsdp_strategy.py`).
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from streamshard.errors import DisagreementError, Option, SourceError, UsageError, release_frames
from streamshard.formats.checkpoint import ModuleEntry, Reading
from streamshard.formats.dcp.dcp_reader import place_boxes
from streamshard.formats.dcp.item_reader import TensorPlaces
from streamshard.formats.dcp.metadata_reader import SavedTensor
from streamshard.formats.deepspeed.read.model_part import adopt_blobs, optimizer_tensors
from streamshard.formats.deepspeed.read.rank_files import SourceFiles
from streamshard.formats.deepspeed.read.redundant_copies import alike
from streamshard.formats.deepspeed.read.zero_reader import adopt_files, malformed
from streamshard.formats.foreign_checkpoint import Weight, foreign_checkpoint, module_entries
from streamshard.formats.fsdp_ranks import rank_names
from streamshard.formats.fsdp_ranks.device_meshes import require_ascending, with_local
from streamshard.formats.fsdp_ranks.flat_parameters import WRAPPED, flat_node
from streamshard.formats.fsdp_ranks.optimizer_files import (
    NO_OPTIMIZER,
    RanksOptimizer,
    read_optimizer,
)
from streamshard.formats.fsdp_ranks.rank_names import EXTRA, KINDS, MODEL, OPTIMIZER
from streamshard.formats.fsdp_ranks.rank_trees import TreeShape
from streamshard.formats.fsdp_ranks.sharded_tensors import (
    Box,
    RankPart,
    boxes_of,
    dtype_of,
    part_of,
)
from streamshard.formats.pickle.inert import Call, Node, show_few
from streamshard.formats.pickle.node_checks import name_of, of_file
from streamshard.formats.torch.torch_tensor import Storage, Tensor, make_tensor
from streamshard.io.entries import is_directory, is_file, paths_in
from streamshard.io.files import require_regular
from streamshard.layout.cutting import CuttingBuilder
from streamshard.model import (
    ITEMSIZE,
    MASTER,
    MODULE,
    LogicalTensor,
    Note,
    NoteKind,
    Repeat,
    Slot,
    Whole,
)

_WHAT: Final = "a checkpoint in files of FSDP's ranks"
_WEIGHTS: Final = "a model's weights in files of FSDP's ranks"
_Copies = Mapping[str, Sequence[tuple[Tensor, Tensor]]]
"""What is there on several ranks → the part that is read, and another rank's."""
_PIECES: Final = ("how FSDP1 with use_orig_params pads what it cuts for other ranks",)


@dataclass(frozen=True, slots=True)
class RanksReading(Reading):
    """What was read, and why the rest was not."""

    faults: tuple[SourceError, ...] = ()


def read(directory: Path, wrapped: Sequence[str] = ()) -> RanksReading:
    """Open what all ranks have saved.

    `wrapped`: patterns of the modules that FSDP1 wrapped, where they are known.
    """
    with malformed(directory):
        files = rank_names.files_of(directory)
        for path in (path for kind in KINDS for path in files[kind]):
            require_regular(path, directory)
        return _Ranks(directory, files, wrapped).reading()


@dataclass(slots=True)
class _Ranks:
    """What is known of the ranks' files while they are read."""

    directory: Path
    files: Mapping[str, Sequence[Path]]
    wrapped: Sequence[str] = ()
    sources: SourceFiles = field(default_factory=SourceFiles)
    root: Mapping[Node, Node] = field(default_factory=dict)
    """What rank 0 saved of the model."""
    parts: dict[str, list[RankPart]] = field(default_factory=dict)
    """What each rank holds of the model's tensors."""
    boxes: dict[str, list[Box]] = field(default_factory=dict)
    non_tensors: list[Node] = field(default_factory=list)
    """What is in the model's files and no tensor."""
    unread: dict[str, NoteKind] = field(default_factory=dict)
    """What else is not read, and why."""
    faults: list[SourceError] = field(default_factory=list)
    """What is wrong with files that are not read."""

    def reading(self) -> RanksReading:
        self._read_model()
        entries = tuple(module_entries(self._weights(), frozenset()))
        own = [entry for entry in entries if entry.kind != "alias"]
        optimizer = self._optimizer({entry.name: self.parts[entry.name] for entry in own})
        if self.wrapped and not (optimizer.is_flat or self.unread):
            message = "the optimizer's states are not those of flat parameters"
            raise UsageError(f"{self.directory}: {message}; leave {WRAPPED} out")
        entries = tuple(_tied(entry, optimizer.tied) for entry in entries)
        own = [entry for entry in entries if entry.kind != "alias"]
        extra, groups = self._extra(), optimizer.groups
        trained = {name for group in groups for name in group.params}
        shapes = {entry.name: entry.shape for entry in own}
        tensors = optimizer_tensors(groups, shapes, "")
        if not groups:
            tensors += [tensor for one in optimizer.cut.values() for tensor in one.tensors]
        tensors += [
            LogicalTensor(MODULE, e.name, e.dtype, e.shape) for e in own if e.name not in trained
        ]
        number = {(tensor.state, tensor.name): n for n, tensor in enumerate(tensors)}
        kept = self._kept(entries, number, trained, optimizer)
        whole: dict[int, tuple[int, int]] = {}
        adopt_blobs([kept, extra], tensors, whole, first=0, model_part="")
        files = adopt_files(self._sidecars(), self.sources, tensors, whole)
        builder = CuttingBuilder([ITEMSIZE[tensor.dtype] for tensor in tensors])
        boxes: dict[tuple[str, str], Sequence[Box]] = {
            (MASTER if e.name in trained else MODULE, e.name): self.boxes[e.name] for e in own
        }
        for cut in optimizer.cut.values():
            if cut.is_joined:
                rows = [number[cut.state, name] for name in cut.names]
                _place_flat(builder, rows, tensors, cut.boxes)
            else:
                boxes[cut.state, cut.names[0]] = cut.boxes
        for key, parts in boxes.items():
            _place(builder, number[key], tensors[number[key]], parts, self.directory)
        for row, (file, offset) in whole.items():
            builder.place(row, file, offset, tensors[row].numel)
        differing = self._differing(optimizer)
        checkpoint = foreign_checkpoint(
            _WHAT if groups else _WEIGHTS,
            self.directory.name,
            len(self.files[MODEL]),
            tensors,
            tuple(replace(e, kind="param") if e.name in trained else e for e in entries),
            groups,
            optimizer.hyper_parameters,
            {**kept, EXTRA: extra},
            files,
            (*self.sources.notes, *self._notes(optimizer, differing)),
            (*self.unread, *(_PIECES if optimizer.is_in_pieces else ())),
        )
        files_read, repeats = tuple(self.sources.files), tuple(self._repeats(differing))
        return RanksReading(checkpoint, builder.build(), files_read, repeats, tuple(self.faults))

    def _read_model(self) -> None:
        roots, paths = [], self.files[MODEL]
        for path in paths:
            roots.append(self.sources.read(path, self.sources.add(path)).root)
            if list(roots[-1]) != list(roots[0]):
                raise DisagreementError(f"holds other names than {paths[0]}", path=path)
        self.root = roots[0]
        for key in roots[0]:
            by_rank = []
            for path, root in zip(paths, roots, strict=True):
                with of_file(path):
                    by_rank.append(part_of(root[key]))
            parts = [part for part in by_rank if part is not None]
            if parts and parts[0].is_dtensor:
                with of_file(paths[0]):
                    require_ascending(roots[0][key])
            if not parts:
                self.non_tensors.append(key)
            elif len(parts) < len(by_rank):
                message = f"{name_of(key)} is a tensor on some ranks only"
                raise DisagreementError(message, path=self.directory)
            else:
                self.parts[name_of(key)] = parts
        self.boxes = {name: boxes_of(f"'{name}'", parts) for name, parts in self.parts.items()}

    def _weights(self) -> Iterator[Weight]:
        for name, parts in self.parts.items():
            tensors = [(box.offset, box.tensor) for box in self.boxes[name]]
            places = [(at, t.shape, t.stride, t.location) for at, t in tensors]
            yield name, dtype_of(f"'{name}'", parts), parts[0].shape, places

    def _optimizer(self, weights: Mapping[str, Sequence[RankPart]]) -> RanksOptimizer:
        """Read the optimizer; weights are read also where it cannot be."""
        paths = self.files[OPTIMIZER]
        if not paths:
            return NO_OPTIMIZER
        try:
            rank_names.require_ranks(self.directory, OPTIMIZER, paths, len(self.files[MODEL]))
            return read_optimizer(paths, self.sources, weights, self.wrapped)
        except SourceError as error:
            self._leave_out("the optimizer's state", error, NoteKind.UNREAD)
            return NO_OPTIMIZER

    def _leave_out(self, what: str, error: SourceError, kind: NoteKind) -> None:
        release_frames(error)
        self.faults.append(error)
        self.unread[f"{what} ({error})"] = kind

    def _extra(self) -> list[Node]:
        """Read the other state of each rank, in order of rank."""
        paths = self.files[EXTRA]
        if not paths:
            return []
        try:
            rank_names.require_ranks(self.directory, EXTRA, paths, len(self.files[MODEL]))
            return [self.sources.read(path, self.sources.add(path)).root for path in paths]
        except SourceError as error:
            self._leave_out("the scheduler's state, and random states", error, NoteKind.LEFT_OUT)
            return []

    def _differing(self, optimizer: RanksOptimizer) -> _Copies:
        """Return what ranks have of the same parts, where checksums do not tell that it is equal.

        These are of storages, which may hold more than the parts.
        """
        boxes = {**self.boxes, **{one.label: one.boxes for one in optimizer.cut.values()}}
        pairs = {
            name: [(box.tensor, copy) for box in tensor_boxes for copy in box.copies]
            for name, tensor_boxes in boxes.items()
        }
        found = {name: [pair for pair in own if not alike(*pair)] for name, own in pairs.items()}
        return {name: own for name, own in found.items() if own}

    def _repeats(self, differing: _Copies) -> Iterator[Repeat]:
        """Yield what differs of tensors that are cut among ranks."""
        files = self.sources.files
        for name, pairs in differing.items():
            if name in self.parts and not self.parts[name][0].is_dtensor:
                continue
            for first, copy in pairs:
                both = first, copy.require_contiguous(f"a copy of {name}")
                read, other = ((files[tensor.storage.file], tensor.offset) for tensor in both)
                yield read, other, copy.numel * ITEMSIZE[copy.dtype], f"a part of {name}"

    def _kept(
        self,
        entries: Sequence[ModuleEntry],
        number: Mapping[tuple[str, str], int],
        trained: Collection[str],
        optimizer: RanksOptimizer,
    ) -> dict[str, Node]:
        """Return what rank 0 saved, with whole logical tensors in the place of its parts."""
        storages: dict[str, Storage] = {}
        replaced: dict[int, Node] = {}
        for entry in entries:
            part, holder = self.parts[entry.name][0], entry.held_as
            if part.offsets is not None:
                return {}
            row = number[MASTER if holder in trained else MODULE, holder]
            storage = storages.setdefault(holder, _storage(entry.dtype, entry.shape, row))
            node = self.root[entry.name]
            replaced[id(node)] = _whole(node, part, storage)
        template = TreeShape.of(self.root)
        leaves = [replaced.get(id(leaf), leaf) for leaf in template.leaves]
        kept: dict[str, Node] = {MODEL: template.filled(leaves)}
        if optimizer is not NO_OPTIMIZER:
            states = list(optimizer.template.leaves)
            for n, cut in optimizer.cut.items():
                inside = [
                    make_tensor(_storage(t.dtype, t.shape, number[t.state, t.name]), t.shape)
                    for t in cut.tensors
                ]
                if cut.is_joined:
                    states[n] = flat_node(inside)
                else:
                    is_whole = optimizer.is_in_pieces
                    states[n] = inside[0] if is_whole else with_local(states[n], inside[0])
            kept[OPTIMIZER] = optimizer.template.filled(states)
        return kept

    def _sidecars(self) -> list[tuple[Path, str]]:
        """List the model's config and tokenizer by the names that they have next to weights.

        Other files have a path that begins with the directory, except that of verl that tells the
        count of ranks: each target has its own.
        """
        place = self.directory / rank_names.PRETRAINED
        sidecars = [(path, path.name) for path in _files_in(place)]
        sidecars += [
            (path, f"{self.directory.name}/{path.name}")
            for path in _files_in(self.directory)
            if path.name != rank_names.CONFIG and not rank_names.is_rank_file(path.name)
        ]
        for path, _ in sidecars:
            require_regular(path, self.directory)
        return sidecars

    def _notes(self, optimizer: RanksOptimizer, differing: _Copies) -> Iterator[Note]:
        known = {path for paths in self.files.values() for path in paths}
        strays = [p.name for p in _files_in(self.directory) if rank_names.is_rank_file(p.name)]
        strays = [name for name in strays if self.directory / name not in known]
        unread = dict(self.unread)
        if strays:
            unread[f"{show_few(strays)}, of other ranks"] = NoteKind.LEFT_OUT
        for text, note_kind in unread.items():
            yield Note(f"Not read: {text}.", note_kind)
        for error in self.faults:
            if isinstance(error, DisagreementError):
                yield Note(f"{error}.", NoteKind.MIXED)
        if optimizer.untold:
            text = (
                f"No file tells which parameters the optimizer's states are of: {optimizer.untold}"
            )
            form = Option("format", "fsdp-ranks")
            yield Note(f"{text}. As they are, only repartition takes them, with {form}.")
        if self.non_tensors:
            text = f"Not read, as they are no tensors: {show_few(self.non_tensors)}"
            yield Note(f"{text}. Files for other ranks get rank 0's.", NoteKind.LEFT_OUT)
        if differing:
            text = f"The ranks' files differ in {show_few([*differing])}"
            # The checksums that tell are those of storages.
            more = f", or in memory that was saved with {'it' if len(differing) == 1 else 'them'}"
            tensors = (t for pairs in differing.values() for pair in pairs for t in pair)
            are_whole = all(tensor.storage.numel == tensor.numel for tensor in tensors)
            text = f"{text}{'' if are_whole else more}; rank 0's are taken for all."
            yield Note(text, NoteKind.COPIES)


def _tied(entry: ModuleEntry, tied: Mapping[str, str]) -> ModuleEntry:
    first = tied.get(entry.name, "")
    return ModuleEntry(entry.name, "alias", entry.dtype, entry.shape, first) if first else entry


def _storage(dtype: str, shape: tuple[int, ...], number: int) -> Storage:
    return Storage(dtype, math.prod(shape), Whole(number))


def _whole(node: Node, part: RankPart, storage: Storage) -> Node:
    """Return the node of a tensor with all of its elements in a storage."""
    tensor = make_tensor(storage, part.shape)
    return with_local(node, tensor) if isinstance(node, Call) and part.is_dtensor else tensor


def _files_in(place: Path) -> list[Path]:
    entries = sorted(paths_in(place)) if is_directory(place) else []
    return [path for path in entries if is_file(path)]


def _place(
    builder: CuttingBuilder, number: int, entry: LogicalTensor, boxes: Sequence[Box], place: Path
) -> None:
    tensors = [box.tensor.require_contiguous(f"'{entry.name}'") for box in boxes]
    # Runs of elements are boxes of the flattened tensor.
    is_flat = bool(tensors) and len(boxes[0].offset) < len(entry.shape)
    shape = (entry.numel,) if is_flat else entry.shape
    placed = [(box.offset, tensor.shape) for box, tensor in zip(boxes, tensors, strict=True)]
    items = [(tensor.storage.file, tensor.offset, 0) for tensor in tensors]
    saved = SavedTensor.of(entry.dtype, shape, placed, items)
    places = TensorPlaces(saved.items.file, saved.items.offset)
    place_boxes(builder, number, entry.name, saved, places, place)


def _place_flat(
    builder: CuttingBuilder,
    rows: Sequence[int],
    tensors: Sequence[LogicalTensor],
    boxes: Sequence[Box],
) -> None:
    held = [box.tensor for box in boxes]
    slot, origin = builder.slot(_slot(held)), 0
    for row in rows:
        builder.assign(row, slot, piece_numel=held[0].numel, origin=origin)
        origin += tensors[row].numel


def _slot(tensors: Sequence[Tensor]) -> Slot:
    return Slot(
        np.array([tensor.storage.file for tensor in tensors], dtype=np.int64),
        np.array([tensor.offset for tensor in tensors], dtype=np.int64),
        np.array([tensor.numel for tensor in tensors], dtype=np.int64),
    )
