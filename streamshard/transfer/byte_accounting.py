"""Counts the bytes of every file that a plan writes, and how often it reads each source tensor."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from streamshard.layout.cutting import Segments
from streamshard.model import ITEMSIZE, Computed, Whole
from streamshard.source.source import Source
from streamshard.transfer.file_layout import MOST_COPIES, Elements, FileLayout, dtypes_of

_PIECES_AT_ONCE: Final = 1 << 16
"""Pieces that are located together, which bounds the memory for it."""
_PIECE_BYTES: Final = 1024
"""Memory for a piece of a file, apart from the segments of a rank's share."""
_SEGMENT_BYTES: Final = 64
_UNIT_BYTES: Final = 512
"""Memory of a span for each of its pieces and copies."""
_LOCATE_BYTES: Final = 16 * 8
"""Temporary arrays for locating a copy."""


class ByteCounts:
    """The bytes that a plan writes, and the tensors that it reads for them, counted by layouts."""

    def __init__(self, source: Source) -> None:
        self.sizes: dict[str, int] = {}
        """Path of every target file → its bytes; an upper bound for compressed files."""
        self.times = np.zeros(len(source.checkpoint.tensors), dtype=np.int64)
        """How often each of the source's tensors is read completely."""
        self.waiting_bytes = self.shared_bytes = 0
        """Memory for a file that is packed with others, of which so many wait as `fit_memory` says;
        and for what all workers write together."""
        self._tensors, self._piece_numel = source.checkpoint.tensors, source.cutting.piece_numel
        self._numels = np.array([tensor.numel for tensor in self._tensors], dtype=np.int64)
        self._is_counted = np.zeros(len(self._tensors), dtype=bool)
        """Whether a tensor is cut among ranks, and was counted completely with the first rank."""
        self._pieces = self._units = 0
        """Most pieces of a file; most pieces and copies of a span."""

    def copies_bytes(self) -> Callable[[int], int]:
        """Return what bounds the memory for files and spans in flight, by the count of workers."""
        pieces, units = self._pieces, self._units

        def copies_bytes(workers: int) -> int:
            in_flight = (2 * workers + 2) * _UNIT_BYTES + _LOCATE_BYTES
            return pieces * _PIECE_BYTES + units * in_flight

        return copies_bytes

    def add_all(self, layouts: Iterable[FileLayout]) -> None:
        for layout in layouts:
            self.add(layout, [layout.path])

    def add(self, layout: FileLayout, paths: Sequence[str]) -> None:
        self.sizes.update(dict.fromkeys(paths, layout.nbytes))
        pieces, units, last = len(layout.pieces), len(layout.pieces), 0
        for piece in layout.pieces:
            if isinstance(piece, Elements):
                copies, segments = self._add(piece, len(paths))
                pieces, units, last = pieces + segments, units + copies, max(last, copies)
        self._pieces = max(self._pieces, pieces)
        # A span ends with the piece that makes it full.
        most = MOST_COPIES + 1 + min(last, MOST_COPIES)
        self._units = max(self._units, min(units, most))

    def _add(self, elements: Elements, count: int) -> tuple[int, int]:
        """Add a piece of so many files; return how many copies and segments it has, at most.

        Segments are counted in what takes the memory of a piece.
        """
        content = elements.content
        if isinstance(content, Whole):
            if not elements.start:
                self.times[content.tensor] += count
            _, dtype = dtypes_of(elements, self._tensors)
            piece_numel = int(self._piece_numel[content.tensor])
            return elements.nbytes // (ITEMSIZE[dtype] * piece_numel) + 2, 0
        members, numels = content.tensors, self._numels[content.tensors]
        if not content.is_cut or not self._is_counted[members[:1]].all():
            self._is_counted[members] |= content.is_cut
            # These are read once, by one rank or by all ranks together.
            self.times[members] += 1
        copies = int((numels // self._piece_numel[members] + 2).sum())
        return copies, len(members) * _SEGMENT_BYTES // _PIECE_BYTES


def read_bytes(source: Source, times: NDArray[np.int64]) -> NDArray[np.int64]:
    """Compute how many bytes of content are read from each of the source's files.

    `times`: how often each tensor is read completely. A compressed file counts once; the run may
    read it a few times.
    """
    cutting, tensors = source.cutting, source.checkpoint.tensors
    totals = np.zeros(len(source.files), dtype=np.int64)
    computed = {n: d for n, f in enumerate(source.files) if isinstance(d := f.decoder, Computed)}
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
        nbytes = copies.nbytes * times[copies.target]
        for row in np.flatnonzero(np.isin(copies.file, [*computed])).tolist():
            copy = int(copies.source[row]), int(copies.nbytes[row])
            for held, _, count in computed[int(copies.file[row])].located(*copy):
                totals[held] += count * times[copies.target[row]]
                nbytes[row] = 0
        np.add.at(totals, copies.file, nbytes)
    for number, file in enumerate(source.files):
        if totals[number] and number not in computed and not file.is_plain:
            totals[number] = file.nbytes
    return totals
