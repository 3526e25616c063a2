"""Turns serialized torch files into work: each storage becomes regions with their copies."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from streamshard.engine.numeric.cast import cast_between
from streamshard.engine.run.work import Fixed, Region, Span, TargetFile, Trailer
from streamshard.formats.deepspeed.write.zero_writer import FileImage
from streamshard.formats.torch.torch_tensor import Storage
from streamshard.layout.cutting import (
    Segments,
    Share,
    clip,
    coalesce,
    whole_segment,
)
from streamshard.model import (
    BLOB,
    FILE,
    ITEMSIZE,
    Copies,
    Literal,
    Whole,
)
from streamshard.operations.native import torch_records
from streamshard.operations.source.source import Source

_SPAN_BYTES: Final = 256 << 20
"""Workers get large files in spans of about this size, a multiple of any dtype's item size."""


class NativeFiles:
    """Fills the files of a target from a source."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._tensors = source.checkpoint.tensors

    def torch_target(self, image: FileImage) -> TargetFile:
        """Return the target of one serialized file."""
        layout = image.lay_out()
        spans, late = _StorageSpans(), []
        for record in layout.records:
            storage, content = record.content, torch_records.content_of(record)
            if isinstance(content, Literal):
                spans.add(torch_records.literal_record(record, content))
                continue
            if content is None or not isinstance(storage, Storage):
                raise TypeError(f"record {record.name} has nothing to fill it")
            spans.add(Fixed(record.header()))
            is_small = storage.nbytes <= _SPAN_BYTES
            trailer = torch_records.trailer_of(record) if is_small else None
            end = spans.add_all(self.regions(storage, content, image, trailer))
            if end < record.end:
                late.append(torch_records.late_descriptor(record))
                spans.skip_to(record.end)
        return TargetFile(image.path, spans.all(), [*late, torch_records.zip_ending(layout)])

    def other_targets(self, paths: Mapping[str, str]) -> Iterator[TargetFile]:
        """Yield the targets of the sidecars; `paths` maps each name to the path in the target."""
        modes = {file.path: file.mode for file in self._source.checkpoint.files}
        for index, tensor in enumerate(self._tensors):
            if tensor.state == FILE and tensor.name in paths:
                spans = _StorageSpans()
                for start, stop in _pieces(tensor.nbytes):
                    spans.add(self._source.region(index, start, stop))
                yield TargetFile(paths[tensor.name], spans.all(), mode=modes[tensor.name])

    def regions(
        self,
        storage: Storage,
        content: Whole | Share,
        image: FileImage,
        trailer: Trailer | None = None,
    ) -> Iterator[Region]:
        """Yield the regions of a storage, in order; a single region may have a trailer."""
        source_dtype, target_dtype = self._dtypes(storage, content)
        source_itemsize, target_itemsize = ITEMSIZE[source_dtype], ITEMSIZE[target_dtype]
        if isinstance(content, Share):
            segments = content.segments(image.rank, itemsize=target_itemsize)
        else:
            segments = whole_segment(content.tensor, self._tensors[content.tensor].numel)
        for start, stop in _pieces(storage.nbytes):
            piece = clip(segments, start, stop, itemsize=target_itemsize)
            yield Region(
                content_bytes=stop - start,
                copies=self._copies(piece, source_itemsize, target_itemsize),
                source_itemsize=source_itemsize,
                target_itemsize=target_itemsize,
                cast=cast_between(source_dtype, target_dtype),
                trailer=trailer,
            )

    def _dtypes(self, storage: Storage, content: Whole | Share) -> tuple[str, str]:
        """Return the dtypes of a storage's elements in the source and in the target."""
        if isinstance(content, Share):
            return content.dtype, storage.dtype
        tensor = self._tensors[content.tensor]
        # A blob is bytes, whatever dtype its storage has.
        return tensor.dtype, tensor.dtype if tensor.state == BLOB else storage.dtype

    def _copies(self, segments: Segments, source_itemsize: int, target_itemsize: int) -> Copies:
        copies = self._source.cutting.locate(segments, target_itemsize=target_itemsize)
        return coalesce(copies, itemsize=source_itemsize, target_itemsize=target_itemsize)


class _StorageSpans:
    """Divides the consecutive parts of a file into spans of about the same size."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._parts: list[Fixed | Region] = []
        self._start = self._end = 0

    def add(self, part: Fixed | Region) -> None:
        """Add the next part."""
        self._parts.append(part)
        self._end += part.nbytes
        if self._end - self._start >= _SPAN_BYTES:
            self.skip_to(self._end)

    def add_all(self, parts: Iterable[Fixed | Region]) -> int:
        """Add the next parts, and return the byte offset after them."""
        for part in parts:
            self.add(part)
        return self._end

    def skip_to(self, offset: int) -> None:
        """End the current span, and begin one at an offset; bytes in between are in no span."""
        if self._parts:
            self._spans.append(Span(self._start, self._parts))
        self._start, self._end, self._parts = offset, offset, []

    def all(self) -> list[Span]:
        """Return all spans; an empty file has one span too."""
        self.skip_to(self._end)
        return self._spans or [Span(0, [])]


def _pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    """Cut a count of bytes into pieces (start, stop); zero bytes are one piece."""
    for start in range(0, max(nbytes, 1), _SPAN_BYTES):
        yield start, min(start + _SPAN_BYTES, nbytes)
