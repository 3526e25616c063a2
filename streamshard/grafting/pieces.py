"""Content that a graft makes as it is read: pieces of tensors, cast, and values between them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from streamshard.engine.numeric.cast import Cast, cast_between
from streamshard.engine.run.region import RegionFiller
from streamshard.engine.run.source_reader import SourceReader
from streamshard.engine.run.work import Region
from streamshard.layout.cutting import Cutting, Segments, coalesce
from streamshard.model import ITEMSIZE, Computed

_BLOCK_NUMEL: Final = 1 << 20
SCRATCH_BYTES: Final = 1 << 20
"""Memory of one worker for casts."""
_NOTHING = -1
"""The tensor of a piece that is filled with one value."""

Array = NDArray[Any]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive elements of a tensor that is made."""

    numel: int
    tensor: int = _NOTHING
    """The tensor whose leading elements, after `first`, these are; by default one value fills."""
    dtype: str = ""
    """Of that tensor."""
    first: int = 0
    mean_of: tuple[tuple[int, str, int], ...] = ()
    """What the value that fills it is the mean of: tensors, dtypes, counts of leading elements."""


@dataclass(frozen=True, eq=False, slots=True)
class Pieces(Computed):
    """Pieces of tensors of one dtype, one behind the other."""

    cutting: Cutting
    """Of the files that the pieces lie in."""
    pieces: tuple[Piece, ...]
    starts: Ints
    """First element of each piece, and the end of the last."""
    fills: NDArray[np.float32]
    """What fills each piece that is of no tensor."""
    dtype: str

    @classmethod
    def of(cls, cutting: Cutting, pieces: Sequence[Piece], dtype: str) -> Self:
        starts = np.cumsum([0, *(piece.numel for piece in pieces)], dtype=np.int64)
        return cls(cutting, tuple(pieces), starts, np.zeros(len(pieces), np.float32), dtype)

    @property
    def mean_bytes(self) -> int:
        """Bytes that `find_means` reads."""
        parts = {part for piece in self.pieces for part in piece.mean_of}
        return sum(numel * ITEMSIZE[dtype] for _, dtype, numel in parts)

    def find_means(self, read: Callable[[int, int, Array, Cast | None], None]) -> None:
        """Find what fills the pieces that are filled with means.

        Sums are in float64, over blocks of so many elements in their order, so that they do not
        depend on how the run is divided. `read`: fills an array from an element of a tensor on.
        """
        known: dict[tuple[tuple[int, str, int], ...], np.float32] = {}
        block = np.empty(_BLOCK_NUMEL, dtype=np.float32)
        for number, piece in enumerate(self.pieces):
            if piece.mean_of and piece.mean_of not in known:
                total, count = np.float64(0), 0
                for tensor, dtype, numel in piece.mean_of:
                    cast = cast_between(dtype, "float32")
                    for start in range(0, numel, _BLOCK_NUMEL):
                        part = block[: min(_BLOCK_NUMEL, numel - start)]
                        read(tensor, start, part, cast)
                        total += part.sum(dtype=np.float64)
                    count += numel
                known[piece.mean_of] = np.float32(total / max(1, count))
            self.fills[number] = known.get(piece.mean_of, 0)

    def fill(self, view: memoryview, offset: int, reader: SourceReader) -> None:
        size, scratch = ITEMSIZE[self.dtype], memoryview(bytearray(SCRATCH_BYTES))
        first = offset // size
        for number, start, stop in self._within(first, len(view) // size):
            at = (int(self.starts[number]) + start - first) * size
            part = view[at : at + (stop - start) * size]
            if self.pieces[number].tensor == _NOTHING:
                part[:] = self._element(number) * (stop - start)
            else:
                RegionFiller(self._region(number, start, stop), reader, scratch).fill(part)

    def located(self, offset: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        size = ITEMSIZE[self.dtype]
        for number, start, stop in self._within(offset // size, nbytes // size):
            if self.pieces[number].tensor != _NOTHING:
                found = self._region(number, start, stop).copies
                yield from zip(
                    found.file.tolist(), found.source.tolist(), found.nbytes.tolist(), strict=True
                )

    def _within(self, first: int, numel: int) -> Iterator[tuple[int, int, int]]:
        """Yield the pieces of a range of elements: number, and start and end in the piece."""
        stop = first + numel
        number = int(np.searchsorted(self.starts, first, side="right")) - 1
        while number < len(self.pieces) and self.starts[number] < stop:
            begin, end = int(self.starts[number]), int(self.starts[number + 1])
            if min(stop, end) > max(first, begin):
                yield number, max(first, begin) - begin, min(stop, end) - begin
            number += 1

    def _region(self, number: int, start: int, stop: int) -> Region:
        piece, size = self.pieces[number], ITEMSIZE[self.dtype]
        tensor, zero = np.array([piece.tensor]), np.zeros(1, dtype=np.int64)
        segments = Segments(tensor, zero + piece.first + start, zero + piece.first + stop, zero)
        found = self.cutting.locate(segments, target_itemsize=size)
        return Region(
            content_bytes=(stop - start) * size,
            copies=coalesce(found, itemsize=ITEMSIZE[piece.dtype], target_itemsize=size),
            source_itemsize=ITEMSIZE[piece.dtype],
            target_itemsize=size,
            cast=cast_between(piece.dtype, self.dtype),
        )

    def _element(self, number: int) -> bytes:
        """Return one element of the value that fills a piece."""
        value, element = self.fills[number : number + 1], bytearray(ITEMSIZE[self.dtype])
        cast = cast_between("float32", self.dtype) if value.any() else None
        if cast is not None:
            cast(value.view(np.uint8).data, memoryview(element))
        elif self.dtype == "float32":
            element[:] = value.tobytes()
        return bytes(element)


@dataclass(frozen=True, eq=False, slots=True)
class Given(Computed):
    """Bytes that are there already."""

    data: bytes

    def fill(self, view: memoryview, offset: int, reader: SourceReader) -> None:
        view[:] = self.data[offset : offset + len(view)]

    def located(self, offset: int, nbytes: int) -> Iterable[tuple[int, int, int]]:
        return ()
