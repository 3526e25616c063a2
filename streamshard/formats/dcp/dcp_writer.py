"""Writes a distributed checkpoint: its items, each a file of torch.save, and the index of them."""

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from streamshard.errors import UnsupportedError
from streamshard.formats.dcp import dcp_names
from streamshard.formats.dcp.dcp_names import ARCHIVE
from streamshard.formats.pickle.inert import Global, Node
from streamshard.formats.pickle.opcode_writer import OpcodeWriter
from streamshard.formats.torch import zip_layout
from streamshard.formats.torch.torch_tensor import SIZE, Storage, make_tensor, storages_in
from streamshard.formats.torch.zip_layout import Record, TorchLayout
from streamshard.model import Literal

_ITEM_BYTES: Final = 64 << 20
"""Most bytes of an item's tensor, unless one row is larger: torch loads whole items."""
_CRC32: Final = slice(4, 8)
"""Place of the checksum in a record's descriptor."""


@dataclass(frozen=True, slots=True)
class ItemFrame:
    """The bytes of an item before and after the elements of its tensor."""

    head: bytes
    tail: tuple[bytes, ...]
    """The CRC-32 of the elements stands between each two of them."""
    content_bytes: int
    """Size of the elements; 0 if all of the item is in `head` and `tail`."""

    @property
    def nbytes(self) -> int:
        rest = sum(map(len, self.tail)) + 4 * (len(self.tail) - 1)
        return len(self.head) + self.content_bytes + rest

    def around(self, content: bytes) -> bytes:
        return self.head + content + zlib.crc32(content).to_bytes(4, "little").join(self.tail)


def _chunk_rows(shape: tuple[int, ...], itemsize: int) -> int:
    """Return how many rows of a tensor go into each item: whole ones, and at least one.

    >>> _chunk_rows((1000, 1 << 20), 4), _chunk_rows((3, 1 << 30), 4), _chunk_rows((5, 0), 4)
    (16, 1, 5)
    """
    row_bytes = math.prod(shape[1:]) * itemsize
    return min(shape[0], max(1, _ITEM_BYTES // row_bytes)) if row_bytes else shape[0]


def chunks(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Cut a tensor into items: yield the first row and the shape of each.

    >>> list(chunks((40, 1 << 20), 4)), list(chunks((), 4)), list(chunks((0, 3), 4))
    ([(0, (16, 1048576)), (16, (16, 1048576)), (32, (8, 1048576))], [(0, ())], [(0, (0, 3))])
    """
    rows = _chunk_rows(shape, itemsize) if shape else 0
    if not rows:
        yield 0, shape
        return
    for first in range(0, shape[0], rows):
        yield first, (min(rows, shape[0] - first), *shape[1:])


@lru_cache(maxsize=256)
def tensor_frame(dtype: str, shape: tuple[int, ...]) -> ItemFrame:
    """Serialize what is around the elements of a tensor in its item."""
    storage = Storage(dtype, math.prod(shape))
    layout = zip_layout.lay_out(zip_layout.serialize(make_tensor(storage, shape)), ARCHIVE)
    records = layout.records
    number = next(n for n, record in enumerate(records) if record.content is storage)
    record, known = records[number], _checksums(layout)
    before = b"".join(map(_literal, records[:number])) + record.header()
    after = b"".join(map(_literal, records[number + 1 :]))
    ending, crc32_at = layout.ending(known), list(layout.crc32_places())[number]
    descriptor = record.descriptor(0)
    if not descriptor:  # without elements, nothing has a checksum
        return ItemFrame(before, (after + ending,), 0)
    middle = descriptor[_CRC32.stop :] + after + ending[:crc32_at]
    tail = (descriptor[: _CRC32.start], middle, ending[crc32_at + 4 :])
    return ItemFrame(before, tail, storage.nbytes)


def value_item(value: Node) -> bytes:
    """Serialize the item of a value that holds no tensor."""
    if next(storages_in(value), None) is not None:
        raise TypeError("a value with a tensor in it")
    layout = zip_layout.lay_out(zip_layout.serialize(value), ARCHIVE)
    return b"".join(map(_literal, layout.records)) + layout.ending(_checksums(layout))


def _literal(record: Record) -> bytes:
    data = record.content.data if isinstance(record.content, Literal) else b""
    return record.header() + data + record.descriptor(zlib.crc32(data))


def _checksums(layout: TorchLayout) -> list[int]:
    """Return the checksums of the records; 0 for those whose data is not known."""
    contents = (record.content for record in layout.records)
    return [zlib.crc32(one.data) if isinstance(one, Literal) else 0 for one in contents]


StatePath = tuple[str | int, ...]
"""Keys and indices that lead to a value in the state dict; joined by dots, they are its key."""

_CONTIGUOUS: Final = 0
"""`_MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT`."""


@dataclass(frozen=True, slots=True)
class ItemPlace:
    file: str
    """Name of the file in the checkpoint's directory."""
    offset: int
    nbytes: int
    first: int = 0
    """First row of the tensor in this item."""
    shape: tuple[int, ...] = ()
    """Shape of the item's part of the tensor."""


@dataclass(frozen=True, slots=True)
class PlacedEntry:
    """A tensor, or another value, with its items."""

    paths: Sequence[StatePath]
    """More than one if the same items are stored under several names."""
    items: tuple[ItemPlace, ...]
    dtype: str = ""
    """Empty for a value that is no tensor."""
    shape: tuple[int, ...] = ()


def key_of(path: StatePath) -> str:
    """Return the key of a value in the flattened state dict.

    >>> key_of(("optim", "param_groups", 0, "lr"))
    'optim.param_groups.0.lr'
    """
    return ".".join(map(str, path))


def serialize_metadata(entries: Sequence[PlacedEntry]) -> bytes:
    return _MetadataWriter(entries).serialize()


class _MetadataWriter:
    """Writes the pickle. Equal sizes and properties are one object each, as are values' places.

    A checkpoint may have a million keys, each with several objects.
    """

    def __init__(self, entries: Sequence[PlacedEntry]) -> None:
        self._out = OpcodeWriter()
        self._entries = entries
        self._keys = sum(len(entry.paths) for entry in entries)
        self._indices = sum(len(entry.paths) * len(entry.items) for entry in entries)

    def serialize(self) -> bytes:
        out = self._out
        with out.new_object(dcp_names.METADATA_CLASS), out.in_dict():
            out.text("state_dict_metadata")
            self._descriptions()
            out.text("planner_data")
            self._paths()
            out.text("storage_data")
            self._places()
            out.text("storage_meta")
            out.none()
            out.text("version")
            out.text(dcp_names.VERSION)
        return out.done()

    def _descriptions(self) -> None:
        seen: set[str] = set()
        each = ((entry, path) for entry in self._entries for path in entry.paths)
        for _, (entry, path) in zip(self._out.in_large_dict(self._keys), each, strict=True):
            key = key_of(path)
            if key in seen:
                message = f"two values would have the key '{key}' in the distributed checkpoint"
                raise UnsupportedError(message)
            seen.add(key)
            self._out.text(key)
            self._description(entry)

    def _description(self, entry: PlacedEntry) -> None:
        out, memo = (
            self._out,
            (dcp_names.TENSOR, id(entry)) if entry.dtype else (dcp_names.BYTES, 0),
        )
        if out.recall(memo):
            return
        if not entry.dtype:
            with out.new_object(dcp_names.BYTES), out.in_dict():
                pass
        else:
            with out.new_object(dcp_names.TENSOR), out.in_dict():
                out.text("properties")
                self._properties(entry.dtype)
                out.text("size")
                self._size(entry.shape)
                out.text("chunks")
                with out.in_list():
                    for item in entry.items:
                        self._chunk(item)
        if len(entry.paths) > 1 or not entry.dtype:
            out.memoize(memo)

    def _chunk(self, item: ItemPlace) -> None:
        with self._out.new_object(dcp_names.CHUNK), self._out.in_dict():
            self._out.text("offsets")
            self._size(_offsets(item))
            self._out.text("sizes")
            self._size(item.shape)

    def _paths(self) -> None:
        paths = (path for entry in self._entries for path in entry.paths)
        for _, path in zip(self._out.in_large_dict(self._keys), paths, strict=True):
            self._out.text(key_of(path))
            with self._out.in_tuple():
                for part in path:
                    if isinstance(part, str):
                        self._out.text(part)
                    else:
                        self._out.number(part)

    def _places(self) -> None:
        places = (
            (entry, path, item)
            for entry in self._entries
            for path in entry.paths
            for item in entry.items
        )
        out = self._out
        for _, (entry, path, item) in zip(out.in_large_dict(self._indices), places, strict=True):
            with out.new_object(dcp_names.INDEX), out.in_dict():
                out.text("fqn")
                out.text(key_of(path))
                out.text("index")
                out.none()
                if entry.dtype:
                    out.text("offset")
                    self._size(_offsets(item))
            self._place(item, is_shared=len(entry.paths) > 1)

    def _place(self, item: ItemPlace, *, is_shared: bool) -> None:
        out = self._out
        if out.recall(item):
            return
        with out.new_object(dcp_names.STORAGE_INFO), out.in_dict():
            out.text("relative_path")
            out.text(item.file)
            out.text("offset")
            out.number(item.offset)
            out.text("length")
            out.number(item.nbytes)
        if is_shared:
            out.memoize(item)

    def _size(self, shape: tuple[int, ...]) -> None:
        out = self._out
        if out.recall(shape):
            return
        with out.call(SIZE), out.in_tuple():
            for length in shape:
                out.number(length)
        out.memoize(shape)

    def _properties(self, dtype: str) -> None:
        out, memo = self._out, (dcp_names.PROPERTIES, dtype)
        if out.recall(memo):
            return
        with out.new_object(dcp_names.PROPERTIES), out.in_tuple():
            out.name(Global("torch", dtype))
            out.name(dcp_names.STRIDED)
            out.false()
            with out.call(dcp_names.MEMORY_FORMAT):
                out.number(_CONTIGUOUS)
            out.false()
        out.memoize(memo)


def _offsets(item: ItemPlace) -> tuple[int, ...]:
    return (item.first, *(0 for _ in item.shape[1:])) if item.shape else ()
