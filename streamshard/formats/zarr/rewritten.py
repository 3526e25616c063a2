"""Reads arrays of a store that another tool rewrote, through zarr-python; imported for these only.

zarr-python decodes them, a chunk at a time. The sizes and checksums that the manifest records are
those of files that are gone, but the digest of a tensor depends on neither chunks nor codecs: no
element is delivered before all elements of its tensor have been read and compared with that digest.
"""

import json
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product, starmap
from pathlib import Path
from typing import Any, Final

import numpy as np
import zarr
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.storage import MemoryStore

from streamshard.checksums import crc32, crc32c
from streamshard.errors import (
    CorruptFileError,
    IncompleteError,
    IntegrityError,
    StreamshardError,
    UnsupportedError,
)
from streamshard.formats.shapes import require_shape
from streamshard.formats.zarr import bounded_codecs
from streamshard.formats.zarr.array_paths import ROOT_DOCUMENT
from streamshard.formats.zarr.documents import chunk_counts
from streamshard.io.entries import entries_below, identify, open_readable
from streamshard.io.files import require_regular, require_same
from streamshard.model import Memory, SourceFile, StoredBytes
from streamshard.sizes import counted, some_of

_PIECE_BYTES: Final = 1 << 20
"""Small chunks are decoded together up to this size."""
_MOST_MISSING: Final = 1 << 18
"""More chunks than zarr-python leaves out of any tensor because all their elements are zero."""
_COMPARING: Final = threading.Lock()
"""Held while one array is compared with its digest, for all others that want it."""


class _ArrayFiles(dict[str, Buffer]):
    """The files of one array, as zarr-python's store in memory: each is read when it is wanted."""

    def __init__(self, document: bytes, files: Mapping[str, SourceFile]) -> None:
        super().__init__()
        self.document, self.files = document, files
        self.missing: set[str] = set()
        """Chunks that were missing when they were to be read; Zarr takes the fill value instead."""

    def __missing__(self, key: str) -> Buffer:
        make = default_buffer_prototype().buffer.from_bytes
        if key == ROOT_DOCUMENT:
            return make(self.document)
        file = self.files.get(key)
        # An empty file is not a chunk either: in place of a zarr shard it would read as fill value.
        if file is None or not file.nbytes:
            self.missing.add(key)
            raise KeyError(key)
        with open_readable(file.path) as opened:
            require_same(file, opened.status())
            data = opened.read_at(0, file.nbytes)
        if len(data) != file.nbytes:
            raise CorruptFileError(f"ends before byte {file.nbytes}", path=file.path)
        self[key] = found = make(data)  # zarr-python may read a zarr shard part by part
        return found


@dataclass(frozen=True, slots=True)
class RewrittenArray:
    """An array that another tool rewrote, in pieces that are decoded as a whole.

    A piece is a range of rows: indices of the first dimension. It has whole chunks only, so that
    each chunk is decoded once, and is one range of elements in C order.
    """

    directory: Path
    document: SourceFile
    """Its zarr.json."""
    array: "zarr.Array[Any]"
    files: _ArrayFiles
    chunk: tuple[int, ...]
    """Shape of what one file holds: a chunk or a zarr shard."""
    codec_bytes: int
    """Memory that decoding a piece takes."""
    rows: int
    """Of one piece; the last piece may have fewer, as with elements."""
    numel: int
    digest: str
    """Digest of all elements in the manifest."""
    sums: list[tuple[int, int]] = field(default_factory=list)
    """CRC-32 and CRC-32C of all elements up to the end of each piece, once they are compared."""

    @property
    def pieces(self) -> int:
        return -(-math.prod(self.array.shape) // max(1, self.numel))

    def piece_bytes(self, number: int) -> int:
        """Return the size of a piece's elements."""
        left = math.prod(self.array.shape) - number * self.numel
        return min(self.numel, left) * self.array.dtype.itemsize

    def read(self, number: int, view: memoryview) -> None:
        """Decode a piece into the front of a view; its elements are compared with nothing."""
        first, shape = number * self.rows, self.array.shape
        ends = (min(first + self.rows, shape[0]), *shape[1:]) if shape else ()
        out = np.frombuffer(view[: self.piece_bytes(number)], self.array.dtype)
        out = out.reshape([-1, *shape[1:]] if shape else [])
        steps = zip([first] + [0] * len(shape), ends, self.chunk, strict=False)
        for corner in product(*starmap(range, steps)):
            both = zip(corner, self.chunk, ends, strict=True)
            box = tuple(slice(start, min(start + step, end)) for start, step, end in both)
            here = tuple(slice(s.start - first, s.stop - first) for s in box[:1]) + box[1:]
            try:
                out[here] = np.asarray(self.array[box])
            except (MemoryError, StreamshardError):
                raise
            except Exception as error:  # each codec has errors of its own
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                where = ", ".join(f"{s.start}:{s.stop}" for s in box)
                message = f"damaged: elements [{where}] cannot be decoded ({_first_line(error)})"
                raise IntegrityError(message, path=self.directory) from error
            finally:
                self.files.clear()

    def read_compared(self, number: int, view: memoryview) -> None:
        """Decode a piece, after all elements of the tensor were compared with their digest.

        `view`: as long as the first piece.
        """
        with _COMPARING:
            if not self.sums:
                self.sums.extend(self._compared(view))
        self.read(number, view)
        before = self.sums[number - 1] if number else (0, 0)
        if _extended(before, view[: self.piece_bytes(number)]) != self.sums[number]:
            message = "changed while it was being read. Stop what changes the"
            raise IntegrityError(f"{message} source, and run again", path=self.directory)

    def _compared(self, view: memoryview) -> list[tuple[int, int]]:
        sums = [(0, 0)]
        for number in range(self.pieces):
            self.read(number, view)
            sums.append(_extended(sums[-1], view[: self.piece_bytes(number)]))
        found = f"{sums[-1][0]:08x}{sums[-1][1]:08x}"
        if found != self.digest:
            raise IntegrityError(self.difference(found))
        return sums[1:]

    def difference(self, found: str) -> str:
        """Say that the elements have another digest, and which chunks are missing."""
        message = f"{self.directory}: rewritten by another tool, and not with the same elements:"
        message = f"{message} they have the digest {found}, {self.digest:.40} was recorded"
        return f"{message}{self.missing_text}"

    @property
    def missing_text(self) -> str:
        """What to add to a message about chunks that were missing; empty if none was."""
        shown = some_of(sorted(self.files.missing), 3)
        text = f". Missing or empty, so that Zarr takes the fill value for them: {shown}"
        return text if self.files.missing else ""


@dataclass(frozen=True, slots=True)
class RewrittenPiece:
    """A piece of a rewritten array, to be decoded as a whole."""

    array: RewrittenArray
    number: int
    is_compared: bool = True
    """Whether to compare the elements of the tensor with their digest first."""

    def decode(
        self, file: StoredBytes, stored: Memory, content: Memory, part: tuple[int, int] | None
    ) -> tuple[int, memoryview]:
        """Return the elements of the piece, all of them."""
        view = content(self.array.piece_bytes(0))
        read = self.array.read_compared if self.is_compared else self.array.read
        read(self.number, view)
        return 0, view[: self.array.piece_bytes(self.number)]


def open_rewritten(
    root: Path, path: str, document: Mapping[str, Any], digest: str | None
) -> RewrittenArray:
    """Open an array, of whose document all but chunks and codecs is as it must be.

    `digest`: that in the manifest; None if it has none.
    """
    directory, place, names = root / path, root / path / ROOT_DOCUMENT, list[str]()
    found = _files_below(directory, root)
    itself = found.pop(ROOT_DOCUMENT)
    try:
        said = {**document, "codecs": bounded_codecs.bounded(document.get("codecs"), names)}
        files = _ArrayFiles(json.dumps(said).encode(), found)
        array = zarr.open_array(MemoryStore(files), mode="r", zarr_format=3)
        chunk = require_shape(array.shards or array.chunks)
        count = math.prod(chunk_counts(array.shape, chunk))  # chunks of no length are an error
    except UnsupportedError as error:
        raise UnsupportedError(str(error), path=place) from error
    except Exception as error:
        message = f"zarr-python cannot open this array: {_first_line(error)}"
        raise UnsupportedError(message, path=place) from error
    if digest is None:
        message = "rewritten by another tool; the manifest has no digest"
        message = f"{message} with which its elements could be compared"
        raise UnsupportedError(message, path=place)
    if count - len(found) > _MOST_MISSING:
        message = f"{counted(count, 'chunk')}, and {counted(len(found), 'file')} of them"
        message = f"{message}. Is the copy whole? Else rewrite it in larger chunks"
        raise IncompleteError(message, path=place)
    itemsize, row_numel, rows = array.dtype.itemsize, math.prod(array.shape[1:]), (*chunk, 1)[0]
    rows *= max(1, _PIECE_BYTES // max(1, rows * row_numel * itemsize))
    numel, nbytes = min(math.prod(array.shape), rows * row_numel), math.prod(chunk) * itemsize
    # A codec holds what it reads, twice what it makes while that grows, and a copy. Around the
    # codecs are the file and the chunk, twice because the allocator keeps those before them.
    stored = max((file.nbytes for file in found.values()), default=0)
    steps = sum(name not in ("bytes", "sharding_indexed") for name in names)
    codec_bytes = numel * itemsize + 2 * (nbytes + stored) + 5 * steps * nbytes
    return RewrittenArray(directory, itself, array, files, chunk, codec_bytes, rows, numel, digest)


def _files_below(directory: Path, root: Path) -> dict[str, SourceFile]:
    found = {}
    for entry in entries_below(directory):
        if not entry.is_directory:
            require_regular(entry.path, root)
            found[entry.path.relative_to(directory).as_posix()] = identify(entry.path)
    return found


def _extended(sums: tuple[int, int], view: memoryview) -> tuple[int, int]:
    """Return the CRC-32 and the CRC-32C of bytes and the bytes after them."""
    return crc32(view, sums[0]), crc32c(view, sums[1])


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__} {str(error).splitlines()[0] if str(error) else ''}".strip()
