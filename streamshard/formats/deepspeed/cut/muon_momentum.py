"""Locates Muon's momentum, which a rank keeps whole for each parameter that it owns a part of."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from streamshard.errors import CorruptFileError, DisagreementError, UnsupportedError
from streamshard.io.entries import open_readable
from streamshard.layout.cutting import CuttingBuilder
from streamshard.layout.zero import FlatGroup
from streamshard.model import Slot, SourceFile

_SAMPLE_BYTES: Final = 4096
"""Bytes at each end of two copies that are compared."""


class WholeMomentum:
    """The places of the momentum of each parameter in one param group.

    A rank's momentum holds all parameters of which the rank owns a part, in stored order and
    without gaps. Ranks that own parts of the same parameter keep copies of its momentum, computed
    from the same gradient. The first rank's copy is read. Of the other copies only both ends are
    compared with it: with small partitions, reading them all would read most of the momentum twice.

    A momentum that is cut like any other state can have these lengths on all ranks too; then both
    layouts are the same. For rank r, let p be the sum of the padding and of the gaps in its
    partition. A momentum that is cut has as many elements as the partition. If the whole parameters
    have as many elements, then other ranks own p elements of r's parameters. Without
    `parameter_alignment` there are no gaps, and padding is on the last ranks that hold anything. If
    r shares a parameter with r + 1, r has no padding, so p = 0, so r shares no parameter. Hence no
    parameter is shared, and ranks that own parameters have no padding: in both layouts a rank has
    its parameters one after the other, and nothing else. Only with gaps can the lengths agree while
    the contents differ; then the config says which layout it is.
    """

    def __init__(
        self, flat: FlatGroup, slot: Slot, itemsize: int, files: Sequence[SourceFile]
    ) -> None:
        self._flat = flat
        self._slot = slot
        self._itemsize = itemsize
        self._files = files

    def lengths(self) -> list[int]:
        """Return the count of elements that each rank should have."""
        ranks = range(self._flat.world_size)
        return [self._flat.cut(rank).whole_numel for rank in ranks]

    def require_nothing_lost(self) -> None:
        """Refuse momentum whose end `elastic_checkpoint` cut off as if it were padding.

        It cuts the length of the partition's padding off every state, but momentum has no padding.
        """
        for rank, numel in enumerate(self.lengths()):
            padding = self._flat.padding(rank)
            if numel and padding:
                path = self._files[int(self._slot.files[rank])].path
                message = (
                    f"saved with elastic_checkpoint, which cuts the last {padding} of "
                    f"{numel} elements off Muon's momentum on this rank, as if they were padding: "
                    "they are lost. Save without elastic_checkpoint"
                )
                raise UnsupportedError(message, path=path)

    def assign(self, tensors: NDArray[np.int64], builder: CuttingBuilder) -> None:
        """Place the momentum of every parameter.

        `tensors`: logical tensor of each parameter, in the param group's own order.
        """
        found: dict[int, tuple[SourceFile, int]] = {}
        for rank in range(self._flat.world_size):
            number, offset = int(self._slot.files[rank]), int(self._slot.offsets[rank])
            file = self._files[number]
            for param in self._flat.owned(rank):
                numel = int(self._flat.numels[param])
                if param in found:
                    _require_alike(found[param], (file, offset), numel * self._itemsize)
                else:
                    found[param] = (file, offset)
                    piece = Slot(np.array([number]), np.array([offset]), np.array([numel]))
                    builder.assign(int(tensors[param]), builder.slot(piece), piece_numel=numel)
                offset += numel * self._itemsize


def _require_alike(one: tuple[SourceFile, int], other: tuple[SourceFile, int], nbytes: int) -> None:
    """Compare both ends of two copies."""
    span = min(nbytes, _SAMPLE_BYTES)
    for start in {0, nbytes - span}:
        first, second = (_read(file, offset + start, span) for file, offset in (one, other))
        if first != second:
            message = f"disagrees with {other[0].path} about the momentum of a parameter that both"
            message = f"{message} ranks hold: they are not of one step of one run"
            raise DisagreementError(message, path=one[0].path)


def _read(file: SourceFile, offset: int, nbytes: int) -> bytes:
    with open_readable(file.path) as opened:
        data = opened.read_at(offset, nbytes)
    if len(data) != nbytes:
        raise CorruptFileError(f"ends before byte {offset + nbytes}", path=file.path)
    return data
