"""zarr-python's compressions, decoded only as far as a chunk reaches.

zarr-python's own codecs allocate what a frame claims to hold, or grow with it: a frame of 16 KB can
claim, and hold, half a gigabyte. Here the claim is compared with the size of the chunk first.
"""

import gzip
import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numcodecs.blosc import Blosc
from numcodecs.zstd import Zstd
from zarr.abc.codec import BytesBytesCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer
from zarr.registry import register_codec

from streamshard.errors import UnsupportedError
from streamshard.formats.pickle.inert import show

_CODECS: Final = ("bytes", "transpose", "sharding_indexed", "blosc", "gzip", "zstd", "crc32c")
"""Codecs of Zarr's own. Others would have zarr-python load plug-ins."""
_PREFIX: Final = "streamshard.bounded."


def _blosc(data: bytes, nbytes: int) -> bytes:
    _require_fit(int.from_bytes(data[4:8], "little"), nbytes)
    return bytes(Blosc().decode(data))


def _gzip(data: bytes, nbytes: int) -> bytes:
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
        content = stream.read(_most(nbytes) + 1)
    _require_fit(len(content), nbytes)
    return content


def _zstd(data: bytes, nbytes: int) -> bytes:
    """Decode a frame into a place of its size: then the library never allocates one.

    Not for a frame behind this one, and not for one that does not say how much it holds. The size
    is where RFC 8878, section 3.1.1.1, has it.
    """
    if data[:4] != b"\x28\xb5\x2f\xfd" or len(data) < 5:
        raise ValueError("not a Zstandard frame")
    flags, is_single = data[4] >> 6, data[4] >> 5 & 1
    length = (is_single, 2, 4, 8)[flags]
    start = 5 + (not is_single) + (0, 1, 2, 4)[data[4] & 3]
    claimed = int.from_bytes(data[start : start + length], "little") + 256 * (length == 2)
    _require_fit(claimed, nbytes)
    content = np.empty(claimed if length else nbytes, np.uint8)
    Zstd().decode(data, content)
    return content.tobytes()


def _most(nbytes: int) -> int:
    """Return the most bytes of a chunk of this size, also while another compression is around it.

    A compression makes what has no repetitions hardly longer, and a zarr shard has an index.
    """
    return 2 * nbytes + (1 << 16)


def _require_fit(claimed: int, nbytes: int) -> None:
    if claimed > _most(nbytes):
        raise ValueError(f"a frame of more than {_most(nbytes):,} bytes in a chunk of {nbytes:,}")


_DECODERS: Final[Mapping[str, Callable[[bytes, int], bytes]]] = {
    "blosc": _blosc,
    "gzip": _gzip,
    "zstd": _zstd,
}
"""Decode a chunk of so many bytes, or a compressed form of it."""


@dataclass(frozen=True)
class _Bounded(BytesBytesCodec):
    """A compression that decodes no further than its chunk."""

    name: str
    configuration: Mapping[str, Any]
    is_fixed_size = False

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        raise NotImplementedError

    def _decode_sync(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        nbytes = math.prod(chunk_spec.shape) * chunk_spec.dtype.to_native_dtype().itemsize
        decode = _DECODERS[self.name.removeprefix(_PREFIX)]
        content = decode(chunk_bytes.as_numpy_array().tobytes(), nbytes)
        return chunk_spec.prototype.buffer.from_bytes(content)

    async def _decode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        return self._decode_sync(chunk_bytes, chunk_spec)


for _name in _DECODERS:
    register_codec(_PREFIX + _name, _Bounded)


def bounded(codecs: Any, names: list[str]) -> Any:  # noqa: ANN401
    """Return codecs with the compressions here in place of zarr-python's, and note their names."""
    if isinstance(codecs, list):
        return [bounded(codec, names) for codec in codecs]
    codec = codecs if isinstance(codecs, dict) else {"name": codecs}
    name, settings = codec.get("name"), codec.get("configuration")
    if name not in _CODECS:
        message = f"rewritten with the codec {show(name)}, which is not known; known are"
        raise UnsupportedError(f"{message} {', '.join(_CODECS)}")
    names.append(name)
    if name in _DECODERS:
        return {"name": _PREFIX + name, "configuration": {}}
    if not isinstance(settings, dict):
        return codec
    nested = {key: bounded(settings[key], names) for key in settings if key.endswith("codecs")}
    return {**codec, "configuration": {**settings, **nested}}
