"""Reads `.metadata`, the index of a distributed checkpoint, without running anything of it.

It is a pickle of `torch.distributed.checkpoint.metadata.Metadata` (torch 2.13): the shape and dtype
of each tensor with the boxes that it was cut into, and the file, offset and length of every item.
An item is one box of a tensor, or another value.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from streamshard.errors import (
    CorruptFileError,
    DisagreementError,
    IncompleteError,
    UnsupportedError,
)
from streamshard.formats.dcp import dcp_names
from streamshard.formats.pickle import inert_load
from streamshard.formats.pickle.inert import LIMIT_BYTES, Call, Global, Node, show
from streamshard.formats.pickle.node_checks import name_of, of_file
from streamshard.formats.torch.torch_tensor import shape_of
from streamshard.io.entries import examine, is_directory, names_in, read_all
from streamshard.model import ITEMSIZE

Ints = NDArray[np.int64]
T = TypeVar("T")

_STRIDED: Final = "torch.strided"
_LIMIT: Final = 1 << 62
"""Larger than any file; the sum of two such numbers still fits an int64."""
_LIMIT_PATH: Final = 255


@dataclass(frozen=True, slots=True)
class SavedItems:
    """Where items lie; parallel arrays."""

    file: Ints
    """Index into the list of files."""
    offset: Ints
    nbytes: Ints

    def __len__(self) -> int:
        return len(self.file)

    def shifted(self, count: int) -> "SavedItems":
        """Return the same with files counted from `count` on."""
        return replace(self, file=self.file + count)


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor, and the boxes that it was cut into; empty boxes are left out."""

    dtype: str
    shape: tuple[int, ...]
    offsets: Ints
    """Where each box begins, (boxes, dimensions)."""
    sizes: Ints
    """Lengths of each box, (boxes, dimensions)."""
    items: SavedItems
    """The item of each box."""

    @classmethod
    def of(
        cls,
        dtype: str,
        shape: tuple[int, ...],
        boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
        items: Sequence[tuple[int, int, int]],
    ) -> Self:
        """Return a tensor of boxes, offsets with sizes, and their items: file, offset, length."""
        form = len(boxes), len(shape)
        offsets = np.array([box[0] for box in boxes], np.int64).reshape(form)
        sizes = np.array([box[1] for box in boxes], np.int64).reshape(form)
        return cls(dtype, shape, offsets, sizes, _arrays(items))


@dataclass(frozen=True, slots=True)
class Index:
    """What `.metadata` lists, by the key of the flattened state dict.

    The keys are in the order of the state dict, if torch's planner recorded where they stood.
    """

    tensors: Mapping[str, SavedTensor]
    values: Mapping[str, SavedItems]
    """Values that are no tensors; one item each."""
    paths: Mapping[str, tuple[str, ...]]
    """Key → where the value stood in the state dict; empty if that was not recorded."""
    files: tuple[Path, ...]
    """The files of the items, in the order in which they are first mentioned."""
    flattened: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Key of a tensor of which Megatron flattened the boxes → its shape before that."""

    def every(self) -> list[SavedItems]:
        """Return the items of all tensors, then those of all values."""
        return [*(tensor.items for tensor in self.tensors.values()), *self.values.values()]

    def by_file(self) -> dict[Path, list[tuple[int, int]]]:
        """Return file → offset and length of each item in it, in order; shared items once."""
        places: dict[Path, set[tuple[int, int]]] = {path: set() for path in self.files}
        for items in self.every():
            columns = (column.tolist() for column in (items.file, items.offset, items.nbytes))
            for file, offset, nbytes in zip(*columns, strict=True):
                places[self.files[file]].add((offset, nbytes))
        return {path: sorted(extents) for path, extents in places.items()}


def is_distributed(directory: Path) -> bool:
    """Tell whether a directory is a distributed checkpoint, or was to be one."""
    return is_directory(directory) and any(
        name == dcp_names.METADATA or name.endswith(".distcp") for name in names_in(directory)
    )


def join(one: Index, other: Index) -> Index:
    """Return what both list: the model, and its optimizer in a directory of its own."""
    tensors, values = dict(one.tensors), dict(one.values)
    count = len(one.files)
    for key in other.tensors.keys() | other.values.keys():
        if key in tensors or key in values:
            message = f"{other.files[0].parent} and {one.files[0].parent} both have {show(key)}"
            raise DisagreementError(message)
    for key, tensor in other.tensors.items():
        tensors[key] = replace(tensor, items=tensor.items.shifted(count))
    values |= {key: items.shifted(count) for key, items in other.values.items()}
    return Index(tensors, values, {**one.paths, **other.paths}, (*one.files, *other.files))


def read_index(directory: Path) -> Index:
    path = directory / dcp_names.METADATA
    try:
        nbytes = examine(path).nbytes
    except FileNotFoundError as error:
        message = "missing; torch writes it last, so this save did not come to its end"
        raise IncompleteError(f"{message}: take an earlier checkpoint", path=path) from error
    with of_file(path):
        if nbytes > LIMIT_BYTES:
            raise UnsupportedError(f"{nbytes:,} bytes, {LIMIT_BYTES:,} is most")
        try:
            root = inert_load.load(read_all(path, nbytes + 1), _no_tensors)
            return _IndexReader(path).read(root)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            message = f"not an index of a distributed checkpoint ({type(error).__name__})"
            raise CorruptFileError(message) from error


def _no_tensors(_: Node) -> Node:
    raise CorruptFileError("refers to a storage, which no index does")


class _IndexReader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[str, int] = {}
        self._items: dict[tuple[str, tuple[int, ...] | None], tuple[int, int, int]] = {}

    def read(self, root: Node) -> Index:
        of_megatron = isinstance(root, Call) and root.function == dcp_names.MEGATRON_METADATA
        kind = dcp_names.MEGATRON_METADATA if of_megatron else dcp_names.METADATA_CLASS
        top = _state_of(root, kind)
        listed, stored = top["state_dict_metadata"], top["storage_data"]
        if not isinstance(listed, dict) or not isinstance(stored, dict):
            raise CorruptFileError("lists neither tensors nor items")
        for key, info in stored.items():
            self._add_item(key, info)
        stored.clear()
        tensors: dict[str, SavedTensor] = {}
        values: dict[str, SavedItems] = {}
        for key, entry in listed.items():
            name = name_of(key)
            if isinstance(entry, Call) and entry.function == dcp_names.BYTES:
                values[name] = _arrays([self._take(name, None)])
            else:
                tensors[name] = self._tensor(name, entry)
        for name, where in self._items:
            at = "" if where is None else f" at {show(where)}"
            raise CorruptFileError(f"an item of {show(name)}{at} belongs to nothing that is listed")
        paths = _paths(top.get("planner_data"), {*tensors, *values})
        files = tuple(self._path.parent / name for name in self._files)
        flattened = {
            name_of(key): shape_of(of_tensor["nd_reformulated_orig_global_shape"])
            for key, of_tensor in (top.get("mcore_data") or {}).items()
            if of_tensor
        }
        ordered = _in_order(tensors, paths), _in_order(values, paths)
        return Index(*ordered, paths, files, flattened)

    def _add_item(self, key: Node, info: Node) -> None:
        index = _state_of(key, dcp_names.INDEX)
        name, offset = name_of(index["fqn"]), index.get("offset")
        fields = _state_of(info, dcp_names.STORAGE_INFO)
        if fields.get("transform_descriptors"):
            what = show(fields["transform_descriptors"])
            message = f"{show(name)} was transformed while it was saved, by {what}, as extensions"
            raise UnsupportedError(f"{message} of torch's writer do: save it without them")
        file, start, nbytes = fields["relative_path"], fields["offset"], fields["length"]
        _require_name(file, name)
        if not all(type(number) is int and 0 <= number < _LIMIT for number in (start, nbytes)):
            message = f"the item of {show(name)} is said to be {show(nbytes)} bytes at"
            raise CorruptFileError(f"{message} {show(start)} of {file}")
        where = None if offset is None else shape_of(offset)
        extent = (self._files.setdefault(file, len(self._files)), start, nbytes)
        if self._items.setdefault((name, where), extent) != extent:
            raise CorruptFileError(f"two items claim to be {show(name)} at {show(where)}")

    def _take(self, name: str, where: tuple[int, ...] | None) -> tuple[int, int, int]:
        extent = self._items.pop((name, where), None)
        if extent is None:
            at = "" if where is None else f" at {show(where)}"
            raise CorruptFileError(f"lists {show(name)}{at}, but not where it lies")
        return extent

    def _tensor(self, name: str, entry: Node) -> SavedTensor:
        if not isinstance(entry, Call) or entry.function != dcp_names.TENSOR:
            raise UnsupportedError(f"{show(name)} is {show(entry)}, which is not known")
        fields = _state_of(entry, dcp_names.TENSOR)
        shape, dtype = shape_of(fields["size"]), _dtype(name, fields["properties"])
        boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        items: list[tuple[int, int, int]] = []
        for chunk in fields["chunks"]:
            box = _state_of(chunk, dcp_names.CHUNK)
            offsets, sizes = shape_of(box["offsets"]), shape_of(box["sizes"])
            if not len(offsets) == len(sizes) == len(shape):
                message = f"{show(name)} of {show(shape)} has a box at {show(offsets)} of"
                raise CorruptFileError(f"{message} {show(sizes)}")
            if 0 in sizes:  # ranks that got nothing of it list it all the same
                self._items.pop((name, offsets), None)
                continue
            boxes.append((offsets, sizes))
            items.append(self._take(name, offsets))
        return SavedTensor.of(dtype, shape, boxes, items)


def _arrays(items: Sequence[tuple[int, int, int]]) -> SavedItems:
    return SavedItems(*np.array(items, dtype=np.int64).reshape(len(items), 3).T)


def _state_of(node: Node, kind: Global) -> dict[str, Node]:
    if not isinstance(node, Call) or node.function != kind or not isinstance(node.state, dict):
        raise CorruptFileError(f"has {show(node)} where torch writes {kind.name}")
    return node.state


def _dtype(name: str, properties: Node) -> str:
    # The class of dtype and layout has been in two modules.
    kind = f".{dcp_names.PROPERTIES.name}"
    is_known = isinstance(properties, Call) and properties.name.endswith(kind)
    if not is_known or not isinstance(properties.state, tuple) or len(properties.state) < 2:
        raise CorruptFileError(f"{show(name)} has no properties of a tensor")
    dtype, layout = properties.state[:2]
    if isinstance(layout, Call) and layout.args != (_STRIDED,):
        raise UnsupportedError(f"{show(name)} is a tensor of {show(layout.args)}, not a dense one")
    known = isinstance(dtype, Global) and dtype.module == "torch" and dtype.name in ITEMSIZE
    if not known or dtype.name.startswith("q"):
        raise UnsupportedError(f"{show(name)} is of dtype {show(dtype)}, which is not supported")
    return str(dtype.name)


def _require_name(file: Node, name: str) -> None:
    """Refuse a file that does not lie next to the index."""
    sound = isinstance(file, str) and 0 < len(file) <= _LIMIT_PATH and file.isprintable()
    if not sound or "/" in file or "\\" in file or file.startswith("."):
        raise CorruptFileError(f"the item of {show(name)} is said to lie in {show(file)}")


def _in_order(entries: Mapping[str, T], order: Iterable[str]) -> dict[str, T]:
    """Bring what was listed into the order of the state dict; keys that it lacks come last.

    `.metadata` lists what the first rank saved first. Of copies on several ranks (HSDP, tensor
    parallelism) torch saves one, on the rank that has least to save.
    """
    return {key: entries[key] for key in dict.fromkeys((*order, *entries)) if key in entries}


def _paths(planner_data: Node, keys: set[str]) -> dict[str, tuple[str, ...]]:
    """Read where each value stood in the state dict, which torch's own planner records."""
    if not isinstance(planner_data, dict):
        return {}
    paths = {}
    for key, path in planner_data.items():
        if not isinstance(key, str) or key not in keys or not isinstance(path, tuple):
            continue
        if all(isinstance(part, str | int) for part in path):
            paths[key] = tuple(str(part) for part in path)
    return paths
