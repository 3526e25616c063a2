"""Turns weights into the files of an export, each filled span by span from a source."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath
from typing import Final

import numpy as np

from streamshard.engine.run.work import Fixed, Region, Span, SpanResult, TargetFile
from streamshard.formats import pretrained, safetensors_file
from streamshard.formats.safetensors_file import Described, SafetensorsLayout
from streamshard.formats.torch import torch_file
from streamshard.formats.torch.torch_file import Record, TorchLayout
from streamshard.formats.torch.torch_tensor import Storage, make_tensor
from streamshard.layout.memory_plan import MIB
from streamshard.model import ITEMSIZE, Literal, Whole
from streamshard.operations.export.lazy_spans import (
    SPAN_BYTES,
    LazySpans,
    overflowed_regions,
    runs_of,
)
from streamshard.operations.export.weights import Weight
from streamshard.operations.native import torch_records
from streamshard.operations.source.source import Source
from streamshard.operations.transfer.byte_accounting import ByteCounts

_MOST_COPIES: Final = 1024
"""Most copies in a span; a record of a torch file is never cut, so it may have more."""
_COPY_COST: Final = SPAN_BYTES // _MOST_COPIES
"""Bytes that a copy counts as."""
_SPAN_OBJECT_BYTES: Final = MIB // 2
"""Memory for a span's regions, which are at most a third as many as its copies."""
_WEIGHT_BYTES: Final = 512
"""Memory for the notes on each weight of the file that is being written."""
_COPY_BYTES: Final = 4 * 8
_LOCATE_BYTES: Final = 16 * 8
"""Temporary arrays for locating a copy."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements of a weight, and where in the file they begin."""

    weight: Weight
    start: int
    stop: int
    offset: int


class WeightFiles:
    """Divides weights among files of a limited size, and fills the files from a source."""

    def __init__(
        self, source: Source, weights: Sequence[Weight], form: str, most_bytes: int
    ) -> None:
        self._source = source
        self.form = form
        """`safetensors` or `torch`."""
        ranges = shards([weight.nbytes for weight in weights], most_bytes)
        paths = pretrained.weight_files(form, len(ranges))
        self._held = {p: [weights[i] for i in r] for p, r in zip(paths, ranges, strict=True)}
        self.overflowed: dict[str, int] = {}
        """Tensor → count of its finite elements that the cast made infinite, if there are any."""

    @property
    def held(self) -> Mapping[str, Sequence[Weight]]:
        """Return file → the weights in it."""
        return self._held

    def documents(self) -> dict[str, bytes]:
        """Serialize the index, if there are several files: it is known without reading tensors."""
        if len(self._held) == 1:
            return {}
        where = {
            name: path
            for path, weights in self._held.items()
            for weight in weights
            for name in self.names(weight)
        }
        total_bytes = sum(w.nbytes for weights in self._held.values() for w in weights)
        return {pretrained.index_file(self.form): pretrained.index(where, total_bytes)}

    def names(self, weight: Weight) -> Sequence[str]:
        """Return the names under which a weight is stored: in torch files all, else the first."""
        return weight.names if self.form == pretrained.TORCH else weight.names[:1]

    def sizes(self) -> dict[str, int]:
        """Compute the size of every file by its path."""
        documents = {path: len(data) for path, data in self.documents().items()}
        return {path: self._lay_out(path).nbytes for path in self._held} | documents

    def byte_counts(self) -> ByteCounts:
        """Count the bytes that are written, and how often each tensor is read."""
        tensors = self._source.checkpoint.tensors
        times, cast_bytes = np.zeros(len(tensors), dtype=np.int64), 0
        for weight in (weight for weights in self._held.values() for weight in weights):
            times[weight.tensor] += 1
            if weight.dtype != tensors[weight.tensor].dtype:
                cast_bytes += weight.nbytes
        return ByteCounts(self.sizes(), times, cast_bytes)

    def copies_bytes(self, workers: int) -> int:
        """Return an upper bound of the memory for the spans in flight and for locating copies."""
        most = 2 * _MOST_COPIES
        if self.form == pretrained.TORCH:
            all_weights = (weight for weights in self._held.values() for weight in weights)
            most += max(w.numel // self._piece_numel(w) for w in all_weights)
        in_flight = (2 * workers + 2) * (_SPAN_OBJECT_BYTES + most * _COPY_BYTES)
        noted = max(map(len, self._held.values())) * _WEIGHT_BYTES
        return in_flight + most * _LOCATE_BYTES + noted

    def targets(self) -> Iterator[TargetFile]:
        """Yield the targets of all files."""
        for path, data in self.documents().items():
            yield TargetFile(path, [Span(0, [Fixed(data)])])
        for path in self._held:
            layout = self._lay_out(path)
            if isinstance(layout, SafetensorsLayout):
                yield self._safetensors_target(path, layout)
            else:
                yield self._torch_target(path, layout)

    def _lay_out(self, path: str) -> SafetensorsLayout | TorchLayout:
        weights = self._held[path]
        if self.form == pretrained.TORCH:
            storages = [Storage(w.dtype, w.numel, Whole(n)) for n, w in enumerate(weights)]
            both = list(zip(weights, storages, strict=True))
            state = {name: make_tensor(s, w.shape) for w, s in both for name in w.names}
            return torch_file.lay_out(torch_file.serialize(state), PurePosixPath(path).stem)
        return safetensors_file.lay_out(Described(w.names[0], w.dtype, w.shape) for w in weights)

    def _safetensors_target(self, path: str, layout: SafetensorsLayout) -> TargetFile:
        weights = {weight.names[0]: weight for weight in self._held[path]}
        pieces = [
            piece
            for stored in layout.tensors
            for piece in self._pieces(weights[stored.tensor.name], stored.offset)
        ]
        makers: list[Callable[[], Span]] = [lambda: Span(0, [Fixed(layout.header)])]
        makers += [
            partial(self._span, run) for run in runs_of(pieces, lambda p: self._cost(p), SPAN_BYTES)
        ]

        def take(result: SpanResult) -> None:
            for offset, count in overflowed_regions(result):
                piece = pieces[bisect_right(pieces, offset, key=lambda piece: piece.offset) - 1]
                self._note_overflow(piece.weight, count)

        return TargetFile(path, LazySpans(makers), take=take)

    def _pieces(self, weight: Weight, offset: int) -> Iterator[_Piece]:
        """Cut a weight into pieces, each of which one worker writes."""
        itemsize = ITEMSIZE[weight.dtype]
        step = min(SPAN_BYTES // itemsize, _MOST_COPIES * self._piece_numel(weight))
        for start in range(0, weight.numel, step):
            stop = min(start + step, weight.numel)
            yield _Piece(weight, start, stop, offset + start * itemsize)

    def _cost(self, piece: _Piece) -> int:
        """Return the cost of a piece: its bytes, and the copies that fill it."""
        numel = piece.stop - piece.start
        copies = numel // self._piece_numel(piece.weight) + 2
        return numel * ITEMSIZE[piece.weight.dtype] + copies * _COPY_COST

    def _piece_numel(self, weight: Weight) -> int:
        """Return how many elements lie in one piece of the source, at most."""
        return int(self._source.cutting.piece_numel[weight.tensor])

    def _span(self, run: Sequence[_Piece]) -> Span:
        return Span(run[0].offset, [self._region(piece) for piece in run])

    def _region(self, piece: _Piece) -> Region:
        weight = piece.weight
        region = self._source.region(weight.tensor, piece.start, piece.stop, weight.dtype)
        return replace(region, counts_overflow=True)

    def _note_overflow(self, weight: Weight, count: int) -> None:
        name = weight.names[0]
        self.overflowed[name] = self.overflowed.get(name, 0) + count

    def _torch_target(self, path: str, layout: TorchLayout) -> TargetFile:
        weights = self._held[path]
        records = layout.records
        runs = runs_of(records, lambda record: record.nbytes + 2 * _COPY_COST, SPAN_BYTES)

        def take(result: SpanResult) -> None:
            for offset, count in overflowed_regions(result):
                record = records[bisect_right(records, offset, key=lambda one: one.start) - 1]
                self._note_overflow(_weight_of(record, weights), count)

        spans = LazySpans([partial(self._torch_span, weights, run) for run in runs])
        return TargetFile(path, spans, [torch_records.zip_ending(layout)], take=take)

    def _torch_span(self, weights: Sequence[Weight], run: Sequence[Record]) -> Span:
        parts: list[Fixed | Region] = []
        for record in run:
            if isinstance(record.content, Literal):
                parts.append(torch_records.literal_record(record, record.content))
                continue
            weight = _weight_of(record, weights)
            region = self._region(_Piece(weight, 0, weight.numel, 0))
            trailer = torch_records.trailer_of(record)
            parts += [Fixed(record.header()), replace(region, trailer=trailer)]
        return Span(run[0].start, parts)


def _weight_of(record: Record, weights: Sequence[Weight]) -> Weight:
    """Return the weight that fills a record."""
    content = torch_records.content_of(record)
    if not isinstance(content, Whole):
        raise TypeError(f"record {record.name} has nothing to fill it")
    return weights[content.tensor]


def shards(sizes: Sequence[int], most_bytes: int) -> list[range]:
    """Distribute tensors of these sizes, in order, among files of at most `most_bytes`.

    A larger tensor gets a file of its own. Without tensors there is one empty file.

    >>> shards([3, 3, 1, 9, 1], 6)
    [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]
    """
    found, first, held = [], 0, 0
    for index, nbytes in enumerate(sizes):
        if index > first and held + nbytes > most_bytes:
            found.append(range(first, index))
            first, held = index, 0
        held += nbytes
    return [*found, range(first, len(sizes))]
