"""Computes the weighted mean of tensors of several checkpoints as it is read, range by range.

Sums are in float64, in the order of the checkpoints, and are rounded once, to float32 or wider.
From there an element in 16 bits is cast, as DeepSpeed casts weights from master weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from streamshard.engine.numeric.cast import (
    cast_between,
    comparing_cast,
    count_infinite,
    find_nans,
    wider,
)
from streamshard.engine.run.region import ReadAhead, RegionFiller
from streamshard.engine.run.source_reader import SourceReader
from streamshard.engine.run.work import Region
from streamshard.errors import IntegrityError
from streamshard.layout.cutting import Cutting, Segments, coalesce
from streamshard.model import ITEMSIZE, Computed

_STEP_NUMEL: Final = 1 << 15
"""Elements that are summed up together, while they are in the CPU cache."""
_WIDE: Final = "float64"
SUMMING_BYTES: Final = 4 * 8 * _STEP_NUMEL + (1 << 20)
"""Memory of one worker for sums, and for what is read of one checkpoint after the other."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class Summand:
    """The tensors of one checkpoint of which means are computed, in the order of the means."""

    path: Path
    """What messages call the checkpoint."""
    weight: float
    dtype: str
    cutting: Cutting

    @property
    def read_dtype(self) -> str:
        """The dtype as which elements are read, which holds all their values."""
        return wider(self.dtype, "float32") or _WIDE

    def region(self, segments: Segments, numel: int) -> Region:
        """Return the region that segments fill; their targets count elements."""
        size = ITEMSIZE[self.read_dtype]
        target = Segments(segments.tensor, segments.start, segments.stop, segments.target * size)
        found = self.cutting.locate(target, target_itemsize=size)
        return Region(
            content_bytes=numel * size,
            copies=coalesce(found, itemsize=ITEMSIZE[self.dtype], target_itemsize=size),
            source_itemsize=ITEMSIZE[self.dtype],
            target_itemsize=size,
            cast=comparing_cast(self.dtype, self.read_dtype),
        )


@dataclass(frozen=True, eq=False, slots=True)
class WeightedMean(Computed):
    """The means of tensors, one after the other."""

    summands: tuple[Summand, ...]
    names: tuple[str, ...]
    """What messages call the tensors."""
    starts: Ints
    """First element of each tensor, and the end of the last."""
    dtype: str
    firsts: tuple[int, ...]

    def fill(self, view: memoryview, offset: int, reader: SourceReader) -> None:
        size = ITEMSIZE[self.dtype]
        first, numel = offset // size, len(view) // size
        scratch = memoryview(bytearray(8 * _STEP_NUMEL))
        fillers = [
            RegionFiller(region, reader, scratch, ReadAhead((), reader))
            for region in self._regions(first, numel)
        ]
        cast = cast_between(_WIDE, self.dtype)
        read = np.empty(_STEP_NUMEL, dtype=np.float64)
        sums, products = np.empty((2, _STEP_NUMEL), dtype=np.float64)
        for start in range(0, numel, _STEP_NUMEL):
            count = min(_STEP_NUMEL, numel - start)
            for number, (summand, filler) in enumerate(zip(self.summands, fillers, strict=True)):
                elements = read.view(summand.read_dtype)[:count]
                filler.fill(elements.view(np.uint8).data)
                product = (products if number else sums)[:count]
                with np.errstate(all="ignore"):  # what is no number is refused below
                    np.multiply(elements, summand.weight, out=product, dtype=np.float64)
                    if number:
                        np.add(sums[:count], product, out=sums[:count])
            into, total = view[start * size : (start + count) * size], sums[:count]
            if cast is None:
                np.frombuffer(into, dtype=np.float64)[:] = total
            else:
                cast(total.view(np.uint8).data, into)
            self._require_finite(into, first + start, reader)

    def located(self, offset: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        size = ITEMSIZE[self.dtype]
        for region in self._regions(offset // size, nbytes // size):
            copies = region.copies
            yield from zip(
                copies.file.tolist(), copies.source.tolist(), copies.nbytes.tolist(), strict=True
            )

    def _regions(self, first: int, numel: int) -> list[Region]:
        """Return the region of each checkpoint that a range of elements is computed of."""
        stop = first + numel
        lower = int(np.searchsorted(self.starts, first, side="right")) - 1
        upper = int(np.searchsorted(self.starts, stop, side="left"))
        rows = np.arange(lower, upper)
        begin = np.maximum(self.starts[rows], first)
        end = np.minimum(self.starts[rows + 1], stop)
        segments = Segments(rows, begin - self.starts[rows], end - self.starts[rows], begin - first)
        return [one.region(segments, numel) for one in self.summands]

    def _require_finite(self, view: memoryview, first: int, reader: SourceReader) -> None:
        """Refuse a mean that is no number, and say which checkpoint causes it."""
        is_wrong = find_nans(view, self.dtype)
        if not count_infinite(view, self.dtype) and not is_wrong.any():
            return
        for at in range(len(is_wrong)):
            size = ITEMSIZE[self.dtype]
            one = view[at * size : (at + 1) * size]
            if is_wrong[at] or count_infinite(one, self.dtype):
                raise self._refusal(first + at, reader)

    def _refusal(self, element: int, reader: SourceReader) -> IntegrityError:
        row = int(np.searchsorted(self.starts, element, side="right")) - 1
        where = f"{self.names[row]}, element {element - int(self.starts[row]):,}"
        for summand, region in zip(self.summands, self._regions(element, 1), strict=True):
            buffer = np.empty(1, dtype=summand.read_dtype)
            scratch = memoryview(bytearray(64))
            filler = RegionFiller(region, reader, scratch, ReadAhead((), reader))
            filler.fill(buffer.view(np.uint8).data)
            if not np.isfinite(buffer[0]):
                message = f"{where}: is {buffer[0]}, and no mean is made of that. Leave this"
                return IntegrityError(f"{message} checkpoint out", path=summand.path)
        message = f"{where}: the sum with these weights is too large for {self.dtype}"
        return IntegrityError(message, path=self.summands[-1].path)
