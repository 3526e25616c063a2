"""Counts the bytes of every file that a plan writes, and how often it reads each source tensor."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from streamshard.formats.deepspeed.write.zero_writer import FileImage
from streamshard.formats.torch.torch_tensor import Storage
from streamshard.formats.zarr.chunks import EncodedChunk
from streamshard.layout.cutting import Segments
from streamshard.model import (
    ITEMSIZE,
    MASTER,
    MODULE,
    PartitionOf,
    ShardOf,
    ShardsOf,
    Whole,
    WholesOf,
)
from streamshard.operations.native.storage_regions import NativeFiles
from streamshard.operations.source.source import Source

_PIECES_AT_ONCE: Final = 1 << 16
"""Pieces that are located together, which bounds the memory for it."""


@dataclass(frozen=True, slots=True)
class ByteCounts:
    """The bytes that a plan writes, and the tensors that it reads for them."""

    sizes: Mapping[str, int]
    """Path of every target file → its bytes; an upper bound for compressed files."""
    times: NDArray[np.int64]
    """How often each of the source's tensors is read completely."""
    cast_bytes: int = 0
    """Bytes written that are module weights cast from master weights, or weights cast to another
    dtype."""
    padding_bytes: int = 0
    """Bytes written that are zeros to fill up partitions."""


class NativeTally:
    """Counts torch files as they are laid out."""

    def __init__(self, source: Source, files: NativeFiles) -> None:
        self._tensors = source.checkpoint.tensors
        self._files = files
        self._times = np.zeros(len(self._tensors), dtype=np.int64)
        self._sizes: dict[str, int] = {}
        self._cut: set[tuple[int, str, int, str]] = set()
        """Tensors that are cut among ranks, and were counted completely with the first rank."""
        self._cast_bytes = self._padding_bytes = 0

    def add(self, images: Iterable[tuple[FileImage, Sequence[str]]]) -> None:
        """Add files, each with the paths of all files that are laid out like it."""
        for image, paths in images:
            nbytes = self._files.lay_out(image).nbytes
            self._sizes.update(dict.fromkeys(paths, nbytes))
            for storage in image.serialized.storages:
                self._add(storage, image, len(paths))

    def add_files(self, tensors: Mapping[int, str]) -> None:
        """Add sidecars: tensor → path."""
        for tensor, path in tensors.items():
            self._times[tensor] += 1
            self._sizes[path] = self._tensors[tensor].nbytes

    def add_bytes(self, path: str, nbytes: int) -> None:
        """Add a file that is not read from the source."""
        self._sizes[path] = nbytes

    def _add(self, storage: Storage, image: FileImage, count: int) -> None:
        content = storage.content
        if isinstance(content, Whole):
            self._times[content.tensor] += count
            tensor = self._tensors[content.tensor]
            if storage.dtype != tensor.dtype and tensor.state in (MASTER, MODULE):
                self._cast_bytes += storage.nbytes * count
        elif isinstance(content, PartitionOf | ShardsOf | ShardOf | WholesOf):
            members = self._files.fill(content, image)
            self._padding_bytes += storage.nbytes * count
            if isinstance(content, WholesOf):
                self._count(members, storage)
            elif (key := _key(content, image)) not in self._cut:
                self._cut.add(key)
                self._count(members, storage)

    def _count(self, members: NDArray[np.int64], storage: Storage) -> None:
        """Count tensors that are read once, by one rank or by all ranks together."""
        self._times[members] += 1
        numel = sum(self._tensors[tensor].numel for tensor in members.tolist())
        self._padding_bytes -= numel * ITEMSIZE[storage.dtype]

    def done(self) -> ByteCounts:
        """Return the counts."""
        return ByteCounts(self._sizes, self._times, self._cast_bytes, self._padding_bytes)


def _key(content: PartitionOf | ShardsOf | ShardOf, image: FileImage) -> tuple[int, str, int, str]:
    if isinstance(content, PartitionOf):
        return image.family, "partition", content.group, content.state
    if isinstance(content, ShardsOf):
        return image.family, "shards", content.sub_group, content.state
    return image.family, "shard", content.tensor, ""


def read_bytes(source: Source, times: NDArray[np.int64]) -> NDArray[np.int64]:
    """Compute how many bytes of content are read from each of the source's files.

    Parameters
    ----------
    times
        How often each tensor is read completely. A compressed file counts once; the run may read
        it a few times.
    """
    cutting, tensors = source.cutting, source.checkpoint.tensors
    found = np.zeros(len(source.files), dtype=np.int64)
    numels = np.array([tensor.numel for tensor in tensors], dtype=np.int64)
    wanted = np.flatnonzero((times > 0) & (numels > 0))
    pieces = np.cumsum(numels[wanted] // cutting.piece_numel[wanted] + 2)
    bounds = np.searchsorted(
        pieces, np.arange(0, pieces[-1] if len(pieces) else 0, _PIECES_AT_ONCE)
    )
    for some in np.split(wanted, bounds[1:]):
        zeros = np.zeros_like(some)
        copies = cutting.locate(Segments(some, zeros, numels[some], some), target_itemsize=0)
        # With target_itemsize=0, each copy's `target` stays the number of its tensor.
        np.add.at(found, copies.file, copies.nbytes * times[copies.target])
    for number, decoder in source.decoders.items():
        if isinstance(decoder, EncodedChunk) and found[number]:
            found[number] = source.files[number].nbytes
    return found
