"""The files of a store that nobody wrote: `convert` lays each out, and it is made when asked for.

The manifest is none of them: it has digests of all others.
"""

import threading
import weakref
from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np

from streamshard.checksums import crc32c
from streamshard.engine.run.mapping_reader import RecheckingReader
from streamshard.engine.run.region import RegionFiller
from streamshard.engine.run.work import Region
from streamshard.formats.zarr.chunks import CHECKSUM_BYTES
from streamshard.formats.zarr.documents import store_documents
from streamshard.layout.memory_plan import BUFFER_BYTES
from streamshard.operations.convert.store_targets import StoreTargets, chunk_of
from streamshard.source.source import Source
from streamshard.transfer.file_layout import Divider, Elements

_AFTER_ALL = "\U0010ffff"
"""A character that is in no key, and sorts after those that are."""


class ViewedFiles(StoreTargets):
    """Keys and bytes of the store that `convert` would write without compression.

    Several threads may ask; they take turns in reading.
    """

    def __init__(self, source: Source, chunk_bytes: int) -> None:
        shapes = [chunk_of(tensor, chunk_bytes) for tensor in source.checkpoint.tensors]
        super().__init__(source, shapes, "none")
        self.source = source
        self._divider = Divider(source)
        self._reader = RecheckingReader(source.files, maps=True)
        self._lock = threading.Lock()
        self._scratch = memoryview(b"")
        self._fixed = self._documents()
        self._parts = {chunk.path: (tensor, chunk) for tensor, chunk in self._chunks()}
        self._keys = sorted((*self._fixed, *self._parts))
        weakref.finalize(self, self._reader.close)

    def close(self) -> None:
        """Close all files; the next read opens them again."""
        with self._lock:
            self._reader.close()

    def below(self, prefix: str) -> Sequence[str]:
        """Return the keys that begin with a prefix, in order."""
        keys = self._keys
        return keys[bisect_left(keys, prefix) : bisect_left(keys, prefix + _AFTER_ALL)]

    def size_of(self, key: str) -> int | None:
        """Return the size of what is under a key; None if nothing is."""
        if key in self._fixed:
            return len(self._fixed[key])
        return self._parts[key][1].nbytes + CHECKSUM_BYTES if key in self._parts else None

    def read(self, key: str) -> bytes | memoryview | None:
        """Make what is under a key; None if nothing is.

        Raises
        ------
        StreamshardError
            A source file cannot be read, is damaged, or changed after it was opened.
        """
        if key in self._fixed or key not in self._parts:
            return self._fixed.get(key)
        (elements,) = self._chunk_layout(*self._parts[key]).pieces
        if not isinstance(elements, Elements) or elements.trailer is None:
            raise TypeError(key)
        (region,) = self._divider.regions(elements)
        data = np.empty(region.nbytes, np.uint8).data
        content = data[: region.content_bytes]
        self._fill(content, region)
        data[region.content_bytes :] = elements.trailer.serialize(crc32c(content))
        return data

    def _fill(self, content: memoryview, region: Region) -> None:
        with self._lock:
            self._scratch = self._scratch or memoryview(bytearray(BUFFER_BYTES))
            RegionFiller(region, self._reader, self._scratch).fill(content)
            self._reader.settle()

    def _documents(self) -> dict[str, bytes]:
        checkpoint = self._source.checkpoint
        if not checkpoint.foreign:
            return super()._documents()
        # `convert` refuses what has no training state; its tensors can be looked at.
        return store_documents(checkpoint, self._chunk_shapes, self._codec)


def children(keys: Sequence[str], prefix: str) -> Iterator[str]:
    """Yield the names directly below a prefix, each once; the keys are those below it, in order."""
    yield from dict.fromkeys(key[len(prefix) :].partition("/")[0] for key in keys)
