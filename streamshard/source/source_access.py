"""Reads an opened checkpoint's files for several threads, which take turns."""

import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from streamshard.engine.numeric.cast import Cast
from streamshard.engine.run.mapping_reader import MappingReader
from streamshard.engine.run.region import RegionFiller
from streamshard.errors import UsageError, command
from streamshard.layout.memory_plan import BUFFER_BYTES
from streamshard.model import FILE
from streamshard.sizes import some_of
from streamshard.source.source import Source

Array = NDArray[Any]
_FILES_SHOWN: Final = 3


class SourceAccess:
    """The files of an opened checkpoint; several threads take turns."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._reader = MappingReader(source.files)
        self._lock = threading.Lock()
        self._scratch = memoryview(b"")
        # Notebooks forget to close what they open.
        self._close = weakref.finalize(self, self._reader.close)

    @property
    def is_open(self) -> bool:
        """Whether it can still be read from."""
        return self._close.alive

    def close(self) -> None:
        with self._lock:
            self._close()

    def fill(self, out: Array, tensor: int, start: int, cast: Cast | None) -> None:
        """Fill an array, which lies in one piece, with elements of a tensor from `start` on."""
        dtype = None if cast is None else cast.target
        region = self._source.region(tensor, start, start + out.size, dtype)
        with self._lock:
            self._require_open()
            if not len(self._scratch):
                self._scratch = memoryview(bytearray(BUFFER_BYTES))
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


class TensorBytes:
    """The bytes of a tensor as a file of its own, wherever a source keeps it."""

    takes_requests = False

    def __init__(self, source: Source, access: SourceAccess, tensor: int) -> None:
        self._access, self._tensor = access, tensor
        self.nbytes = source.checkpoint.tensors[tensor].nbytes
        """Size in bytes."""

    def prepare(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Do nothing: what is read may be a part of a larger piece."""

    def read_at(self, offset: int, count: int) -> bytes:
        """Read bytes from an offset; fewer than `count` only at the end of the file."""
        data = np.empty(max(0, min(count, self.nbytes - offset)), dtype=np.uint8)
        self._access.fill(data, self._tensor, offset, None)
        return data.tobytes()


def head_of(source: Source, name: str, most: int) -> bytes | None:
    """Read the first bytes of a sidecar; None if there is none of this name."""
    tensors = source.checkpoint.tensors
    number = next((n for n, t in enumerate(tensors) if (t.state, t.name) == (FILE, name)), None)
    if number is None:
        return None
    head = np.empty(min(most, tensors[number].numel), dtype=np.uint8)
    with closing(SourceAccess(source)) as access:
        access.fill(head, number, 0, None)
    return head.tobytes()


def _locate_whole(source: Source, number: int, name: str) -> tuple[int, int, int]:
    """Return the file that holds all of a tensor, where it begins there, and its size in bytes.

    `number`: index of a tensor that has elements.
    `name`: what to call it in messages.
    """
    tensor = source.checkpoint.tensors[number]
    copies = source.region(number, 0, tensor.numel).copies
    files = list(dict.fromkeys(copies.file.tolist()))
    rewritten = {source.path / path for path in source.kind.rewritten(source)}
    why = []
    if len(copies) > 1:
        why.append(f"is cut into {len(copies):,} pieces")
    if any(source.files[file].path.parent in rewritten for file in files):
        why.append("was rewritten by another tool")
    elif not all(source.files[file].is_plain for file in files):
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


def _listed(source: Source, files: list[int]) -> str:
    paths = [os.path.relpath(source.files[file].path, source.path) for file in files]
    count = f"{len(files):,} files: " if len(files) > 1 else ""
    return count + some_of(paths, _FILES_SHOWN)
