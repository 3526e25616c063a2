"""Checksums of the tensors inside a store's training state, which a store does not record."""

import zlib
from contextlib import closing

import numpy as np

from streamshard.formats.torch.torch_tensor import storages_in
from streamshard.model import Whole
from streamshard.operations.source.source import Source
from streamshard.operations.source.source_access import SourceAccess

_PIECE_BYTES = 1 << 20


def note_checksums(source: Source) -> None:
    """Note the CRC-32 of each tensor in the training state, as torch's files have it.

    Parts of a model are compared by it, so that no two tensors are in memory.
    """
    model_parts = source.checkpoint.model_parts
    roots = [root for one in model_parts for root in (one.model_state, one.optimizer_file)]
    with closing(SourceAccess(source)) as access:
        for storage in storages_in(roots):
            if storage.crc32 is None and isinstance(storage.content, Whole):
                storage.crc32 = _crc32(access, storage.content.tensor, storage.nbytes)


def _crc32(access: SourceAccess, blob: int, nbytes: int) -> int:
    piece = np.empty(min(nbytes, _PIECE_BYTES), dtype=np.uint8)
    found = 0
    for start in range(0, nbytes, _PIECE_BYTES):
        part = piece[: min(nbytes - start, _PIECE_BYTES)]
        access.fill(part, blob, start, None)
        found = zlib.crc32(part.data, found)
    return found
