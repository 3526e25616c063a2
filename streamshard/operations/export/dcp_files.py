"""Turns a checkpoint into the files of a PyTorch distributed checkpoint."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from streamshard.engine.run.work import Fixed, Trailer
from streamshard.formats.dcp import dcp_items, dcp_names
from streamshard.formats.dcp.dcp_items import ItemFrame
from streamshard.formats.dcp.dcp_metadata_writer import (
    ItemPlace,
    PlacedEntry,
    serialize_metadata,
)
from streamshard.model import ITEMSIZE, LogicalTensor, Whole
from streamshard.operations.export.dcp_contents import (
    DcpContents,
    DcpEntry,
    TensorEntry,
    ValueEntry,
)
from streamshard.operations.source.source import Source
from streamshard.operations.transfer.file_layout import Elements, FileLayout, fixed_files


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
        return self.first * math.prod(self.shape[1:])


class DcpFiles:
    """Places the items of a distributed checkpoint.

    `ranks`: count of files in each directory: items are divided among them in order, so that each
    gets about as many bytes.
    """

    def __init__(self, source: Source, contents: DcpContents, ranks: int) -> None:
        self._tensors = source.checkpoint.tensors
        self.notes = contents.notes
        self.held: dict[str, list[DcpItem]] = {}
        """File → the items in it, in order."""
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
                self.held.setdefault(prefix + name, []).append(item)
                places.append(ItemPlace(name, item.offset, nbytes, first, shape))
                ends[rank] += nbytes
                begun += nbytes
            dtype, whole = (
                (entry.dtype, entry.shape) if isinstance(entry, TensorEntry) else ("", ())
            )
            placed.append(PlacedEntry(entry.paths, tuple(places), dtype, whole))
        self._metadata[prefix + dcp_names.METADATA] = serialize_metadata(placed)

    def documents(self) -> Mapping[str, bytes]:
        """Return the metadata of each directory."""
        return self._metadata

    def tensors(self) -> int:
        """Count the tensors."""
        return sum(isinstance(entry, TensorEntry) for entry in self._entries)

    def tensor(self, number: int) -> LogicalTensor:
        """Return one of the source's tensors."""
        return self._tensors[number]

    def layouts(self) -> Iterator[FileLayout]:
        """Yield the layouts of all files; the metadata is last."""
        for path, items in self.held.items():
            yield FileLayout(path, [piece for item in items for piece in self._pieces(item)])
        yield from fixed_files(self._metadata, is_last=True)

    def frame(self, item: DcpItem) -> ItemFrame:
        """Return what is known of an item's bytes without reading the source."""
        entry = item.entry
        if isinstance(entry, ValueEntry):
            return ItemFrame(entry.item, (b"",), 0)
        frame = dcp_items.tensor_frame(entry.dtype, item.shape)
        if isinstance(entry.content, bytes):
            return ItemFrame(frame.around(entry.content), (b"",), 0)
        return frame

    def _pieces(self, item: DcpItem) -> Iterator[Fixed | Elements]:
        entry, frame = item.entry, self.frame(item)
        yield Fixed(frame.head)
        if not frame.content_bytes:
            yield Fixed(b"".join(frame.tail))
        elif isinstance(entry, TensorEntry) and isinstance(entry.content, Whole):
            yield Elements(
                entry.content,
                frame.content_bytes,
                entry.dtype,
                item.start,
                Trailer(frame.tail),
                str(entry.paths[0][-1]),
            )


def _parts(entry: DcpEntry) -> Iterator[tuple[int, tuple[int, ...], int]]:
    """Yield the first row, the shape and the size of each item of an entry."""
    if isinstance(entry, ValueEntry):
        yield 0, (), len(entry.item)
        return
    for first, shape in dcp_items.chunks(entry.shape, ITEMSIZE[entry.dtype]):
        yield first, shape, dcp_items.tensor_frame(entry.dtype, shape).nbytes
