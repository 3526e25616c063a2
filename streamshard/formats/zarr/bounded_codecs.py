"""Zarr's compressions, decoded only as far as a chunk reaches.

zarr-python's own allocate what a frame claims to hold, or grow with it. A frame of 16 KB can claim,
and hold, half a gigabyte. Here the claim is compared with the size of the chunk first.
"""

import math
import zlib
from typing import Any, Final, Self

import numpy as np
from numcodecs.blosc import Blosc
from numcodecs.zstd import Zstd
from zarr.abc.codec import BytesBytesCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer
from zarr.registry import register_codec

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


def bounded(codecs: Any) -> Any:  # noqa: ANN401
    """Return a document's codecs with the compressions here in place of zarr-python's."""
    if isinstance(codecs, dict):
        name, settings = codecs.get("name"), codecs.get("configuration")
        if name in _BOUNDED:
            return {"name": _PREFIX + name, "configuration": {}}
        if isinstance(settings, dict):
            nested = {key: bounded(settings[key]) for key in settings if key.endswith("codecs")}
            return {**codecs, "configuration": {**settings, **nested}}
        return codecs
    if isinstance(codecs, list):
        return [bounded(codec) for codec in codecs]
    return {"name": _PREFIX + codecs, "configuration": {}} if codecs in _BOUNDED else codecs
