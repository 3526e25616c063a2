"""Reads what decides how a model's parts go together: checksums in a store, values of shards."""

import zlib
from contextlib import closing

import numpy as np

from streamshard.errors import UnsupportedError, lacking
from streamshard.formats.deepspeed.model_parallel.parts import ModelInParts
from streamshard.formats.torch.torch_tensor import storages_in
from streamshard.model import ITEMSIZE, MASTER, MODULE, Whole
from streamshard.operations.source.source import Source
from streamshard.operations.source.source_access import SourceAccess

_READ_BYTES = 1 << 20


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
    piece = np.empty(min(nbytes, _READ_BYTES), dtype=np.uint8)
    found = 0
    for start in range(0, nbytes, _READ_BYTES):
        part = piece[: min(nbytes - start, _READ_BYTES)]
        access.fill(part, blob, start, None)
        found = zlib.crc32(part.data, found)
    return found


_PIECE_BYTES = 1 << 16


def require_different_shards(source: Source, parts: ModelInParts) -> None:
    """Refuse a tensor that is cut only because no list has it, if all ranks hold the same of it.

    It may be one that each rank holds whole: put together, it would be several times as long. Only
    the beginnings of other tensors are read.
    """
    index, model_parts = parts.checkpoint.tensor_index(), parts.checkpoint.model_parts
    with closing(SourceAccess(source)) as access:
        for name in parts.cut_by_default():
            tensor = parts.tensors[name]
            state = MODULE if tensor.group is None else MASTER
            first, *others = [index[model_parts[m].name, state, name] for m in tensor.shapes]
            if all(_are_equal(source, access, first, other) for other in others):
                advice = lacking("cut_rules")
                message = f"'{name}' is the same on all ranks, and no list says whether each has"
                raise UnsupportedError(f"{message} all of it or a part: {advice}")


def _are_equal(source: Source, access: SourceAccess, one: int, other: int) -> bool:
    tensor = source.checkpoint.tensors[one]
    size = ITEMSIZE[tensor.dtype]
    pieces = np.empty((2, min(tensor.numel, _PIECE_BYTES // size)), dtype=f"u{size}")
    for start in range(0, tensor.numel, max(1, pieces.shape[1])):
        rows = pieces[:, : tensor.numel - start]
        for row, number in zip(rows, (one, other), strict=True):
            access.fill(row, number, start, None)
        if not np.array_equal(rows[0], rows[1]):
            return False
    return True
