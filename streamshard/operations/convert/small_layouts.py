"""Joins the small files of a store: a worker writes many of them in one job."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Final

import numpy as np

from streamshard.engine.run.span_writer import FileBatch
from streamshard.engine.run.work import Fixed, Region
from streamshard.layout.cutting import Ints, Segments, Share
from streamshard.layout.memory_plan import MIN_WINDOW_BYTES, WINDOW_BYTES
from streamshard.model import ITEMSIZE, Whole
from streamshard.source.source import Source
from streamshard.transfer.file_layout import (
    MOST_COPIES,
    Divider,
    Elements,
    FileLayout,
    Layout,
    dtypes_of,
)

_SMALL_BYTES: Final = MIN_WINDOW_BYTES // 2
"""For larger files the bytes cost more than the calls of the system."""
_MOST_FILES: Final = 128
_MOST_BYTES: Final = 8 * WINDOW_BYTES
"""Of all files of a batch: small enough for all workers to get some."""


def together(
    layouts: Iterable[FileLayout], source: Source, most_bytes: int | None = None
) -> Iterator[Layout]:
    """Join small files that follow each other and are alike; yield the others as they are."""
    most_bytes = most_bytes or _MOST_BYTES
    joined, of, nbytes, copies = list[FileLayout](), _Like(None, 0, 0), 0, 0
    for layout in layouts:
        like = _like(layout, source)
        nbytes, copies = nbytes + like.nbytes, copies + like.copies
        is_full = nbytes > most_bytes or copies > MOST_COPIES or len(joined) == _MOST_FILES
        if joined and (is_full or like.kind != of.kind):
            yield SmallLayouts(joined, source)
            joined, nbytes, copies = [], like.nbytes, like.copies
        of = like
        if like.kind is None:
            yield layout
        else:
            joined.append(layout)
    if joined:
        yield SmallLayouts(joined, source)


@dataclass(frozen=True, slots=True)
class _Like:
    """What decides whether a file is written together with others."""

    kind: tuple[Any, ...] | None
    """The same for files that may be; None for a file that is written alone."""
    nbytes: int
    copies: int


def _like(layout: FileLayout, source: Source) -> _Like:
    alone = _Like(None, 0, 0)
    if len(layout.pieces) != 1 or layout.endings or layout.is_last or layout.mode is not None:
        return alone
    (piece,) = layout.pieces
    if piece.nbytes > _SMALL_BYTES:
        return alone
    if isinstance(piece, Fixed):
        return _Like((), piece.nbytes, 0)
    before, dtype = dtypes_of(piece, source.checkpoint.tensors)
    if not isinstance(piece.content, Whole) or before != dtype or piece.name:
        return alone
    numel = piece.nbytes // ITEMSIZE[dtype]
    copies = numel // int(source.cutting.piece_numel[piece.content.tensor]) + 2
    if copies > MOST_COPIES or piece.trailer is None or not piece.trailer.is_crc32c:
        return alone
    kind = dtype, piece.trailer, piece.codec, piece.block_bytes
    return _Like(kind, piece.nbytes, copies)


@dataclass(frozen=True, slots=True)
class SmallLayouts:
    """Small files of one piece each, which differ in paths, tensors and sizes alone."""

    layouts: Sequence[FileLayout]
    source: Source

    def divided(self, divider: Divider) -> FileBatch:
        first = self.layouts[0].pieces[0]
        trailer = first.trailer if isinstance(first, Elements) else None
        stops = list(accumulate(layout.pieces[0].nbytes for layout in self.layouts))
        return FileBatch(
            paths=[layout.path for layout in self.layouts],
            stops=stops,
            nbytes=stops[-1] + len(stops) * (trailer.nbytes if trailer else 0),
            make=partial(self._content, divider),
            takes=[layout.take for layout in self.layouts],
            singly=partial(map, divider.target, self.layouts),
        )

    def _content(self, divider: Divider) -> Sequence[Fixed] | Region:
        """Make the content of all files: that of chunks, one behind the other."""
        pieces = [layout.pieces[0] for layout in self.layouts]
        parts = [piece for piece in pieces if isinstance(piece, Elements)]
        if not parts:
            return [piece for piece in pieces if isinstance(piece, Fixed)]
        tensors = [part.content.tensor for part in parts if isinstance(part.content, Whole)]
        numels = [self.source.checkpoint.tensors[tensor].numel for tensor in tensors]
        columns = [tensors, [part.start for part in parts], [part.nbytes for part in parts], numels]
        found = partial(_segments, *(np.array(column) for column in columns))
        content = Share(np.array(tensors), parts[0].dtype, found, rank=0)
        nbytes = sum(part.nbytes for part in parts)
        (region,) = divider.regions(replace(parts[0], content=content, nbytes=nbytes))
        return region


def _segments(
    tensor: Ints, start: Ints, nbytes: Ints, numel: Ints, *, rank: int, itemsize: int
) -> Segments:
    """Return the segments of parts of tensors that lie one behind the other."""
    stop = np.minimum(start + nbytes // itemsize, numel)
    return Segments(tensor, start, stop, np.cumsum(nbytes) - nbytes)
