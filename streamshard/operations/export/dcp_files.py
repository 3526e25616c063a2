"""Turns a checkpoint into the files of a PyTorch distributed checkpoint."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from streamshard.engine.run.work import Fixed, Region, Span, SpanResult, TargetFile, Trailer
from streamshard.formats.dcp import dcp_items, dcp_names
from streamshard.formats.dcp.dcp_items import ItemFrame
from streamshard.formats.dcp.dcp_metadata_writer import (
    ItemPlace,
    PlacedEntry,
    serialize_metadata,
)
from streamshard.layout.memory_plan import MIB
from streamshard.model import BLOB, ITEMSIZE, Whole
from streamshard.operations.export.dcp_contents import (
    DcpContents,
    DcpEntry,
    TensorEntry,
    ValueEntry,
)
from streamshard.operations.export.lazy_spans import (
    SPAN_BYTES,
    LazySpans,
    overflowed_regions,
    runs_of,
)
from streamshard.operations.source.source import Source
from streamshard.operations.transfer.byte_accounting import ByteCounts

_ITEM_COST: Final = MIB // 2
"""Bytes that an item counts as, besides its own: small items take more time than their bytes."""
_COPY_COST: Final = MIB // 8
"""Bytes that a copy counts as."""
_SPAN_OBJECT_BYTES: Final = MIB // 2
"""Memory for the items of a span."""
_COPY_BYTES: Final = 4 * 8
_LOCATE_BYTES: Final = 16 * 8
"""Temporary arrays for locating a copy."""


@dataclass(frozen=True, slots=True)
class DcpItem:
    """An item, and its place."""

    entry: DcpEntry
    offset: int
    """Where it begins in its file."""
    nbytes: int
    first: int = 0
    """First row of its part of a tensor."""
    shape: tuple[int, ...] = ()
    """Shape of this part."""

    @property
    def start(self) -> int:
        """Index of its first element in the tensor."""
        return self.first * int(np.prod(self.shape[1:], dtype=np.int64))


class DcpFiles:
    """Places the items of a distributed checkpoint, and fills them from a source.

    `ranks`: count of files in each directory: items are divided among them in order, so that each
    gets about as many bytes.
    """

    def __init__(self, source: Source, contents: DcpContents, ranks: int) -> None:
        self._source = source
        self._tensors = source.checkpoint.tensors
        self.notes = contents.notes
        self.overflowed: dict[str, int] = {}
        """Tensor → count of its finite elements that the cast made infinite, if there are any."""
        self._held: dict[str, list[DcpItem]] = {}
        self._metadata: dict[str, bytes] = {}
        self._entries = [entry for entries in contents.folders.values() for entry in entries]
        for folder, entries in contents.folders.items():
            self._place(f"{folder}/" if folder else "", entries, ranks)

    def _place(self, prefix: str, entries: Sequence[DcpEntry], ranks: int) -> None:
        """Give every item of a directory its place, and serialize the metadata."""
        cut = [(entry, list(_parts(entry))) for entry in entries]
        total = sum(nbytes for _, parts in cut for _, _, nbytes in parts)
        begun, ends, placed = 0, Counter[int](), []
        for entry, parts in cut:
            places = []
            for first, shape, nbytes in parts:
                rank = min(ranks - 1, (2 * begun + nbytes) * ranks // (2 * total))
                name = dcp_names.item_file(rank)
                item = DcpItem(entry, ends[rank], nbytes, first, shape)
                self._held.setdefault(prefix + name, []).append(item)
                places.append(ItemPlace(name, item.offset, nbytes, first, shape))
                ends[rank] += nbytes
                begun += nbytes
            dtype, whole = (
                (entry.dtype, entry.shape) if isinstance(entry, TensorEntry) else ("", ())
            )
            placed.append(PlacedEntry(entry.paths, tuple(places), dtype, whole))
        self._metadata[prefix + dcp_names.METADATA] = serialize_metadata(placed)

    @property
    def held(self) -> Mapping[str, Sequence[DcpItem]]:
        """Return file → the items in it, in order."""
        return self._held

    def documents(self) -> Mapping[str, bytes]:
        """Return the metadata of each directory."""
        return self._metadata

    def tensors(self) -> int:
        """Count the tensors."""
        return sum(isinstance(entry, TensorEntry) for entry in self._entries)

    def byte_counts(self) -> ByteCounts:
        """Count the bytes that are written, and how often each tensor is read."""
        sizes = {path: items[-1].offset + items[-1].nbytes for path, items in self._held.items()}
        sizes |= {path: len(data) for path, data in self._metadata.items()}
        times, cast_bytes = np.zeros(len(self._tensors), dtype=np.int64), 0
        for entry in self._entries:
            if isinstance(entry, TensorEntry) and isinstance(entry.content, Whole):
                times[entry.content.tensor] += 1
                if self.source_dtype(entry) != entry.dtype:
                    cast_bytes += sum(_content_bytes(entry, s) for _, s, _ in _parts(entry))
        return ByteCounts(sizes, times, cast_bytes)

    def source_dtype(self, entry: TensorEntry) -> str:
        """Return the dtype in which the source holds a tensor."""
        if not isinstance(entry.content, Whole):
            return entry.dtype
        is_raw = self.is_raw(entry.content)
        return entry.dtype if is_raw else self._tensors[entry.content.tensor].dtype

    def is_raw(self, content: Whole) -> bool:
        """Tell whether the source holds a tensor as bytes, whatever its dtype."""
        return self._tensors[content.tensor].state == BLOB

    def copies_bytes(self, workers: int) -> int:
        """Return an upper bound of the memory for the spans in flight and for locating copies."""
        # An item is never cut, so that the last of a span may have many copies.
        last = max(self._copies(item) for items in self._held.values() for item in items)
        most = SPAN_BYTES // _COPY_COST + last
        in_flight = (2 * workers + 2) * (_SPAN_OBJECT_BYTES + most * _COPY_BYTES)
        return in_flight + most * _LOCATE_BYTES

    def targets(self) -> Iterator[TargetFile]:
        """Yield the targets of all files; the metadata is last."""
        for path, items in self._held.items():
            yield self._target(path, items)
        for path, data in self._metadata.items():
            yield TargetFile(path, [Span(0, [Fixed(data)])], is_last=True)

    def _target(self, path: str, items: Sequence[DcpItem]) -> TargetFile:
        def take(result: SpanResult) -> None:
            for offset, count in overflowed_regions(result):
                item = items[bisect_right(items, offset, key=lambda one: one.offset) - 1]
                name = str(item.entry.paths[0][-1])
                self.overflowed[name] = self.overflowed.get(name, 0) + count

        spans = LazySpans(
            [partial(self._span, run) for run in runs_of(items, self._cost, SPAN_BYTES)]
        )
        return TargetFile(path, spans, take=take)

    def _cost(self, item: DcpItem) -> int:
        return item.nbytes + _ITEM_COST + self._copies(item) * _COPY_COST

    def _copies(self, item: DcpItem) -> int:
        """Return how many copies fill an item, at most."""
        entry = item.entry
        if isinstance(entry, ValueEntry) or not isinstance(entry.content, Whole):
            return 0
        return item.nbytes // (self._piece_numel(entry.content) * ITEMSIZE[entry.dtype]) + 2

    def _piece_numel(self, content: Whole) -> int:
        """Return how many elements lie in one piece of the source, at most."""
        return int(self._source.cutting.piece_numel[content.tensor])

    def _span(self, run: Sequence[DcpItem]) -> Span:
        return Span(run[0].offset, [part for item in run for part in self._parts_of(item)])

    def frame(self, item: DcpItem) -> ItemFrame:
        """Return what is known of an item's bytes without reading the source."""
        entry = item.entry
        if isinstance(entry, ValueEntry):
            return ItemFrame(entry.item, (b"",), 0)
        frame = dcp_items.tensor_frame(entry.dtype, item.shape)
        if isinstance(entry.content, bytes):
            return ItemFrame(frame.around(entry.content), (b"",), 0)
        return frame

    def _parts_of(self, item: DcpItem) -> Iterator[Fixed | Region]:
        entry, frame = item.entry, self.frame(item)
        yield Fixed(frame.head)
        if frame.content_bytes and isinstance(entry, TensorEntry):
            yield self._region(entry, item, Trailer(frame.tail))
        else:
            yield Fixed(b"".join(frame.tail))

    def _region(self, entry: TensorEntry, item: DcpItem, trailer: Trailer) -> Region:
        content = entry.content
        if not isinstance(content, Whole):
            raise TypeError("the elements of this tensor are known")
        itemsize, is_raw = ITEMSIZE[entry.dtype], self.is_raw(content)
        unit = itemsize if is_raw else 1  # a blob is counted in bytes
        start, numel = item.start, _content_bytes(entry, item.shape) // itemsize
        held = start * unit, (start + numel) * unit
        region = self._source.region(content.tensor, *held, None if is_raw else entry.dtype)
        return replace(region, counts_overflow=True, trailer=trailer)


def _parts(entry: DcpEntry) -> Iterator[tuple[int, tuple[int, ...], int]]:
    """Yield the first row, the shape and the size of each item of an entry."""
    if isinstance(entry, ValueEntry):
        yield 0, (), len(entry.item)
        return
    for first, shape in dcp_items.chunks(entry.shape, ITEMSIZE[entry.dtype]):
        yield first, shape, dcp_items.tensor_frame(entry.dtype, shape).nbytes


def _content_bytes(entry: TensorEntry, shape: tuple[int, ...]) -> int:
    return dcp_items.tensor_frame(entry.dtype, shape).content_bytes
