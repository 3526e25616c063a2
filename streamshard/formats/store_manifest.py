"""The list of everything that a store consists of, with sizes and checksums."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from streamshard.errors import CorruptFileError

BLOCK_BYTES: Final = 1 << 20
"""Bytes of uncompressed chunks that share a CRC-32, so that a part can be read and checked."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a store."""

    nbytes: int
    """Size of the file."""
    crc32s: NDArray[np.uint32]
    """CRC-32 of each block of a raw chunk's content; of all bytes for any other file."""


def spell(records: Mapping[str, FileRecord], codec: str) -> bytes:
    """Spell the manifest; paths are relative to the store's root."""
    files = {
        path: [record.nbytes, base64.b64encode(record.crc32s.astype("<u4").tobytes()).decode()]
        for path, record in records.items()
    }
    return json.dumps({"block_bytes": BLOCK_BYTES, "codec": codec, "files": files}).encode()


def read(data: bytes) -> tuple[dict[str, FileRecord], str]:
    """Read a manifest; returns its records and the name of the codec.

    Raises
    ------
    CorruptFileError
        It is not as `spell` makes it.
    """
    try:
        document: Any = json.loads(data)
        records = {
            str(path): FileRecord(
                int(nbytes), np.frombuffer(base64.b64decode(crcs, validate=True), dtype="<u4")
            )
            for path, (nbytes, crcs) in document["files"].items()
        }
        block_bytes, codec = document["block_bytes"], str(document["codec"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(f"manifest is not as streamshard writes it: {error}") from error
    if block_bytes != BLOCK_BYTES:
        raise CorruptFileError(f"manifest has blocks of {block_bytes} bytes, not {BLOCK_BYTES}")
    return records, codec
