"""The safetensors container: a JSON header with the place of each tensor, then the tensors.

The layout is that of the safetensors library (0.8): largest alignment first, then by name, the
header padded with spaces to 8 bytes. `tests/formats/test_safetensors_file.py` compares our files
with the library's, byte by byte.
"""

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from streamshard.errors import CorruptFileError, Option, UnsupportedError
from streamshard.formats import strict_json
from streamshard.formats.pickle.inert import show
from streamshard.formats.pickle.node_checks import is_size, is_text, require_shape, sizes_of
from streamshard.io.entries import open_readable
from streamshard.model import ITEMSIZE

_DTYPES: Final = {
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
    "float32": "F32",
    "uint32": "U32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "uint16": "U16",
    "int16": "I16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Dtype → its name in the format, in the order of the tensors in a file."""
_NAMES: Final = {name: dtype for dtype, name in _DTYPES.items()}
_ORDER: Final = {dtype: place for place, dtype in enumerate(_DTYPES)}
_METADATA: Final = "__metadata__"
_SHARDING: Final = "DCP_SHARDING_INFO"
"""Entry of the metadata in which torch's HuggingFaceStorageWriter (2.13) says where parts begin."""
_LENGTH: Final = struct.Struct("<Q")
_ALIGNMENT: Final = 8
LIMIT_BYTES: Final = 100_000_000
"""Length of the longest header that the library reads."""


@dataclass(frozen=True, slots=True)
class Described:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Stored:
    tensor: Described
    offset: int
    """Byte offset of its first element in the file."""


@dataclass(frozen=True, slots=True)
class SafetensorsLayout:
    header: bytes
    """The header, with the length before it and the padding after it."""
    tensors: tuple[Stored, ...]
    """In file order, without gaps."""

    @property
    def nbytes(self) -> int:
        if not self.tensors:
            return len(self.header)
        return self.tensors[-1].offset + self.tensors[-1].tensor.nbytes


def lay_out(tensors: Iterable[Described]) -> SafetensorsLayout:
    described = list(tensors)
    for tensor in described:
        if tensor.dtype not in _DTYPES:
            message = f"'{tensor.name}' is {tensor.dtype}, which safetensors has no name for"
            way = f"leave it out with {Option('exclude')}, or use {Option('format', 'torch')}"
            raise UnsupportedError(f"{message}: {way}")
        if tensor.name == _METADATA or not is_text(tensor.name):
            message = f"safetensors cannot name a tensor {tensor.name!r}"
            raise UnsupportedError(f"{message}: leave it out with {Option('exclude')}")
    described.sort(key=lambda tensor: (_ORDER[tensor.dtype], tensor.name))
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    ends, at = [], 0
    for tensor in described:
        header[tensor.name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        ends.append(at)
        at += tensor.nbytes
    serialized = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    serialized += b" " * (-len(serialized) % _ALIGNMENT)
    if len(serialized) > LIMIT_BYTES:
        message = f"{len(described):,} tensors take a header of {len(serialized):,} bytes, where"
        message = f"{message} {LIMIT_BYTES:,} is most"
        raise UnsupportedError(f"{message}: use a smaller {Option('max_shard_size')}")
    start = _LENGTH.size + len(serialized)
    both = zip(described, ends, strict=True)
    return SafetensorsLayout(
        _LENGTH.pack(len(serialized)) + serialized,
        tuple(Stored(tensor, start + offset) for tensor, offset in both),
    )


def read(path: Path) -> Sequence[Stored]:
    """Read the places of the tensors in a file, which are whole."""
    tensors, begins = read_parts(path)
    part = next((name for name, offsets in begins.items() if any(offsets)), None)
    if part is not None:
        message = f"holds a part of {show(part)}, as PyTorch's HuggingFaceStorageWriter saves it on"
        raise UnsupportedError(f"{message} each rank, and not a whole tensor", path=path)
    return tensors


def read_parts(path: Path) -> tuple[Sequence[Stored], Mapping[str, tuple[int, ...]]]:
    """Read the places of the parts of tensors in a file, and where in its tensor each begins.

    Files that are not of ranks tell no beginnings.
    """
    with open_readable(path) as file:
        nbytes = file.nbytes
        head = file.read_at(0, _LENGTH.size)
        length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else nbytes
        if length > min(LIMIT_BYTES, nbytes - _LENGTH.size):
            raise CorruptFileError(f"no whole safetensors file ({nbytes} bytes)", path=path)
        serialized = file.read_at(_LENGTH.size, length)
    try:
        header = strict_json.parse(serialized)
        start = _LENGTH.size + length
        parts = [_stored(name, entry, start) for name, entry in header.items() if name != _METADATA]
        begins = _begins(header)
    except (AttributeError, CorruptFileError, KeyError, TypeError, ValueError) as error:
        message = f"its header is not a safetensors header ({error})"
        raise CorruptFileError(message, path=path) from error
    parts.sort(key=lambda part: (part.offset, part.tensor.nbytes))
    at = start
    for part in parts:
        if part.offset != at:
            message = f"{show(part.tensor.name)} begins at byte {part.offset}, not at {at}"
            raise CorruptFileError(message, path=path)
        at += part.tensor.nbytes
    if at != nbytes:
        raise CorruptFileError(f"{nbytes} bytes, its header describes {at}", path=path)
    return parts, begins


def _begins(header: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Read where the parts begin of which a header says so."""
    told = (header.get(_METADATA) or {}).get(_SHARDING)
    parts = strict_json.parse(told.encode()) if told is not None else {}
    return {name: sizes_of(entry["saved_offsets"]) for name, entry in parts.items()}


def _stored(name: str, entry: Any, start: int) -> Stored:  # noqa: ANN401
    first, stop = entry["data_offsets"]
    if not is_size(first) or not is_size(stop):
        raise ValueError(f"{show(name)} has no place")
    tensor = Described(name, _NAMES[entry["dtype"]], require_shape(entry["shape"]))
    if stop != first + tensor.nbytes:
        raise ValueError(f"{show(name)} has {stop - first} bytes for {tensor.nbytes}")
    return Stored(tensor, start + first)
