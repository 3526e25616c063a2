"""What a plan writes, file by file, and how often it reads each tensor of its source for that."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from streamshard.formats.deepspeed.write.zero_writer import FileImage
from streamshard.formats.torch.torch_tensor import Storage
from streamshard.layout.cutting import Segments
from streamshard.model import (
    ITEMSIZE,
    MASTER,
    MODULE,
    BlockDigests,
    PartitionOf,
    ShardOf,
    ShardsOf,
    Whole,
    WholesOf,
)
from streamshard.operations.native.storage_regions import NativeFiles
from streamshard.operations.source.source import Source

_PIECES_AT_ONCE: Final = 1 << 16
"""So many are looked up together, which bounds what that takes."""


@dataclass(frozen=True, slots=True)
class ByteCounts:
    """What a plan writes, and what of its source it reads for that."""

    sizes: Mapping[str, int]
    """Path of every target file → its bytes, at most where they are compressed."""
    times: NDArray[np.int64]
    """How often each of the source's tensors is read in whole."""
    cast_bytes: int = 0
    """Of these, module weights made of master weights, or weights cast to another dtype."""
    padding_bytes: int = 0
    """Of these, zeros that fill up partitions."""


class NativeTally:
    """Counts torch files as they are laid out."""

    def __init__(self, source: Source, files: NativeFiles) -> None:
        self._tensors = source.checkpoint.tensors
        self._files = files
        self._times = np.zeros(len(self._tensors), dtype=np.int64)
        self._sizes: dict[str, int] = {}
        self._cut: set[tuple[int, str, int, str]] = set()
        """What is shared out among ranks, and was counted as a whole with the first of them."""
        self._cast_bytes = self._padding_bytes = 0

    def add(self, images: Iterable[tuple[FileImage, Sequence[str]]]) -> None:
        """Add files, each with the paths of all that are like it in size."""
        for image, paths in images:
            nbytes = self._files.lay_out(image).nbytes
            self._sizes.update(dict.fromkeys(paths, nbytes))
            for storage in image.serialized.storages:
                self._add(storage, image, len(paths))

    def add_files(self, tensors: Mapping[int, str]) -> None:
        """Add files that come along: tensor → path."""
        for tensor, path in tensors.items():
            self._times[tensor] += 1
            self._sizes[path] = self._tensors[tensor].nbytes

    def add_bytes(self, path: str, nbytes: int) -> None:
        """Add a file that is made without the source."""
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
        """Count tensors that are read once, by all ranks together or by one."""
        self._times[members] += 1
        numel = sum(self._tensors[tensor].numel for tensor in members.tolist())
        self._padding_bytes -= numel * ITEMSIZE[storage.dtype]

    def done(self) -> ByteCounts:
        """Return what was counted."""
        return ByteCounts(self._sizes, self._times, self._cast_bytes, self._padding_bytes)


def _key(content: PartitionOf | ShardsOf | ShardOf, image: FileImage) -> tuple[int, str, int, str]:
    if isinstance(content, PartitionOf):
        return image.family, "partition", content.group, content.state
    if isinstance(content, ShardsOf):
        return image.family, "shards", content.sub_group, content.state
    return image.family, "shard", content.tensor, ""


def read_bytes(source: Source, times: NDArray[np.int64]) -> NDArray[np.int64]:
    """Work out how many bytes of content are read of each of the source's files.

    Parameters
    ----------
    times
        How often each tensor is read in whole. What is compressed is read once, or a few times.
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
        # Copies of a tensor tell by `target`, which does not go on, whose they are.
        np.add.at(found, copies.file, copies.nbytes * times[copies.target])
    for number, decoder in source.decoders.items():
        if not isinstance(decoder, BlockDigests) and found[number]:
            found[number] = source.files[number].nbytes
    return found
