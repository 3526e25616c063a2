"""What a target's files consist of, and the one way to divide them into spans.

Every target describes its files as pieces that follow each other: bytes that are known, and
elements of the source. Here they are divided into spans of about the same cost, which are made only
when a worker needs them: how many copies are in memory does not depend on the checkpoint's size.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Final, Protocol, cast

import numpy as np

from streamshard.engine.run.span_writer import TargetFiles
from streamshard.engine.run.work import (
    Codec,
    Ending,
    Fixed,
    LazySpans,
    Region,
    Span,
    SpanResult,
    TargetFile,
    Trailer,
    ignore,
)
from streamshard.formats.checkpoint import Checkpoint
from streamshard.layout.cutting import Segments, Share, clip
from streamshard.layout.memory_plan import MIB
from streamshard.model import FILE, ITEMSIZE, LogicalTensor, Whole
from streamshard.source.source import Source

SPAN_BYTES = 128 * MIB
"""Workers get files in spans of about this size, a multiple of any dtype's item size."""
MOST_COPIES: Final = 1024
"""Copies that cost as much as the bytes of a whole span; no region of one has more."""
_SAMPLE_BYTES: Final = 1 << 16
"""Of the first elements of a file, a multiple of any dtype's item size."""
_UNIT_COST: Final = SPAN_BYTES // MOST_COPIES
"""Bytes that a piece counts as in addition to its own, and each of its copies."""


@dataclass(frozen=True, slots=True)
class Elements:
    """Bytes of a file that are elements of the source; zeros where none of them lies."""

    content: Whole | Share
    nbytes: int
    dtype: str
    """Of the elements in the file."""
    start: int = 0
    """First element of a whole tensor that lies here."""
    trailer: Trailer | None = None
    """With a CRC-32C for a chunk of a store, which is never divided."""
    name: str = ""
    """Name under which finite elements that become infinite are counted; empty if they are not."""
    codec: Codec | None = None
    block_bytes: int = 0
    """See `Region`, for both."""


class Layout(Protocol):
    """What a target consists of: a file, or many small ones."""

    def divided(self, divider: "Divider") -> TargetFiles:
        """Return it as work."""


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A file to write: pieces that follow each other, and endings after them."""

    path: str
    """Relative to the target directory."""
    pieces: Sequence[Fixed | Elements]
    endings: Sequence[Ending] = ()
    mode: int | None = None
    is_last: bool = False
    take: Callable[[SpanResult], None] = ignore
    """See `TargetFile` for these three."""

    @property
    def nbytes(self) -> int:
        """Size of the file; an upper bound if a piece is encoded."""
        trailers = (p.trailer for p in self.pieces if isinstance(p, Elements))
        parts = (*self.pieces, *filter(None, trailers))
        return sum(part.nbytes for part in parts) + sum(len(e.data) for e in self.endings)

    def divided(self, divider: "Divider") -> TargetFile:
        return divider.target(self)

    def beginning(self) -> "FileLayout":
        """Return the file up to its first elements, with some of these."""
        first = next((n for n, p in enumerate(self.pieces) if isinstance(p, Elements)), None)
        if first is None:
            return FileLayout(self.path, self.pieces)
        elements = cast("Elements", self.pieces[first])
        some = replace(elements, nbytes=min(elements.nbytes, _SAMPLE_BYTES), trailer=None, name="")
        return FileLayout(self.path, [*self.pieces[:first], some])


def fixed_files(files: Mapping[str, bytes], *, is_last: bool = False) -> Iterator[FileLayout]:
    for path, data in files.items():
        yield FileLayout(path, [Fixed(data)], is_last=is_last)


def copied_files(
    checkpoint: Checkpoint, path_of: Callable[[str], str | None]
) -> Iterator[FileLayout]:
    """Yield the layouts of copies of a checkpoint's other files, except those without a path."""
    modes = {file.path: file.mode for file in checkpoint.files}
    for number, tensor in enumerate(checkpoint.tensors):
        path = path_of(tensor.name) if tensor.state == FILE else None
        if path is not None:
            content = [Elements(Whole(number), tensor.nbytes, tensor.dtype)]
            yield FileLayout(path, content, mode=modes[tensor.name])


def dtypes_of(elements: Elements, tensors: Sequence[LogicalTensor]) -> tuple[str, str]:
    if isinstance(elements.content, Share):
        return elements.content.dtype, elements.dtype
    tensor = tensors[elements.content.tensor]
    return tensor.dtype, tensor.dtype_in(elements.dtype)


class Divider:
    """Divides files into spans, which are filled from a source."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._tensors = source.checkpoint.tensors
        self.overflowed: dict[str, int] = {}
        """Name → count of its finite elements that a cast made infinite, if there are any."""

    def target(self, layout: FileLayout) -> TargetFile:
        runs, late, named = _Runs(), list[Ending](), list[tuple[int, str]]()
        for piece in layout.pieces:
            if isinstance(piece, Fixed):
                runs.add(piece, 1)
                continue
            start, parts = runs.end, self._parts(piece)
            if piece.name:
                named.append((start, piece.name))
            for part in parts:
                runs.add(part, 1 + part.copies)
            if piece.trailer and len(parts) > 1:
                late.append(_late(piece.trailer, start, runs.end))
                runs.skip(piece.trailer.nbytes)

        def take(result: SpanResult) -> None:
            for region in result.regions:
                if region.overflowed:
                    at = bisect_right(named, region.offset, key=lambda each: each[0])
                    name = named[at - 1][1]
                    self.overflowed[name] = self.overflowed.get(name, 0) + region.overflowed
            layout.take(result)

        spans = LazySpans([partial(self._span, *run) for run in runs.all()], runs.nbytes)
        endings = [*late, *layout.endings]
        taken = take if named else layout.take
        return TargetFile(layout.path, spans, endings, layout.mode, layout.is_last, taken)

    def _span(self, offset: int, parts: Sequence["Fixed | _Part"]) -> Span:
        return Span(offset, [p if isinstance(p, Fixed) else self._region(p) for p in parts])

    def regions(self, elements: Elements) -> list[Region]:
        return list(map(self._region, self._parts(elements)))

    def _parts(self, elements: Elements) -> Sequence["_Part"]:
        """Divide a piece that is too large, or has too many copies."""
        itemsize = ITEMSIZE[dtypes_of(elements, self._tensors)[1]]
        segments, trailer = self._segments(elements, itemsize), elements.trailer
        numels = segments.stop - segments.start
        copies = np.cumsum(numels // self._source.cutting.piece_numel[segments.tensor] + 2)
        most = int(copies[-1]) if len(copies) else 0
        edges = np.arange(0, max(1, elements.nbytes), SPAN_BYTES)
        if most > MOST_COPIES:
            ends, wanted = segments.target + numels * itemsize, np.arange(0, most, MOST_COPIES)
            found = np.interp(wanted, np.append(0, copies), np.append(0, ends)).astype(np.int64)
            edges = np.union1d(edges, found[found < elements.nbytes] // itemsize * itemsize)
        if len(edges) == 1 or (trailer and trailer.is_crc32c):
            return [_Part(elements, segments, 0, elements.nbytes, most, trailer)]
        both = pairwise([*edges.tolist(), elements.nbytes])
        return [_Part(elements, segments, *each, min(most, MOST_COPIES), None) for each in both]

    def _segments(self, elements: Elements, itemsize: int) -> Segments:
        if isinstance(elements.content, Share):
            found = elements.content.segments(itemsize=itemsize)
            order = np.argsort(found.target, kind="stable")
            columns = found.tensor, found.start, found.stop, found.target
            return Segments(*(column[order] for column in columns))
        tensor = elements.content.tensor
        start = elements.start * ITEMSIZE[elements.dtype] // itemsize
        # Zeros past a tensor's end, as in the last chunk of a store, are no elements.
        stop = min(start + elements.nbytes // itemsize, self._tensors[tensor].numel)
        return Segments(*(np.array([value], dtype=np.int64) for value in (tensor, start, stop, 0)))

    def _region(self, part: "_Part") -> Region:
        elements = part.elements
        source_dtype, dtype = dtypes_of(elements, self._tensors)
        segments = clip(part.segments, part.start, part.stop, itemsize=ITEMSIZE[dtype])
        return replace(
            self._source.region_of(segments, source_dtype, dtype, part.stop - part.start),
            counts_overflow=bool(elements.name),
            trailer=part.trailer,
            codec=elements.codec,
            takes_crc32c=part.trailer is not None and part.trailer.is_crc32c,
            block_bytes=elements.block_bytes,
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a piece that becomes one region."""

    elements: Elements
    segments: Segments
    """Of the whole piece."""
    start: int
    stop: int
    """Bytes of the piece."""
    copies: int
    trailer: Trailer | None

    @property
    def nbytes(self) -> int:
        return self.stop - self.start + (self.trailer.nbytes if self.trailer else 0)


class _Runs:
    """Puts parts that follow each other into runs of about the same cost."""

    def __init__(self) -> None:
        self.nbytes = self.end = 0
        """Size of the parts; byte offset after the last."""
        self._found: list[tuple[int, list[Fixed | _Part]]] = []
        self._parts: list[Fixed | _Part] = []
        self._start = self._cost = 0

    def add(self, part: Fixed | _Part, units: int) -> None:
        self._parts.append(part)
        self.nbytes += part.nbytes
        self.end += part.nbytes
        self._cost += part.nbytes + units * _UNIT_COST
        # A run without bytes would begin where the next one does, and results are told by that.
        if self._cost >= SPAN_BYTES and self.end > self._start:
            self.skip(0)

    def skip(self, nbytes: int) -> None:
        """End the current run, and leave bytes out."""
        if self._parts:
            self._found.append((self._start, self._parts))
        self.end += nbytes
        self._start, self._cost, self._parts = self.end, 0, []

    def all(self) -> list[tuple[int, list[Fixed | _Part]]]:
        """Return byte offset and parts of each run; an empty file has one too."""
        self.skip(0)
        return self._found or [(0, [])]


def _late(trailer: Trailer, start: int, stop: int) -> Ending:
    places = np.cumsum([len(part) + 4 for part in trailer.parts[:-1]]) - 4
    return Ending(stop, trailer.serialize(0), [(place, start, stop) for place in places.tolist()])
