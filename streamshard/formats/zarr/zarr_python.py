"""Reads an array through zarr-python; imported only for arrays that another tool rewrote.

Compressed data is decoded only as far as a chunk reaches. zarr-python's own codecs allocate what a
frame claims to hold, or grow with it: a frame of 16 KB can claim, and hold, half a gigabyte. Here
the claim is compared with the size of the chunk first.
"""

import json
import math
import zlib
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Final, NoReturn, Self

import numpy as np
import zarr
from numcodecs.blosc import Blosc
from numcodecs.zstd import Zstd
from numpy.typing import NDArray
from zarr.abc.codec import BytesBytesCodec
from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.registry import register_codec

from streamshard.errors import CorruptFileError, UnsupportedError
from streamshard.formats.pickle.inert import show
from streamshard.formats.zarr.array_paths import ROOT_DOCUMENT
from streamshard.io.entries import open_readable
from streamshard.io.files import require_same
from streamshard.model import SourceFile

_CODECS: Final = ("bytes", "transpose", "sharding_indexed", "blosc", "gzip", "zstd", "crc32c")
"""Codecs of Zarr's own. Others would have zarr-python load plug-ins."""
_PREFIX: Final = "streamshard.bounded."
_SPARE_BYTES: Final = 1 << 16
_BLOSC_SIZE: Final = slice(4, 8)
"""Place of the uncompressed size in Blosc's header."""
_GZIP: Final = 31
"""zlib's number for the gzip format with the largest window."""
_PIECE_BYTES: Final = 1 << 12
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_ZSTD_SIZE_BYTES: Final = (0, 2, 4, 8)
"""Length of the field with the content's size, by the two highest bits of a frame's descriptor."""


class OpenArray:
    """An array that zarr-python decodes.

    `document`: what its zarr.json says.
    `files`: the files in its directory, by path relative to it.
    """

    def __init__(self, document: Mapping[str, Any], files: Mapping[str, SourceFile]) -> None:
        names: list[str] = []
        bounded = {**document, "codecs": _bounded(document.get("codecs"), names)}
        self._files = _ArrayFiles(json.dumps(bounded).encode(), files)
        self._array = zarr.open_array(self._files, mode="r", zarr_format=3)
        self.chunk = self._array.shards or self._array.chunks
        """Shape of what one file holds: a chunk or a zarr shard."""
        if not all(self.chunk):
            raise ValueError(f"chunks of {show(self.chunk)}")
        self.steps = sum(name not in ("bytes", "sharding_indexed") for name in names)
        """Count of codecs that take memory of their own, such as compressions."""

    def read(self, where: tuple[slice, ...]) -> NDArray[Any]:
        """Decode a part of the array."""
        return np.asarray(self._array[where])

    @property
    def missing(self) -> frozenset[str]:
        """Chunks that were to be read but are missing or empty: they read as the fill value."""
        return frozenset(self._files.missing)


class _ArrayFiles(Store):
    """The files of one array, as zarr-python reads them: read-only, and noticed if missing."""

    supports_writes = supports_deletes = supports_listing = False

    def __init__(self, document: bytes, files: Mapping[str, SourceFile]) -> None:
        super().__init__(read_only=True)
        self.missing: set[str] = set()
        self._document = document
        self._files = files

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = Store.__hash__

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        if key == ROOT_DOCUMENT:
            return prototype.buffer.from_bytes(self._document)
        file = self._files.get(key)
        # An empty file is not a chunk either: in place of a zarr shard it would read as fill value.
        if file is None or not file.nbytes:
            self.missing.add(key)
            return None
        return prototype.buffer.from_bytes(_read(file, *_bounds(byte_range, file.nbytes)))

    async def exists(self, key: str) -> bool:
        return key == ROOT_DOCUMENT or key in self._files

    async def get_partial_values(
        self,
        prototype: BufferPrototype,
        key_ranges: Iterable[tuple[str, ByteRequest | None]],
    ) -> list[Buffer | None]:
        return [await self.get(key, prototype, wanted) for key, wanted in key_ranges]

    async def set(self, key: str, value: Buffer) -> NoReturn:
        raise NotImplementedError(key)

    async def delete(self, key: str) -> NoReturn:
        raise NotImplementedError(key)

    def list(self) -> AsyncIterator[str]:
        raise NotImplementedError

    def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        raise NotImplementedError(prefix)

    def list_dir(self, prefix: str) -> AsyncIterator[str]:
        raise NotImplementedError(prefix)


def _bounds(wanted: ByteRequest | None, nbytes: int) -> tuple[int, int]:
    match wanted:
        case RangeByteRequest():
            return min(wanted.start, nbytes), min(wanted.end, nbytes)
        case OffsetByteRequest():
            return min(wanted.offset, nbytes), nbytes
        case SuffixByteRequest():
            return max(0, nbytes - wanted.suffix), nbytes
    return 0, nbytes


def _read(file: SourceFile, start: int, stop: int) -> bytearray:
    data = bytearray(max(0, stop - start))
    with open_readable(file.path) as opened:
        require_same(file, opened.status())
        if opened.read_into(memoryview(data), start) != len(data):
            raise CorruptFileError(f"ends before byte {stop}", path=file.path)
    return data


class _Bounded(BytesBytesCodec):
    is_fixed_size = False

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        return cls()

    def to_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        raise NotImplementedError

    def _decode_sync(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        itemsize = chunk_spec.dtype.to_native_dtype().itemsize
        data = chunk_bytes.as_numpy_array().tobytes()
        content = self._content(data, math.prod(chunk_spec.shape) * itemsize)
        return chunk_spec.prototype.buffer.from_bytes(content)

    async def _decode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        return self._decode_sync(chunk_bytes, chunk_spec)

    async def _encode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer | None:
        raise NotImplementedError

    def _content(self, data: bytes, nbytes: int) -> bytes:
        """Decode a chunk of `nbytes` bytes, or a compressed form of it."""
        raise NotImplementedError


class _BoundedBlosc(_Bounded):
    def _content(self, data: bytes, nbytes: int) -> bytes:
        _require_fit(int.from_bytes(data[_BLOSC_SIZE], "little"), nbytes)
        return bytes(Blosc().decode(data))


class _BoundedGzip(_Bounded):
    def _content(self, data: bytes, nbytes: int) -> bytes:
        content, at, is_open = bytearray(), 0, False
        while at < len(data):
            if not is_open:
                stream, is_open = zlib.decompressobj(_GZIP), True
            # In pieces: zlib copies what follows the end of a member, and there may be many.
            piece = data[at : at + _PIECE_BYTES]
            content += stream.decompress(piece, _most(nbytes) - len(content) + 1)
            _require_fit(len(content), nbytes)
            at += len(piece) - len(stream.unused_data)
            is_open = not stream.eof
        if is_open:
            raise ValueError("the compressed data ends too early")
        return bytes(content)


class _BoundedZstd(_Bounded):
    def _content(self, data: bytes, nbytes: int) -> bytes:
        claimed = _zstd_claim(data)
        _require_fit(claimed or 0, nbytes)
        # With a place to decode to, the library never allocates one: not for a frame behind this
        # one, and not for one that does not say how much it holds.
        content = np.empty(nbytes if claimed is None else claimed, np.uint8)
        Zstd().decode(data, content)
        return content.tobytes()


def _zstd_claim(data: bytes) -> int | None:
    """Return the size that a Zstandard frame claims (RFC 8878, section 3.1.1.1)."""
    if data[:4] != _ZSTD_MAGIC or len(data) < 5:
        raise ValueError("not a Zstandard frame")
    descriptor = data[4]
    is_single, dictionary = descriptor >> 5 & 1, (0, 1, 2, 4)[descriptor & 3]
    length = _ZSTD_SIZE_BYTES[descriptor >> 6] or is_single
    start = 5 + (not is_single) + dictionary
    found = int.from_bytes(data[start : start + length], "little")
    if not length:
        return None
    return found + 256 if length == 2 else found


def _most(nbytes: int) -> int:
    """Return the most bytes of a chunk of this size, also while another compression is around it.

    A compression makes what has no repetitions hardly longer, and a zarr shard has an index.
    """
    return 2 * nbytes + _SPARE_BYTES


def _require_fit(claimed: int, nbytes: int) -> None:
    if claimed > _most(nbytes):
        raise ValueError(f"a frame of more than {_most(nbytes):,} bytes in a chunk of {nbytes:,}")


_BOUNDED: Final = {"blosc": _BoundedBlosc, "gzip": _BoundedGzip, "zstd": _BoundedZstd}
for _name, _codec in _BOUNDED.items():
    register_codec(_PREFIX + _name, _codec)


def _bounded(codecs: Any, names: list[str]) -> Any:  # noqa: ANN401
    """Return codecs with the compressions here in place of zarr-python's, and note their names."""
    if isinstance(codecs, list):
        return [_bounded(codec, names) for codec in codecs]
    codec = codecs if isinstance(codecs, dict) else {"name": codecs}
    name, settings = codec.get("name"), codec.get("configuration")
    if name not in _CODECS:
        message = f"rewritten with the codec {show(name)}, which is not known; known are"
        raise UnsupportedError(f"{message} {', '.join(_CODECS)}")
    names.append(name)
    if name in _BOUNDED:
        return {"name": _PREFIX + name, "configuration": {}}
    if not isinstance(settings, dict):
        return codec
    nested = {key: _bounded(settings[key], names) for key in settings if key.endswith("codecs")}
    return {**codec, "configuration": {**settings, **nested}}
