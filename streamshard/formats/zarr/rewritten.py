"""Reads arrays of a store that another tool rewrote, through zarr-python; imported for these only.

zarr-python decodes them, a chunk at a time. The sizes and checksums that the manifest records are
those of files that are gone, but the digest of a tensor depends on neither chunks nor codecs: no
element is delivered before all elements of its tensor have been read and compared with that digest.
"""

import gzip
import io
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import zarr
from numcodecs.blosc import Blosc
from numcodecs.zstd import Zstd
from zarr.abc.codec import BytesBytesCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.registry import register_codec
from zarr.storage import MemoryStore, StorePath

from streamshard.checksums import crc32, crc32c
from streamshard.errors import CorruptFileError, IncompleteError, IntegrityError, UnsupportedError
from streamshard.formats.pickle.inert import show
from streamshard.formats.pickle.node_checks import require_shape
from streamshard.formats.zarr import blosc_frame
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
_COMPRESSIONS: Final = ("blosc", "gzip", "zstd")
_CODECS: Final = ("bytes", "transpose", "sharding_indexed", *_COMPRESSIONS, "crc32c")
"""Codecs of Zarr's own. Others would have zarr-python load plug-ins."""
_PREFIX: Final = "streamshard.bounded."
_COMPARING: Final = threading.Lock()
"""Held while one array is compared with its digest, for all others that want it."""


@dataclass(frozen=True, slots=True)
class RewrittenArray:
    """An array that another tool rewrote, in pieces that are decoded as a whole.

    A piece is a range of rows: indices of the first dimension. It has whole chunks only, so that
    each chunk is decoded once, and is one range of elements in C order.
    """

    document: SourceFile
    """Its zarr.json."""
    array: "zarr.Array[Any]"
    """The array without its chunks, and with codecs that are bounded."""
    files: Mapping[str, SourceFile]
    """All its files but zarr.json, by key."""
    chunk: tuple[int, ...]
    """Shape of what one file holds: a chunk or a zarr shard."""
    codec_bytes: int
    """Memory that decoding a piece takes."""
    rows: int
    """Of chunks in a piece; the last piece may have fewer, as with elements."""
    numel: int
    digest: str
    """Digest of all elements in the manifest."""
    missing: set[str] = field(default_factory=set)
    """Keys of chunks that were missing when they were to be read."""
    equal: set[str] = field(default_factory=set)
    """The digest, once all elements were compared with it."""

    @property
    def directory(self) -> Path:
        return self.document.path.parent

    @property
    def pieces(self) -> int:
        return -(-math.prod(self.array.shape) // max(1, self.numel))

    def piece_bytes(self, number: int) -> int:
        left = math.prod(self.array.shape) - number * self.numel
        return min(self.numel, left) * self.array.dtype.itemsize

    def read(self, number: int, view: memoryview) -> memoryview:
        """Decode a piece into the front of a view; its elements are compared with nothing."""
        piece, shape = view[: self.piece_bytes(number)], self.array.shape
        out = np.frombuffer(piece, self.array.dtype).reshape([-1, *shape[1:]] if shape else [])
        for index in product(*map(range, chunk_counts(out.shape, self.chunk))):
            row = tuple(number * self.rows + i for i in index[:1])
            out[self._box(index)] = self._decoded(row + index[1:])
        return piece

    def _box(self, index: tuple[int, ...]) -> tuple[slice, ...]:
        """Return where the elements of a chunk lie, past the end of the array too."""
        both = zip(index, self.chunk, strict=True)
        return tuple(slice(i * length, (i + 1) * length) for i, length in both)

    def _decoded(self, index: tuple[int, ...]) -> Any:  # noqa: ANN401
        key = self.array.metadata.encode_chunk_key(index)
        file = self.files.get(key)
        # An empty file is not a chunk either: in place of a zarr shard it would read as fill value.
        if file is None or not file.nbytes:
            self.missing.add(key)
            return 0
        with open_readable(file.path) as opened:
            require_same(file, opened.status())
            data = opened.read_at(0, file.nbytes)
        if len(data) != file.nbytes:
            raise CorruptFileError(f"ends before byte {file.nbytes}", path=file.path)
        buffer = default_buffer_prototype().buffer.from_bytes(data)
        try:
            store = StorePath(MemoryStore({key: buffer}))
            array: zarr.AsyncArray[Any] = zarr.AsyncArray(self.array.metadata, store)
            return np.asarray(zarr.Array(array)[self._box(index)])
        except MemoryError:
            raise
        except Exception as error:  # each codec has errors of its own
            message = f"damaged: cannot be decoded ({_first_line(error)})"
            raise IntegrityError(message, path=file.path) from error

    def read_compared(self, number: int, view: memoryview) -> memoryview:
        """Decode a piece, after all elements of the tensor were compared with their digest.

        `view`: as long as the first piece.
        """
        with _COMPARING:
            if not self.equal:
                self._compare(view)
        return self.read(number, view)

    def _compare(self, view: memoryview) -> None:
        sums = 0, 0
        for number in range(self.pieces):
            piece = self.read(number, view)
            sums = crc32(piece, sums[0]), crc32c(piece, sums[1])
        found = f"{sums[0]:08x}{sums[1]:08x}"
        if found != self.digest:
            raise IntegrityError(self.difference(found))
        self.equal.add(found)

    def difference(self, found: str) -> str:
        message = f"{self.directory}: rewritten by another tool, and not with the same elements:"
        message = f"{message} they have the digest {found}, {self.digest:.40} was recorded"
        return f"{message}{self.missing_text}"

    @property
    def missing_text(self) -> str:
        """What to add to a message about chunks that were missing; empty if none was."""
        shown = some_of(sorted(self.missing), 3)
        text = f". Missing or empty, so that Zarr takes the fill value for them: {shown}"
        return text if self.missing else ""


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
        read = self.array.read_compared if self.is_compared else self.array.read
        return 0, read(self.number, content(self.array.piece_bytes(0)))


def open_rewritten(
    root: Path, path: str, document: Mapping[str, Any], digest: str | None
) -> RewrittenArray:
    """Open an array, of whose document all but chunks and codecs is as it must be.

    `digest`: that in the manifest; None if it has none.
    """
    place, names, files = root / path / ROOT_DOCUMENT, list[str](), dict[str, SourceFile]()
    for entry in entries_below(place.parent):
        if not entry.is_directory:
            require_regular(entry.path, root)
            files[entry.path.relative_to(place.parent).as_posix()] = identify(entry.path)
    itself = files.pop(ROOT_DOCUMENT)
    try:
        said = {**document, "codecs": _bounded(document.get("codecs"), names)}
        array = zarr.Array.from_dict(StorePath(MemoryStore()), said)
        chunk = require_shape(document["chunk_grid"]["configuration"]["chunk_shape"])
        count = math.prod(chunk_counts(array.shape, chunk))  # chunks of no length are an error
    except UnsupportedError as error:
        raise UnsupportedError(str(error), path=place) from error
    except Exception as error:
        message = f"zarr-python cannot open this array: {_first_line(error)}"
        raise UnsupportedError(message, path=place) from error
    if digest is None:
        message = "rewritten by another tool; the manifest has no digest with which to compare it"
        raise UnsupportedError(message, path=place)
    if count - len(files) > _MOST_MISSING:
        message = f"{counted(count, 'chunk')}, and {counted(len(files), 'file')} of them"
        message = f"{message}. Is the copy whole? Else rewrite it in larger chunks"
        raise IncompleteError(message, path=place)
    itemsize, row_numel = array.dtype.itemsize, math.prod((*chunk[:1], *array.shape[1:]))
    rows = max(1, _PIECE_BYTES // max(1, row_numel * itemsize))
    numel, nbytes = min(math.prod(array.shape), rows * row_numel), math.prod(chunk) * itemsize
    # A codec holds what it reads, twice what it makes while that grows, and a copy. Around the
    # codecs are the file and the chunk, twice because the allocator keeps those before them.
    stored = max((file.nbytes for file in files.values()), default=0)
    steps = sum(name not in ("bytes", "sharding_indexed") for name in names)
    codec_bytes = numel * itemsize + 2 * (nbytes + stored) + 5 * steps * nbytes
    return RewrittenArray(itself, array, files, chunk, codec_bytes, rows, numel, digest)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__} {str(error).splitlines()[0] if str(error) else ''}".strip()


@dataclass(frozen=True)
class _Bounded(BytesBytesCodec):
    """A compression of a chunk's elements, which decodes into as many bytes as these have.

    zarr-python's own allocate what a frame claims to hold, or grow with it: a frame of 16 KB can
    claim, and hold, half a gigabyte.
    """

    name: str
    is_fixed_size = False

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        raise NotImplementedError

    async def _decode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        nbytes = math.prod(chunk_spec.shape) * chunk_spec.dtype.to_native_dtype().itemsize
        content, data = np.zeros(nbytes, "B"), chunk_bytes.to_bytes()
        if self.name.endswith("gzip"):
            content = np.frombuffer(gzip.GzipFile(fileobj=io.BytesIO(data)).read(nbytes + 1), "B")
        elif self.name.endswith("zstd"):
            Zstd().decode(data, content)
        else:
            blosc_frame.require_whole(memoryview(data))
            Blosc().decode(data, content)
        return chunk_spec.prototype.buffer.from_array_like(content)


for _name in _COMPRESSIONS:
    register_codec(_PREFIX + _name, _Bounded)


def _bounded(codecs: Any, names: list[str]) -> Any:  # noqa: ANN401
    """Return codecs with the compressions here in place of zarr-python's, and note their names."""
    if isinstance(codecs, list):
        return [_bounded(codec, names) for codec in codecs]
    codec = codecs if isinstance(codecs, dict) else {"name": codecs}
    name, settings = codec.get("name"), codec.get("configuration")
    if name not in _CODECS:
        message = f"rewritten with the codec {show(name)}, which is not known; known are"
        raise UnsupportedError(f"{message} {', '.join(_CODECS)}")
    if name in _COMPRESSIONS and names[-1:] != ["bytes"]:
        raise UnsupportedError(f"rewritten with the codec {name}, and not right after 'bytes'")
    names.append(name)
    if name in _COMPRESSIONS:
        return {"name": _PREFIX + name}
    if not isinstance(settings, dict):
        return codec
    nested = {key: _bounded(settings[key], names) for key in settings if key.endswith("codecs")}
    return {**codec, "configuration": {**settings, **nested}}
