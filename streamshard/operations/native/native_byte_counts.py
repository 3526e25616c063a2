"""Counts the bytes of native files, and how often each tensor is read for them."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from streamshard.formats import frameworks
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.write.zero_writer import FileImage, Images
from streamshard.formats.torch.torch_tensor import Storage
from streamshard.model import (
    FILE,
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
from streamshard.operations.transfer.byte_accounting import ByteCounts


def count_bytes(
    source: Source,
    files: NativeFiles,
    images: Sequence[Images],
    resized: frameworks.Resized,
    *,
    has_latest: bool,
) -> ByteCounts:
    """Count the bytes of the target's files, and how often each tensor is read."""
    byte_counts, checkpoint = NativeByteCounter(source, files), source.checkpoint
    for serialized in images:
        byte_counts.add(serialized.sizes())
    numbered = ((n, t.name) for n, t in enumerate(checkpoint.tensors) if t.state == FILE)
    byte_counts.add_files({n: resized.paths[name] for n, name in numbered if name in resized.paths})
    if has_latest:
        byte_counts.add_bytes(names.LATEST, len(checkpoint.tag.encode()))
    return byte_counts.done()


class NativeByteCounter:
    """Counts the bytes of torch files as they are laid out."""

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
