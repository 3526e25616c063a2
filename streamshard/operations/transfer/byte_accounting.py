"""Counts the bytes of every file that a plan writes, and how often it reads each source tensor."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from streamshard.formats.zarr.chunks import EncodedChunk
from streamshard.layout.cutting import Segments
from streamshard.operations.source.source import Source

_PIECES_AT_ONCE: Final = 1 << 16
"""Pieces that are located together, which bounds the memory for it."""


@dataclass(frozen=True, slots=True)
class ByteCounts:
    """The bytes that a plan writes, and the tensors that it reads for them."""

    sizes: Mapping[str, int]
    """Path of every target file → its bytes; an upper bound for compressed files."""
    times: NDArray[np.int64]
    """How often each of the source's tensors is read completely."""
    cast_bytes: int = 0
    """Bytes written that are module weights cast from master weights, or weights cast to another
    dtype."""
    padding_bytes: int = 0
    """Bytes written that are zeros to fill up partitions."""


def read_bytes(source: Source, times: NDArray[np.int64]) -> NDArray[np.int64]:
    """Compute how many bytes of content are read from each of the source's files.

    `times`: how often each tensor is read completely. A compressed file counts once; the run may
    read it a few times.
    """
    cutting, tensors = source.cutting, source.checkpoint.tensors
    found = np.zeros(len(source.files), dtype=np.int64)
    numels = np.array([tensor.numel for tensor in tensors], dtype=np.int64)
    wanted = np.flatnonzero((times > 0) & (numels > 0))
    pieces = np.cumsum(numels[wanted] // cutting.piece_numel[wanted] + 2)
    bounds = np.searchsorted(
        pieces, np.arange(0, pieces[-1] if len(pieces) else 0, _PIECES_AT_ONCE)
    )
    for some in np.split(wanted, bounds[1:]):
        zeros = np.zeros_like(some)
        copies = cutting.locate(Segments(some, zeros, numels[some], some), target_itemsize=0)
        # With target_itemsize=0, each copy's `target` stays the number of its tensor.
        np.add.at(found, copies.file, copies.nbytes * times[copies.target])
    for number, file in enumerate(source.files):
        if isinstance(file.decoder, EncodedChunk) and found[number]:
            found[number] = file.nbytes
    return found
