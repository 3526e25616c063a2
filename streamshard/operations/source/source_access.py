"""Reads an opened checkpoint's files for several threads, which take turns."""

import threading
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamshard.engine.numeric.cast import Cast
from streamshard.engine.run.region import RegionFiller
from streamshard.engine.run.source_reader import SourceReader
from streamshard.engine.run.work import Region
from streamshard.errors import UsageError
from streamshard.layout.cutting import Segments, coalesce
from streamshard.layout.memory_plan import SCRATCH_BYTES
from streamshard.model import ITEMSIZE
from streamshard.operations.source.source import Source
from streamshard.operations.source.whole_tensor import locate_whole

Array = NDArray[Any]


class SourceAccess:
    """The files of an opened checkpoint; several threads take turns."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._reader = SourceReader(source.files, source.decoders)
        self._lock = threading.Lock()
        self._scratch = memoryview(b"")
        # Notebooks forget to close what they open.
        self._close = weakref.finalize(self, self._reader.close)

    @property
    def is_open(self) -> bool:
        """Whether it can still be read from."""
        return self._close.alive

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            self._close()

    def fill(self, out: Array, tensor: int, start: int, cast: Cast | None) -> None:
        """Fill an array, which lies in one piece, with elements of a tensor from `start` on."""
        region = self._region(out, tensor, start, cast)
        with self._lock:
            self._require_open()
            if not len(self._scratch):
                self._scratch = memoryview(bytearray(SCRATCH_BYTES // 2))
            filler = RegionFiller(region, self._reader, self._scratch)
            filler.fill(out.reshape(-1).view(np.uint8).data)

    def map(self, tensor: int, name: str, *, is_private: bool, is_checked: bool) -> memoryview:
        """Map what a tensor that has elements and lies in one piece holds."""
        file, offset, nbytes = locate_whole(self._source, tensor, name)
        with self._lock:
            self._require_open()
            return self._reader.map(
                file, offset, nbytes, is_private=is_private, is_checked=is_checked
            )

    def _require_open(self) -> None:
        if not self.is_open:
            message = f"{self._source.path}: has been closed; read inside the 'with' block"
            raise UsageError(message)

    def _region(self, out: Array, tensor: int, start: int, cast: Cast | None) -> Region:
        itemsize = ITEMSIZE[self._source.checkpoint.tensors[tensor].dtype]
        numbers = (tensor, start, start + out.size, 0)
        segments = Segments(*(np.array([number], dtype=np.int64) for number in numbers))
        found = self._source.cutting.locate(segments, target_itemsize=out.itemsize)
        copies = coalesce(found, itemsize=itemsize, target_itemsize=out.itemsize)
        return Region(
            content_bytes=out.nbytes,
            copies=copies,
            source_itemsize=itemsize,
            target_itemsize=out.itemsize,
            cast=cast,
        )
