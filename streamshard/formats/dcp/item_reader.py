"""Reads the items of a distributed checkpoint: each is a whole file of `torch.save` in a file.

Nothing but headers of tensors is read. An item's length is what the index says; the item itself
must agree with it, and with the shape and the dtype that are listed for its box.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Final, Self

import numpy as np

from streamshard.errors import (
    CorruptFileError,
    IncompleteError,
    SourceError,
    UnsupportedError,
    raise_first,
)
from streamshard.formats.dcp.dcp_names import METADATA
from streamshard.formats.dcp.metadata_reader import Index, Ints, SavedTensor
from streamshard.formats.pickle.inert import Node, show
from streamshard.formats.pickle.node_checks import of_file
from streamshard.formats.torch import torch_file, zip_audit
from streamshard.formats.torch.torch_file import TorchFile
from streamshard.formats.torch.torch_tensor import Tensor, tensor_of
from streamshard.formats.torch.zip_audit import TorchAudit
from streamshard.formats.torch.zip_layout import CRC32_IN_ENTRY
from streamshard.io.entries import identify, open_readable
from streamshard.io.files import require_regular
from streamshard.io.readable import Readable
from streamshard.model import ITEMSIZE, RecordCrcs, SourceFile

_END_BYTES: Final = 2048
"""At each end of an item, more bytes than torch writes around a tensor; read at once."""
_ID: Final = "/.data/serialization_id"
"""Record whose content is made from the checksums of the others."""
_DESCRIPTOR: Final = b"PK\x07\x08"
"""Begins what follows the data of a record: its checksum and sizes."""
_TOGETHER: Final = 256
"""Items of a file whose ends are got together: a MiB, which is dropped after that."""
_HEADER_LENGTH_BYTES: Final = 8
"""Bytes of the number that a safetensors file begins with; JSON follows."""
_Row = tuple[int, int, int, int, int]
_LIMIT_VALUE: Final = 1 << 24
"""Most bytes of a value that is no tensor."""


@dataclass(slots=True)
class TensorPlaces:
    """Where the elements of a tensor's boxes lie."""

    file: Ints
    """Index into the list of files."""
    offset: Ints
    """Byte offset of the box's first element."""
    scalar: bytes = b""
    """What a tensor without dimensions holds; empty for others."""


class _ItemBytes:
    """An item as a file of its own, with both of its ends in memory."""

    takes_requests = False

    def __init__(self, source: Readable, offset: int, nbytes: int) -> None:
        self._source = source
        self._offset = offset
        self.nbytes = nbytes
        """Size in bytes."""
        if nbytes <= 2 * _END_BYTES:
            self._head = self._tail = source.read_at(offset, nbytes)
        else:
            self._head = source.read_at(offset, _END_BYTES)
            self._tail = source.read_at(offset + nbytes - _END_BYTES, _END_BYTES)

    def read_at(self, offset: int, count: int) -> bytes:
        """Read bytes from an offset; fewer than requested only at the end of the item."""
        count = max(0, min(count, self.nbytes - offset))
        if offset + count <= len(self._head):
            return self._head[offset : offset + count]
        first = self.nbytes - len(self._tail)
        if offset >= first:
            return self._tail[offset - first : offset - first + count]
        return self._source.read_at(self._offset + offset, count)

    def prepare(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Do nothing: both ends are in memory."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """What is around the elements of an item that was opened.

    Items of boxes of one shape differ in nothing else, except checksums and an id that is one. So
    each item need not be opened, but only compared, which is ten times as fast.
    """

    start: int
    """Byte offset of the first element in the item."""
    head: bytes
    """All before it."""
    stop: int
    """Byte offset after the storage."""
    tail: bytes
    """All after the storage, with zeros in the holes."""
    holes: tuple[tuple[int, int], ...]
    """Where in the tail there are checksums or the id."""
    storage: int
    """Byte offset of the storage in the item."""
    crc32: int
    """Byte offset of its recorded CRC-32."""

    @classmethod
    def of(cls, item: _ItemBytes, opened: TorchFile, tensor: Tensor) -> Self:
        """Describe an item that holds one tensor."""
        stop, crc32 = tensor.storage.offset + tensor.storage.nbytes, 0
        holes = []
        for record in opened.records:
            end = record.start + record.nbytes
            is_id = record.name.endswith(_ID)
            if record.start != tensor.storage.offset and not is_id:
                continue
            holes += [(record.entry + CRC32_IN_ENTRY, record.entry + CRC32_IN_ENTRY + 4)]
            crc32 = crc32 if is_id else record.entry + CRC32_IN_ENTRY
            if item.read_at(end, 4) == _DESCRIPTOR:
                holes.append((end + 4, end + 8))
            if is_id:
                holes.append((record.start, end))
        inside = tuple((start - stop, end - stop) for start, end in holes)
        tail = _blanked(item.read_at(stop, item.nbytes - stop), inside)
        head = item.read_at(0, tensor.offset)
        return cls(tensor.offset, head, stop, tail, inside, tensor.storage.offset, crc32)

    def is_around(self, item: _ItemBytes) -> bool:
        """Tell whether an item of this length is alike in all but elements and checksums."""
        if item.read_at(0, self.start) != self.head:
            return False
        tail = item.read_at(self.stop, item.nbytes - self.stop)
        return _blanked(tail, self.holes) == self.tail


def _blanked(data: bytes, holes: Iterable[tuple[int, int]]) -> bytes:
    made = bytearray(data)
    for start, stop in holes:
        made[start:stop] = bytes(stop - start)
    return bytes(made)


def missing_file(path: Path) -> IncompleteError:
    message = f"missing, {path.with_name(METADATA)} lists items in it; copy it from the"
    return IncompleteError(f"{message} node that saved it", path=path)


def _identified(path: Path) -> SourceFile:
    try:
        require_regular(path, path.parent)
        return identify(path)
    except FileNotFoundError as error:
        raise missing_file(path) from error


class ItemFiles:
    """The files that an index names; each must hold all items that are said to be in it."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._paths = index.files
        self.files = tuple(map(_identified, self._paths))
        """In the order of `Index.files`."""
        self._known: dict[bytes, Node] = {}
        self._frames: dict[tuple[int, str, tuple[int, ...]], _Frame] = {}
        """Length of an item, dtype and shape of its tensor → what is around the elements."""
        self._crc32s = array("q")
        """File, start and stop of storages, and what is recorded of them."""
        raise_first(self._overlaps())

    def _overlaps(self) -> Iterator[SourceError]:
        """Find items that overlap, or end past their file."""
        items = self._index.every()
        every = [np.concatenate([getattr(i, n) for i in items] or [np.zeros(0, np.int64)])
                 for n in ("file", "offset", "nbytes")]  # fmt: skip
        order = np.lexsort((every[2], every[1], every[0]))
        file, offset, nbytes = (column[order] for column in every)
        sizes = np.array([f.nbytes for f in self.files], dtype=np.int64)
        for at in np.flatnonzero(offset + nbytes > sizes[file])[:1].tolist():
            path, end = self._paths[file[at]], int(offset[at] + nbytes[at])
            message = f"{sizes[file[at]]:,} bytes, {METADATA} lists an item to"
            yield CorruptFileError(
                f"{message} byte {end:,}. Was it cut off? Copy it again", path=path
            )
        same = file[1:] == file[:-1]
        # Tied names share one item: then both its ends are equal.
        equal = same & (offset[1:] == offset[:-1]) & (nbytes[1:] == nbytes[:-1])
        for at in np.flatnonzero(same & ~equal & (offset[1:] < (offset + nbytes)[:-1]))[
            :1
        ].tolist():
            self._refuse_safetensors(int(file[at]), int(offset[at]))
            message = f"{METADATA} lists items of bytes"
            one, other = (f"{offset[n]:,} to {offset[n] + nbytes[n]:,}" for n in (at, at + 1))
            yield CorruptFileError(
                f"{message} {one} and of {other}, which overlap", path=self._paths[file[at]]
            )

    def _refuse_safetensors(self, file: int, offset: int) -> None:
        """Name the format whose tensors torch lists as if all began where their header does."""
        with open_readable(self._paths[file], self.files[file]) as source:
            if source.read_at(offset, _HEADER_LENGTH_BYTES + 2)[_HEADER_LENGTH_BYTES:] != b'{"':
                return
        message = (
            f"its tensors are in the format of safetensors, and {METADATA} does not tell where"
        )
        message = f"{message}: save with torch's default, SerializationFormat.TORCH_SAVE"
        raise UnsupportedError(message, path=self._paths[file])

    def locate(self, tensors: Mapping[str, SavedTensor]) -> dict[str, TensorPlaces]:
        """Find the elements of tensors by the headers of their items, file by file."""
        names = list(tensors)
        counts = np.array([len(tensors[name].items) for name in names], dtype=np.int64)
        places = {
            name: TensorPlaces(tensors[name].items.file, np.empty(count, np.int64))
            for name, count in zip(names, counts.tolist(), strict=True)
        }
        if not counts.sum():
            return places
        tensor = np.repeat(np.arange(len(names)), counts)
        box = np.arange(len(tensor)) - np.repeat(np.cumsum(counts) - counts, counts)
        file = np.concatenate([tensors[name].items.file for name in names])
        offset = np.concatenate([tensors[name].items.offset for name in names])
        order = np.lexsort((offset, file))
        nbytes = np.concatenate([tensors[name].items.nbytes for name in names])
        columns = (c[order].tolist() for c in (file, offset, nbytes, tensor, box))
        for source, some in self._together(zip(*columns, strict=True)):
            for *_, t, b in some:
                self._place(source, names[t], tensors[names[t]], b, places[names[t]])
        self._record()
        return places

    def _record(self) -> None:
        """Add the recorded checksums to the files; tied names share a storage."""
        rows = np.unique(np.array(self._crc32s, dtype=np.int64).reshape(-1, 4), axis=0)
        stops = np.searchsorted(rows[:, 0], np.arange(len(self.files)), side="right")
        self.files = tuple(
            replace(file, recorded=RecordCrcs(own[:, 1], own[:, 2], own[:, 3].astype(np.uint32)))
            for file, own in zip(self.files, np.split(rows, stops[:-1]), strict=True)
        )

    def _together(self, rows: Iterable[_Row]) -> Iterator[tuple[Readable, list[_Row]]]:
        """Yield open files, each with some of the items in it whose ends are read already.

        Each row begins with file, offset and length; rows are in order.
        """
        for file, own in groupby(rows, key=lambda row: row[0]):
            while some := list(islice(own, _TOGETHER)):
                with open_readable(self._paths[file], self.files[file]) as source:
                    _get_ends(source, [(start, nbytes) for _, start, nbytes, *_ in some])
                    yield source, some

    def _place(
        self, source: Readable, name: str, tensor: SavedTensor, box: int, found_at: TensorPlaces
    ) -> None:
        """Find the byte offset of the first element of a box."""
        file = int(tensor.items.file[box])
        items, what = tensor.items, f"the item of {show(name)}"
        start = int(items.offset[box])
        item = _ItemBytes(source, start, int(items.nbytes[box]))
        shape = tuple(tensor.sizes[box].tolist())
        frame = self._frames.get((item.nbytes, tensor.dtype, shape))
        if frame is None or not frame.is_around(item):
            with of_file(self._paths[file]):
                frame = self._parsed(item, f"{what} at byte {start:,}", tensor.dtype, shape)
        found_at.offset[box] = start + frame.start
        crc32 = int.from_bytes(item.read_at(frame.crc32, 4), "little")
        if crc32:  # else the writer left it out
            self._crc32s.extend((file, start + frame.storage, start + frame.stop, crc32))
        if not shape:
            found_at.scalar = item.read_at(frame.start, ITEMSIZE[tensor.dtype])

    def _parsed(self, item: _ItemBytes, what: str, dtype: str, shape: tuple[int, ...]) -> "_Frame":
        """Open an item, and check that it is the box that is listed."""
        opened = _opened(item, what)
        tensor = tensor_of(opened.root)
        if tensor is None:
            raise CorruptFileError(f"{what} is no tensor")
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            message = f"{what} is {tensor.dtype} of {show(tensor.shape)}"
            raise CorruptFileError(f"{message}, listed is {dtype} of {show(shape)}")
        tensor.require_contiguous(what)
        frame = _Frame.of(item, opened, tensor)
        self._frames[item.nbytes, dtype, shape] = frame
        return frame

    def values(self, names: Iterable[str]) -> dict[str, Node]:
        """Read values that are no tensors, as inert nodes."""
        wanted = list(names)
        items = [self._index.values[name] for name in wanted]
        rows: list[_Row] = sorted(
            (int(i.file[0]), int(i.offset[0]), int(i.nbytes[0]), n, 0) for n, i in enumerate(items)
        )
        nodes: dict[str, Node] = {}
        for source, some in self._together(rows):
            for file, start, nbytes, number, _ in some:
                name = wanted[number]
                with of_file(self._paths[file]):
                    what = f"the item of {show(name)} at byte {start:,}"
                    nodes[name] = self._value(source, start, nbytes, what)
        return nodes

    def _value(self, source: Readable, start: int, nbytes: int, what: str) -> Node:
        if nbytes > _LIMIT_VALUE:
            raise UnsupportedError(f"{what} has {nbytes:,} bytes, {_LIMIT_VALUE:,} is most")
        item = _ItemBytes(source, start, nbytes)
        # A flattened optimizer has the same few values for each of its parameters.
        data = item.read_at(0, nbytes) if nbytes <= 2 * _END_BYTES else b""
        if data and data in self._known:
            return self._known[data]
        root = _opened(item, what).root
        if data:
            self._known[data] = root
        return root


def audit_items(path: Path, places: Iterable[tuple[int, int]]) -> Iterator[tuple[int, TorchAudit]]:
    """Check the containers of a file's items; yield the offset and the result of each.

    `places`: offset and length of each item.
    """
    with open_readable(path) as source:
        for start, nbytes in places:
            yield start, zip_audit.audit_part(_ItemBytes(source, start, nbytes))


def _opened(item: _ItemBytes, what: str) -> TorchFile:
    try:
        return torch_file.read_archive(item)
    except SourceError as error:
        kind = type(error) if isinstance(error, UnsupportedError) else CorruptFileError
        raise kind(f"{what}, {item.nbytes:,} bytes: {error}") from error


def _get_ends(source: Readable, items: Iterable[tuple[int, int]]) -> None:
    """Get both ends of items side by side, where each read takes long."""
    ranges = []
    for start, nbytes in items:
        head = (start, start + min(nbytes, 2 * _END_BYTES))
        ranges += [head] if nbytes <= 2 * _END_BYTES else [
            (start, start + _END_BYTES), (start + nbytes - _END_BYTES, start + nbytes)
        ]  # fmt: skip
    source.prepare(ranges)
