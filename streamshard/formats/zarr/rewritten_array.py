"""Decodes arrays that another tool rewrote: other chunks or codecs than ours, the same elements.

zarr-python decodes them. The sizes and checksums that the manifest records are those of files that
are gone, but the digest of a tensor depends on neither chunks nor codecs. So no element is
delivered before all elements of its tensor have been read and compared with that digest.
"""

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import google_crc32c
import numpy as np
from isal import isal_zlib

from streamshard.errors import (
    IntegrityError,
    StreamshardError,
    UnsupportedError,
)
from streamshard.formats.zarr.documents import chunk_counts
from streamshard.io.readable import OpenedFile
from streamshard.model import ITEMSIZE, Memory, SourceFile

if TYPE_CHECKING:
    from streamshard.formats.zarr.zarr_python import OpenArray

_PIECE_BYTES: Final = 1 << 20
"""Small chunks are decoded together up to this size."""
_SHOWN: Final = 3
"""How many missing chunks a message names."""


@dataclass(slots=True)
class RewrittenArray:
    """An array that another tool rewrote, in pieces that are decoded as a whole.

    A piece is a range of rows: indices of the first dimension. It has whole chunks only, so that
    each chunk is decoded once, and is one range of elements in C order.
    """

    directory: Path
    document: SourceFile
    """Its zarr.json."""
    content: bytes
    """Content of its zarr.json."""
    files: Mapping[str, SourceFile]
    """All files of the directory except zarr.json, by path relative to it."""
    shape: tuple[int, ...]
    dtype: str
    """The dtype as it is stored."""
    chunk: tuple[int, ...]
    """Shape of what one file holds: a chunk or a zarr shard."""
    steps: int
    """Count of codecs that take memory of their own, such as compressions."""
    digest: str = ""
    """Digest of all elements in the manifest."""
    missing: set[str] = field(default_factory=set)
    """Chunks that were missing when they were to be read; Zarr takes the fill value instead."""
    _sums: list[tuple[int, int]] = field(default_factory=list)
    """CRC-32 and CRC-32C of all elements up to the end of each piece, once they are compared."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave out the lock and what was read, so that it can be sent to another process."""
        named = (self.directory, self.document, self.content, self.files, self.shape, self.dtype)
        return RewrittenArray, (*named, self.chunk, self.steps, self.digest)

    @property
    def rows(self) -> int:
        """Rows of one piece."""
        chunk_rows = self.chunk[0] if self.chunk else 1
        return chunk_rows * max(1, _PIECE_BYTES // max(1, chunk_rows * self._row_bytes))

    @property
    def _row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * ITEMSIZE[self.dtype]

    @property
    def numel(self) -> int:
        """Elements of one piece; the last piece may have fewer."""
        return min(math.prod(self.shape), self.rows * math.prod(self.shape[1:]))

    @property
    def pieces(self) -> int:
        """Count of pieces."""
        return -(-math.prod(self.shape) // max(1, self.numel))

    @property
    def chunks(self) -> int:
        """Count of chunks, whether stored or not."""
        return math.prod(chunk_counts(self.shape, self.chunk))

    @property
    def codec_bytes(self) -> int:
        """Memory that decoding a piece takes."""
        nbytes = math.prod(self.chunk) * ITEMSIZE[self.dtype]
        stored = max((file.nbytes for file in self.files.values()), default=0)
        # A codec holds what it reads, twice what it makes while that grows, and a copy. Around the
        # codecs are the file and the chunk, twice because the allocator keeps those before them.
        held = 2 * (nbytes + stored) + 5 * self.steps * nbytes
        return self.numel * ITEMSIZE[self.dtype] + held

    def piece_bytes(self, number: int) -> int:
        """Return the size of a piece's elements."""
        left = math.prod(self.shape) - number * self.numel
        return min(self.numel, left) * ITEMSIZE[self.dtype]

    def read(self, number: int, view: memoryview) -> None:
        """Decode a piece into the front of a view; its elements are compared with nothing."""
        first = number * self.rows
        lengths = (min(self.rows, self.shape[0] - first), *self.shape[1:]) if self.shape else ()
        out = np.frombuffer(view[: self.piece_bytes(number)], dtype=self.dtype).reshape(lengths)
        opened = self.open()
        for corner in product(*map(range, [0] * len(lengths), lengths, self.chunk)):
            ends = map(min, (a + n for a, n in zip(corner, self.chunk, strict=True)), lengths)
            here = tuple(slice(start, end) for start, end in zip(corner, ends, strict=True))
            there = tuple(slice(s.start + first, s.stop + first) for s in here[:1]) + here[1:]
            try:
                out[here] = opened.read(there)
            except (MemoryError, StreamshardError):
                raise
            except Exception as error:  # each codec has errors of its own
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                where = ", ".join(f"{s.start}:{s.stop}" for s in there)
                message = f"damaged: elements [{where}] cannot be decoded ({_first_line(error)})"
                raise IntegrityError(message, path=self.directory) from error
        self.missing |= opened.missing

    def read_compared(self, number: int, view: memoryview) -> None:
        """Decode a piece, after all elements of the tensor were compared with their digest.

        Parameters
        ----------
        view
            As long as the first piece.
        """
        with self._lock:
            if not self._sums:
                self._compare(view)
        self.read(number, view)
        before = self._sums[number - 1] if number else (0, 0)
        if _extended(before, view[: self.piece_bytes(number)]) != self._sums[number]:
            message = "changed while it was being read. Stop what changes the"
            raise IntegrityError(f"{message} source, and run again", path=self.directory)

    def _compare(self, view: memoryview) -> None:
        sums, last = [], (0, 0)
        for number in range(self.pieces):
            self.read(number, view)
            last = _extended(last, view[: self.piece_bytes(number)])
            sums.append(last)
        found = f"{last[0]:08x}{last[1]:08x}"
        if found != self.digest:
            raise IntegrityError(self.difference(found))
        self._sums = sums

    def difference(self, found: str) -> str:
        """Say that the elements have another digest, and which chunks are missing."""
        message = (
            f"{self.directory}: rewritten by another tool, and not with the same elements: they "
            f"have the digest {found}, {self.digest:.40} was recorded"
        )
        return f"{message}{self.told_missing}"

    @property
    def told_missing(self) -> str:
        """What to add to a message about chunks that were missing; empty if none was."""
        names = sorted(self.missing)
        if not names:
            return ""
        more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
        shown = f"{', '.join(names[:_SHOWN])}{more}"
        return f". Missing or empty, so that Zarr takes the fill value for them: {shown}"

    def read_all(self) -> bytearray:
        """Decode a small array."""
        data = bytearray(math.prod(self.shape) * ITEMSIZE[self.dtype])
        step = self.numel * ITEMSIZE[self.dtype]
        for number in range(self.pieces):
            start = number * step
            self.read(number, memoryview(data)[start : start + self.piece_bytes(number)])
        return data

    def open(self) -> "OpenArray":
        """Open the array with zarr-python, which is imported here for the first time."""
        from streamshard.formats.zarr.zarr_python import OpenArray

        try:
            return OpenArray(self.content, self.files)
        except Exception as error:
            message = f"zarr-python cannot open this array: {_first_line(error)}"
            raise UnsupportedError(message, path=self.document.path) from error


@dataclass(frozen=True, slots=True)
class RewrittenPiece:
    """A piece of a rewritten array, to be decoded as a whole."""

    array: RewrittenArray
    number: int
    is_compared: bool = True
    """Whether to compare the elements of the tensor with their digest first."""

    def decode(self, file: OpenedFile, stored: Memory, content: Memory) -> memoryview:
        """Return the elements of the piece."""
        view = content(self.array.piece_bytes(0))
        read = self.array.read_compared if self.is_compared else self.array.read
        read(self.number, view)
        return view[: self.array.piece_bytes(self.number)]


def _extended(sums: tuple[int, int], view: memoryview) -> tuple[int, int]:
    """Return the CRC-32 and the CRC-32C of bytes and the bytes after them."""
    crc32c = google_crc32c.extend(sums[1], np.frombuffer(view, dtype=np.uint8))
    return isal_zlib.crc32(view, sums[0]), crc32c


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__} {str(error).splitlines()[0] if str(error) else ''}".strip()
