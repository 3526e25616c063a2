"""Checks what a reader of another package says of a checkpoint; see `plug_ins`."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from streamshard.errors import CorruptFileError, DisagreementError
from streamshard.formats.dcp.dcp_reader import Distributed
from streamshard.formats.dcp.item_reader import TensorPlaces, missing_file
from streamshard.formats.dcp.metadata_reader import Index, SavedTensor
from streamshard.formats.dcp.optimizer_state import STEP, SavedGroup, common_states, is_plain
from streamshard.formats.dcp.state_names import StateKeys
from streamshard.formats.deepspeed.states import Elementwise, Plain, State
from streamshard.formats.pickle.inert import show
from streamshard.formats.pickle.node_checks import is_size, name_of, require_shape, sizes_of
from streamshard.io.entries import identify, is_file
from streamshard.io.files import require_regular
from streamshard.model import BLOB, FILE, ITEMSIZE, MASTER, MODULE, RecordCrcs, SourceFile
from streamshard.reader import Contents, ParamStates, RecordedSum, StoredTensor

_NUMBERS: Final = frozenset({"lr", "eps", "weight_decay"})
"""Options that are numbers in every optimizer."""
_RESERVED: Final = frozenset({MASTER, MODULE, BLOB, FILE})
"""States that no optimizer may have, as other tensors have these words for theirs."""


@dataclass(frozen=True, slots=True)
class _Plugged(Distributed):
    ranks: int = 1

    @property
    def world_size(self) -> int:
        return self.ranks


def laid_out(
    directory: Path, title: str, contents: Contents, remarks: Sequence[str]
) -> Distributed:
    """Check what a reader says of a checkpoint, and return it as a distributed one."""
    keys, places = StateKeys(), _Places(directory)
    for name, tensor in contents.weights.items():
        keys.weights[name_of(name)] = name
        places.add(name, tensor)
    groups = [saved for group in contents.groups for saved in _groups(group, keys, places)]
    listed = Counter(name for group in contents.groups for name in group.params)
    for name, count in listed.items():
        if count > 1:
            raise CorruptFileError(f"{show(name)} is in {count} param groups")
    if not is_size(contents.ranks):
        raise CorruptFileError(f"{show(contents.ranks)} is no count of ranks")
    files = places.with_sums(contents.sums)
    index = Index(places.tensors, {}, {}, tuple(file.path for file in files))
    return _Plugged(
        directory,
        index,
        keys,
        files,
        places.places,
        lambda: groups,
        title,
        (*map(str, contents.notes), *remarks),
        boxes_in="",
        ranks=contents.ranks,
    )


def _values(group: ParamStates) -> dict[str, State]:
    """Check the options of a param group and its states that are numbers; returns these."""
    for option, value in group.options.items():
        is_number = type(value) in (int, float)
        if not is_plain(value) or (option in _NUMBERS and not is_number):
            raise CorruptFileError(f"the option {show(option)} cannot be {show(value)}")
    for state, number in group.values.items():
        if type(number) not in (int, float):
            raise CorruptFileError(f"its state {show(state)} is {show(number)}, which is no number")
        if state == STEP and not (number >= 0 and float(number).is_integer()):
            raise CorruptFileError(f"its step is {show(number)}, which is no count of steps")
    return {name_of(state): Plain(number) for state, number in group.values.items()}


def _groups(group: ParamStates, keys: StateKeys, places: "_Places") -> Iterator[SavedGroup]:
    """Check a param group; its parameters without states become a group of their own."""
    common = _values(group)
    kinds: dict[str, dict[str, State]] = {name: {} for name in group.params}
    for state, tensors in group.states.items():
        if name_of(state) in _RESERVED or state in common:
            raise CorruptFileError(
                f"{show(state)} cannot be the name of a state, or is there twice"
            )
        for name, tensor in tensors.items():
            if name not in kinds:
                message = f"has a state {show(state)} of {show(name)}, which is not in its group"
                raise CorruptFileError(message)
            keys.states.setdefault(name, {})[state] = places.add_state(state, name, tensor)
            kinds[name][state] = Elementwise(tensor.dtype)
    begun = tuple(name for name, states in kinds.items() if states)
    stateless = tuple(name for name in group.params if name not in begun)
    if begun:
        states = common_states({name: kinds[name] for name in begun}) or {}
        yield SavedGroup(begun, group.options, {**common, **states})
    if stateless or not begun:
        yield SavedGroup(stateless, group.options, None)


@dataclass(slots=True)
class _Places:
    """Where tensors lie, as a reader says it; each place is checked against its file."""

    directory: Path
    files: dict[Path, tuple[int, SourceFile]] = field(default_factory=dict)
    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    places: dict[str, TensorPlaces] = field(default_factory=dict)

    def add(self, key: str, tensor: StoredTensor) -> None:
        if key in self.tensors:
            raise CorruptFileError(f"{show(key)} is in it twice")
        shape, itemsize = require_shape(tensor.shape), ITEMSIZE.get(tensor.dtype)
        if itemsize is None or tensor.dtype.startswith("q"):
            raise CorruptFileError(f"{show(key)} has the dtype {show(tensor.dtype)}")
        placed, items = [], []
        for box in tensor.boxes:
            start, lengths = sizes_of(box.start), require_shape(box.shape)
            if len(start) != len(shape) or len(lengths) != len(shape):
                message = f"a box of {show(key)} has {len(start)} and {len(lengths)} dimensions"
                raise CorruptFileError(f"{message}, the tensor {len(shape)}")
            if 0 not in lengths:
                nbytes = int(np.prod(lengths, dtype=np.int64)) * itemsize
                items.append((self._file(box.path, key, box.offset, nbytes), box.offset, nbytes))
                placed.append((start, lengths))
        saved = SavedTensor.of(tensor.dtype, shape, placed, items)
        self.tensors[key] = saved
        self.places[key] = TensorPlaces(saved.items.file, saved.items.offset)

    def add_state(self, state: str, name: str, tensor: StoredTensor) -> str:
        """Add a state of a parameter, which was added before; returns its key."""
        key = f"{state} of {name}"
        self.add(key, tensor)
        weight, shape = self.tensors.get(name), self.tensors[key].shape
        if weight is None or shape != weight.shape:
            what = "no such weight is in it" if weight is None else f"its weight is {weight.shape}"
            raise DisagreementError(f"{show(key)} has the shape {shape}, {what}")
        return key

    def _file(self, path: Path, what: str, start: int, nbytes: int) -> int:
        """Return the number of a file that has a range of bytes."""
        if path not in self.files:
            if not is_file(path):
                raise missing_file(path)
            require_regular(path, self.directory)
            self.files[path] = len(self.files), identify(path)
        number, file = self.files[path]
        if not is_size(start) or start + nbytes > file.nbytes:
            message = f"{what!r:.100} takes {nbytes:,} bytes from {show(start)} on, it has"
            raise CorruptFileError(f"{message} {file.nbytes:,}", path=path)
        return number

    def with_sums(self, sums: Iterable[RecordedSum]) -> tuple[SourceFile, ...]:
        """Return the files, with the checksums that are recorded of them."""
        by_path: dict[Path, list[RecordedSum]] = {}
        for recorded in sums:
            if not is_size(recorded.stop) or not is_size(recorded.crc32):
                raise CorruptFileError(f"{show(recorded.crc32)} is no checksum of a range")
            nbytes = recorded.stop - recorded.start
            self._file(recorded.path, "a checksum", recorded.start, nbytes)
            by_path.setdefault(recorded.path, []).append(recorded)
        recorded_of = {path: _recorded(path, found) for path, found in by_path.items()}
        return tuple(
            replace(file, recorded=recorded_of.get(path)) for path, (_, file) in self.files.items()
        )


def _recorded(path: Path, sums: Sequence[RecordedSum]) -> RecordCrcs:
    ordered = sorted(sums, key=lambda one: one.start)
    starts = np.array([one.start for one in ordered], dtype=np.int64)
    stops = np.array([one.stop for one in ordered], dtype=np.int64)
    if (starts >= stops).any() or (starts[1:] < stops[:-1]).any():
        raise CorruptFileError("checksums of ranges that are empty, or share bytes", path=path)
    crc32s = np.array([one.crc32 for one in ordered], dtype=np.uint32)
    return RecordCrcs(starts, stops, crc32s, [f"bytes {one.start}" for one in ordered])
