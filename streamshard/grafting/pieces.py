"""Content that a graft makes as it is read: pieces of tensors, cast, and values between them."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from streamshard.engine.numeric.cast import cast_between
from streamshard.engine.run.region import RegionFiller
from streamshard.engine.run.source_reader import SourceReader
from streamshard.model import ITEMSIZE, Computed
from streamshard.source.source import Source
from streamshard.source.source_access import SourceAccess

_BLOCK_NUMEL: Final = 1 << 20
SCRATCH_BYTES: Final = 1 << 20
"""Memory of one worker for casts."""
Leading = tuple[int, int]
"""A tensor, and the count of its leading elements that are meant."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive elements of a tensor that is made: those of another one, or one value."""

    numel: int
    tensor: int | None = None
    """The tensor whose leading elements, after `first`, these are; None if one value fills it."""
    first: int = 0
    mean_of: tuple[Leading, ...] = ()
    """What the value that fills it is the mean of; without any it is zero."""
    data: bytes = b""
    """Its elements, where they are known."""


@dataclass(frozen=True, eq=False, slots=True)
class Pieces(Computed):
    """Pieces of tensors of one dtype, one after the other."""

    union: Source
    """All tensors that pieces are of."""
    pieces: tuple[Piece, ...]
    starts: NDArray[np.int64]
    """First element of each piece, and the end of the last."""
    fills: NDArray[np.float32]
    """What fills each piece that is of no tensor."""
    dtype: str

    @classmethod
    def of(cls, union: Source, pieces: Sequence[Piece], dtype: str) -> Self:
        starts = np.cumsum([0, *(piece.numel for piece in pieces)], dtype=np.int64)
        return cls(union, tuple(pieces), starts, np.zeros(len(pieces), np.float32), dtype)

    def find_means(self) -> None:
        """Find what fills the pieces that are filled with means."""
        means: dict[tuple[Leading, ...], np.float32] = {}
        with closing(SourceAccess(self.union)) as access:
            for number, piece in enumerate(self.pieces):
                if piece.mean_of and piece.mean_of not in means:
                    means[piece.mean_of] = self._mean(piece.mean_of, access)
                self.fills[number] = means.get(piece.mean_of, 0)

    def _mean(self, leading: Sequence[Leading], access: SourceAccess) -> np.float32:
        """Return a mean that does not depend on how a run is divided.

        Sums are in float64, over blocks of so many elements in their order.
        """
        block, total = np.empty(_BLOCK_NUMEL, dtype=np.float32), np.float64(0)
        for tensor, numel in leading:
            cast = cast_between(self._dtype_of(tensor), "float32")
            for start in range(0, numel, _BLOCK_NUMEL):
                part = block[: min(_BLOCK_NUMEL, numel - start)]
                access.fill(part, tensor, start, cast)
                total += part.sum(dtype=np.float64)
        return np.float32(total / max(1, sum(numel for _, numel in leading)))

    def _dtype_of(self, tensor: int) -> str:
        return self.union.checkpoint.tensors[tensor].dtype

    def fill(self, view: memoryview, offset: int, reader: SourceReader) -> None:
        size, scratch = ITEMSIZE[self.dtype], memoryview(bytearray(SCRATCH_BYTES))
        for number, start, stop in self._within(offset // size, len(view) // size):
            piece, nbytes = self.pieces[number], (stop - start) * size
            part, view = view[:nbytes], view[nbytes:]
            if piece.tensor is not None:
                elements = piece.first + start, piece.first + stop
                region = self.union.region(piece.tensor, *elements, self.dtype)
                RegionFiller(region, reader, scratch).fill(part)
            elif piece.data:
                part[:] = piece.data[start * size : stop * size]
            else:
                part[:] = self._element(number) * (stop - start)

    def located(self, offset: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        size = ITEMSIZE[self.dtype]
        for number, start, stop in self._within(offset // size, nbytes // size):
            piece = self.pieces[number]
            if piece.tensor is not None:
                elements = piece.first + start, piece.first + stop
                copies = self.union.region(piece.tensor, *elements).copies
                columns = copies.file, copies.source, copies.nbytes
                yield from zip(*(column.tolist() for column in columns), strict=True)

    def _within(self, first: int, numel: int) -> Iterator[tuple[int, int, int]]:
        """Yield the pieces of a range of elements: number, and start and end in the piece."""
        lower = int(np.searchsorted(self.starts, first, side="right")) - 1
        upper = int(np.searchsorted(self.starts, first + numel, side="left"))
        for number in range(lower, upper):
            begin, end = int(self.starts[number]), int(self.starts[number + 1])
            start, stop = max(first, begin) - begin, min(first + numel, end) - begin
            if start < stop:
                yield number, start, stop

    def _element(self, number: int) -> bytes:
        """Return one element of the value that fills a piece."""
        value, element = self.fills[number : number + 1], bytearray(ITEMSIZE[self.dtype])
        cast = cast_between("float32", self.dtype) if value.any() else None
        if cast is not None:
            cast(value.view(np.uint8).data, memoryview(element))
        elif self.dtype == "float32":
            element[:] = value.tobytes()
        return bytes(element)
