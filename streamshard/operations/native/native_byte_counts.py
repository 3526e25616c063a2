"""Counts the bytes of native files, and how often each tensor is read for them."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from streamshard.formats import frameworks
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.write.zero_writer import FileImage, Images
from streamshard.formats.torch.torch_tensor import Storage
from streamshard.layout.cutting import Ints, Share
from streamshard.model import FILE, ITEMSIZE, MASTER, MODULE, Whole
from streamshard.operations.source.source import Source
from streamshard.operations.transfer.byte_accounting import ByteCounts


def count_bytes(
    source: Source,
    images: Sequence[Images],
    resized: frameworks.Resized,
    *,
    has_latest: bool,
) -> ByteCounts:
    """Count the bytes of the target's files, and how often each tensor is read."""
    byte_counts, checkpoint = NativeByteCounter(source), source.checkpoint
    for serialized in images:
        byte_counts.add(serialized.sizes())
    numbered = ((n, t.name) for n, t in enumerate(checkpoint.tensors) if t.state == FILE)
    byte_counts.add_files({n: resized.paths[name] for n, name in numbered if name in resized.paths})
    if has_latest:
        byte_counts.add_bytes(names.LATEST, len(checkpoint.tag.encode()))
    return byte_counts.done()


class NativeByteCounter:
    """Counts the bytes of torch files as they are laid out."""

    def __init__(self, source: Source) -> None:
        self._tensors = source.checkpoint.tensors
        self._times = np.zeros(len(self._tensors), dtype=np.int64)
        self._sizes: dict[str, int] = {}
        self._is_counted = np.zeros(len(self._tensors), dtype=bool)
        """Whether a tensor is cut among ranks, and was counted completely with the first rank."""
        self._cast_bytes = self._padding_bytes = 0

    def add(self, images: Iterable[tuple[FileImage, Sequence[str]]]) -> None:
        """Add files, each with the paths of all files that are laid out like it."""
        for image, paths in images:
            nbytes = image.lay_out().nbytes
            self._sizes.update(dict.fromkeys(paths, nbytes))
            for storage in image.serialized.storages:
                self._add(storage, len(paths))

    def add_files(self, tensors: Mapping[int, str]) -> None:
        """Add sidecars: tensor → path."""
        for tensor, path in tensors.items():
            self._times[tensor] += 1
            self._sizes[path] = self._tensors[tensor].nbytes

    def add_bytes(self, path: str, nbytes: int) -> None:
        """Add a file that is not read from the source."""
        self._sizes[path] = nbytes

    def _add(self, storage: Storage, count: int) -> None:
        content = storage.content
        if isinstance(content, Whole):
            self._times[content.tensor] += count
            tensor = self._tensors[content.tensor]
            if storage.dtype != tensor.dtype and tensor.state in (MASTER, MODULE):
                self._cast_bytes += storage.nbytes * count
        elif isinstance(content, Share):
            members = content.tensors
            self._padding_bytes += storage.nbytes * count
            if content.is_cut:
                if self._is_counted[members[:1]].all():
                    return
                self._is_counted[members] = True
            self._count(members, storage)

    def _count(self, members: Ints, storage: Storage) -> None:
        """Count tensors that are read once, by one rank or by all ranks together."""
        self._times[members] += 1
        numel = sum(self._tensors[tensor].numel for tensor in members.tolist())
        self._padding_bytes -= numel * ITEMSIZE[storage.dtype]

    def done(self) -> ByteCounts:
        """Return the counts."""
        return ByteCounts(self._sizes, self._times, self._cast_bytes, self._padding_bytes)
