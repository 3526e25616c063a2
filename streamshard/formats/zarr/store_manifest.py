"""The manifest of a store: sizes and checksums of its files, digests of its tensors."""

import json
import struct
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from streamshard.errors import CorruptFileError
from streamshard.formats import strict_json
from streamshard.formats.deepspeed.names import is_inside
from streamshard.formats.pickle.inert import show
from streamshard.formats.zarr.array_paths import array_path
from streamshard.health import MEASURED, TensorHealth
from streamshard.model import BLOB, FILE, LogicalTensor

BLOCK_BYTES: Final = 1 << 20
"""Bytes of uncompressed chunks that share a CRC-32, so that a part can be read and checked."""

_STORED_CRC: Final = np.dtype("<u4")
_HEALTH: Final = struct.Struct("<4q2d")
"""A tensor's health: counts of elements, NaNs, infinities and zeros; largest magnitude, RMS."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    nbytes: int
    crc32s: NDArray[np.uint32]
    """CRC-32 of each block of a raw chunk's content; of all bytes for any other file."""

    def is_equal(self, other: "FileRecord") -> bool:
        return self.nbytes == other.nbytes and np.array_equal(self.crc32s, other.crc32s)


@dataclass(frozen=True, slots=True)
class Manifest:
    records: Mapping[str, FileRecord]
    """Every file but the manifest's own, by path relative to the store's root."""
    codec: str
    digests: Mapping[str, str]
    """Array → the digest of its tensor's elements."""
    health: Mapping[str, TensorHealth] | None = None
    """Array → which numbers its tensor holds; None if that was not measured."""


def serialize(
    records: Mapping[str, FileRecord],
    codec: str,
    digests: Mapping[str, str],
    health: Mapping[str, TensorHealth] | None = None,
) -> bytes:
    """Serialize the manifest; `digests` has the CRC-32 and CRC-32C of each array's elements.

    Its length depends on no number that was measured.
    """
    files = {
        path: [
            record.nbytes,
            b2a_base64(record.crc32s.astype("<u4").tobytes(), newline=False).decode(),
        ]
        for path, record in records.items()
    }
    document: dict[str, Any] = {"block_bytes": BLOCK_BYTES, "codec": codec, "files": files}
    document["digests"] = digests
    if health is not None:
        document["health"] = {array: _packed(found) for array, found in health.items()}
    return json.dumps(document).encode()


def _packed(found: TensorHealth) -> str:
    counts = found.numel, found.nans, found.infinities, found.zeros
    return b2a_base64(_HEALTH.pack(*counts, found.largest, found.rms), newline=False).decode()


def _unpacked(text: str) -> TensorHealth:
    found = TensorHealth(*_HEALTH.unpack(a2b_base64(text, strict_mode=True)))
    found.require_possible()
    return found


def read(data: bytes) -> Manifest:
    try:
        document: Any = strict_json.parse(data)
        records = {
            str(path): FileRecord(
                int(nbytes), np.frombuffer(a2b_base64(crcs, strict_mode=True), dtype=_STORED_CRC)
            )
            for path, (nbytes, crcs) in document["files"].items()
        }
        block_bytes, codec = document["block_bytes"], str(document["codec"])
        digests = {str(array): str(digest) for array, digest in document["digests"].items()}
        health = document.get("health")
        if health is not None:
            health = {str(array): _unpacked(text) for array, text in health.items()}
    except (
        struct.error,
        ArithmeticError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:
        raise CorruptFileError(f"manifest is not as streamshard writes it: {error}") from error
    for path in records:
        if not is_inside(path):
            raise CorruptFileError(f"manifest lists {show(path)}, which leads out of the store")
    if block_bytes != BLOCK_BYTES:
        raise CorruptFileError(f"manifest has blocks of {block_bytes} bytes, not {BLOCK_BYTES}")
    return Manifest(records, codec, digests, health)


def is_measured(tensor: LogicalTensor) -> bool:
    """Tell whether a tensor is one of floats, and a weight, a buffer or an optimizer's state."""
    return tensor.dtype in MEASURED and tensor.state not in (BLOB, FILE)


def health_of_all(
    tensors: Iterable[LogicalTensor], recorded: Mapping[str, TensorHealth]
) -> dict[str, TensorHealth] | None:
    """Return what is known of the tensors of floats; None unless it is known of each."""
    floats = {array_path(tensor): tensor.numel for tensor in tensors if is_measured(tensor)}
    measured = {name: recorded[name] for name in floats if name in recorded}
    is_whole = {name: health.numel for name, health in measured.items()} == floats
    return measured if is_whole else None
