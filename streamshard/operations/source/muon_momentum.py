"""Finds Muon's momentum where ranks keep it whole for every parameter that they own a part of."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from streamshard.errors import CorruptFileError, DisagreementError, UnsupportedError
from streamshard.layout.cutting import CuttingBuilder
from streamshard.layout.zero import FlatGroup
from streamshard.model import Slot, SourceFile, SourceMap
from streamshard.posix import stream_of

_SAMPLE_BYTES: Final = 4096
"""How much of each end of two copies is compared."""


class WholeMomentum:
    """Says of one param group where the momentum of each parameter lies.

    A rank's momentum is that of all parameters of which it owns a part, in stored order and without
    gaps. Ranks that own parts of one parameter keep copies of its momentum, computed from the same
    gradient. The first rank's is taken. Of the others only both ends are compared with it: reading
    all of them would be reading most of the momentum twice where partitions are small.

    Cut like any other state, a momentum can have these lengths on all ranks too; then it is the
    same. For rank r, let p be the sum of the padding and of the gaps in its partition. A momentum
    that is cut has as many elements as the partition. That the whole parameters have as many means
    that what ranks beside r own of them is as much as p. Without `parameter_alignment` there are no
    gaps, and padding is on the last ranks that hold anything. A parameter that r shares with r + 1
    lets r have no padding, so p = 0, so r shares none. So no parameter is shared, and there is no
    padding on ranks that own parameters: either way a rank has its parameters one after the other,
    and nothing else. Only with gaps can the lengths agree where the contents do not; what tells
    then is that the config says which way it is.
    """

    def __init__(self, flat: FlatGroup, slot: Slot, itemsize: int) -> None:
        self._flat = flat
        self._slot = slot
        self._itemsize = itemsize

    def lengths(self) -> list[int]:
        """Count the elements that each rank should have."""
        ranks = range(self._flat.world_size)
        return [self._flat.cut(rank).whole_numel for rank in ranks]

    def require_nothing_lost(self, source_map: SourceMap) -> None:
        """Refuse momentum off whose end `elastic_checkpoint` took what was not padding.

        It strips every state of as much as the partition has of padding, and momentum has none.

        Raises
        ------
        UnsupportedError
            A rank with padding has momentum; the message names its file.
        """
        for rank, numel in enumerate(self.lengths()):
            padding = self._flat.padding(rank)
            if numel and padding:
                path = source_map.files[int(self._slot.files[rank])].path
                message = (
                    f"{path}: saved with elastic_checkpoint, which cuts the last {padding} of "
                    f"{numel} elements off Muon's momentum on this rank, as if they were padding: "
                    "they are lost. Save without elastic_checkpoint"
                )
                raise UnsupportedError(message)

    def place(
        self, tensors: NDArray[np.int64], builder: CuttingBuilder, source_map: SourceMap
    ) -> None:
        """Place the momentum of every parameter.

        Parameters
        ----------
        tensors
            Logical tensor of each parameter, in the param group's own order.

        Raises
        ------
        DisagreementError
            Two ranks have different momentum of one parameter; the message names the files.
        """
        found: dict[int, tuple[SourceFile, int]] = {}
        for rank in range(self._flat.world_size):
            number, offset = int(self._slot.files[rank]), int(self._slot.offsets[rank])
            file = source_map.files[number]
            for param in self._flat.owned(rank):
                numel = int(self._flat.numels[param])
                if param in found:
                    _require_alike(found[param], (file, offset), numel * self._itemsize)
                else:
                    found[param] = (file, offset)
                    piece = Slot(np.array([number]), np.array([offset]), np.array([numel]))
                    builder.place(int(tensors[param]), builder.slot(piece), piece_numel=numel)
                offset += numel * self._itemsize


def _require_alike(one: tuple[SourceFile, int], other: tuple[SourceFile, int], nbytes: int) -> None:
    """Compare both ends of two copies."""
    span = min(nbytes, _SAMPLE_BYTES)
    for start in {0, nbytes - span}:
        first, second = (_read(file, offset + start, span) for file, offset in (one, other))
        if first != second:
            message = f"{one[0].path} and {other[0].path} disagree about the momentum of a"
            raise DisagreementError(
                f"{message} parameter that both ranks hold: they are not of one step of one run"
            )


def _read(file: SourceFile, offset: int, nbytes: int) -> bytes:
    with stream_of(file.path) as stream:
        stream.seek(offset)
        data = stream.read(nbytes)
    if len(data) != nbytes:
        raise CorruptFileError(f"{file.path}: ends before byte {offset + nbytes}")
    return data
