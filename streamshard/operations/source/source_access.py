"""Reads an opened checkpoint's files for several threads, which take turns."""

import os
import threading
import weakref
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from streamshard.commands import command
from streamshard.engine.numeric.cast import Cast
from streamshard.engine.run.region import RegionFiller
from streamshard.engine.run.source_reader import Decoder, SourceReader
from streamshard.engine.run.work import Region
from streamshard.errors import UsageError
from streamshard.formats.zarr.rewritten_array import RewrittenPiece
from streamshard.layout.cutting import Segments, coalesce, whole_segment
from streamshard.layout.memory_plan import SCRATCH_BYTES
from streamshard.model import ITEMSIZE, BlockDigests
from streamshard.operations.source.source import Source
from streamshard.operations.source.tensors_in_files import Seam

Array = NDArray[Any]
_FILES_SHOWN: Final = 3


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
        file, offset, nbytes = _locate_whole(self._source, tensor, name)
        with self._lock:
            self._require_open()
            return self._reader.map(
                file, offset, nbytes, is_private=is_private, is_checked=is_checked
            )

    def _require_open(self) -> None:
        if not self.is_open:
            message = "has been closed; read inside the 'with' block"
            raise UsageError(message, path=self._source.path)

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


def _locate_whole(source: Source, number: int, name: str) -> tuple[int, int, int]:
    """Return the file that holds all of a tensor, where it begins there, and its size in bytes.

    Parameters
    ----------
    number
        Index of a tensor that has elements.
    name
        What to call it in messages.
    """
    tensor = source.checkpoint.tensors[number]
    itemsize = ITEMSIZE[tensor.dtype]
    found = source.cutting.locate(whole_segment(number, tensor.numel), target_itemsize=itemsize)
    copies = coalesce(found, target_itemsize=itemsize, itemsize=itemsize)
    files = list(dict.fromkeys(copies.file.tolist()))
    why = []
    decoders = [source.decoders.get(file) for file in files]
    pieces = len(copies) + any(isinstance(decoder, Seam) for decoder in decoders)
    if pieces > 1:
        why.append(f"is cut into {pieces:,} pieces")
    if any(isinstance(decoder, RewrittenPiece) for decoder in decoders):
        why.append("was rewritten by another tool")
    elif not all(map(_is_stored_plainly, decoders)):
        why.append("is compressed")
    if why:
        message = f"{name} {' and '.join(why)}, in {_listed(source, files)}, so it cannot be mapped"
        plain = {"codec": "none", "chunk_size": tensor.nbytes}
        tag = source.checkpoint.tag
        if source.checkpoint.is_dumps:
            way = command("convert", source.path / tag, "NEW.zarr", **plain)
        else:
            way = command("convert", source.path, "NEW.zarr", tag=tag, **plain)
        raise UsageError(
            f"{message}. Read it with [...], .bits() or .torch(), or make a store that holds it in "
            f"one piece and open that: {way}"
        )
    return files[0], int(copies.source[0]), int(np.sum(copies.nbytes))


def _is_stored_plainly(decoder: Decoder | None) -> bool:
    return decoder is None or isinstance(decoder, BlockDigests | Seam)


def _listed(source: Source, files: list[int]) -> str:
    shown = [os.path.relpath(source.files[file].path, source.path) for file in files[:_FILES_SHOWN]]
    more = len(files) - len(shown)
    count = f"{len(files):,} files: " if len(files) > 1 else ""
    return count + ", ".join(shown) + (f", and {more:,} more" if more else "")
