"""Turns a checkpoint into the files of a store: each chunk becomes a region with its copies."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from streamshard.checksums import crc32, crc32c
from streamshard.engine.numeric import digests
from streamshard.engine.run.phases import Progress
from streamshard.engine.run.span_writer import FileBatch
from streamshard.engine.run.work import Fixed, Region, SpanResult, Trailer, ignore
from streamshard.errors import Option, UnsupportedError
from streamshard.formats.pickle.node_checks import of_file
from streamshard.formats.torch.zip_layout import ALIGNMENT
from streamshard.formats.zarr import store_manifest, store_state
from streamshard.formats.zarr.array_paths import ROOT_DOCUMENT, array_path
from streamshard.formats.zarr.chunks import (
    CHECKSUM_BYTES,
    BloscCodec,
    most_encoded_bytes,
    serialize_checksum,
)
from streamshard.formats.zarr.documents import (
    LIMIT_BYTES,
    MANIFEST_PATH,
    STATE_PATH,
    small_array_document,
    store_documents,
)
from streamshard.formats.zarr.store_index import (
    MANIFEST_FILES,
    STATE_FILES,
    StoredArray,
    StoredChunk,
    stored_arrays,
)
from streamshard.formats.zarr.store_manifest import BLOCK_BYTES, FileRecord, Manifest, is_measured
from streamshard.health import TensorHealth
from streamshard.io.changes import link_or_copy
from streamshard.io.files import target_errors
from streamshard.io.object_path import is_object
from streamshard.layout.cutting import Ints, Segments, Share
from streamshard.layout.memory_plan import MIN_WINDOW_BYTES, WINDOW_BYTES, MemoryPlan
from streamshard.layout.zero import ceil_div
from streamshard.model import BLOB, FILE, ITEMSIZE, Digest, LogicalTensor, Whole
from streamshard.registry import READ_BACK, load
from streamshard.source.source import Request, Source
from streamshard.transfer.byte_accounting import ByteCounts
from streamshard.transfer.file_layout import (
    MOST_COPIES,
    Divider,
    Elements,
    FileLayout,
    Layout,
    dtypes_of,
    fixed_files,
)
from streamshard.transfer.report import Report
from streamshard.transfer.target import partial_of
from streamshard.transfer.target_writer import Pass, TargetWriter

_TRAILER: Final = Trailer(is_crc32c=True)
_MOST_SAMPLES: Final = 8
"""Chunks that are compared to tell a store from another one."""
_SMALL_BYTES: Final = MIN_WINDOW_BYTES // 2
"""For larger files the bytes cost more than the calls of the system."""
_MOST_FILES: Final = 128
_MOST_BYTES: Final = 8 * WINDOW_BYTES
"""Of all files of a batch: small enough for all workers to get some."""


class StoreTargets(TargetWriter):
    """Fills the files of a store from a source, and keeps the manifest's records of them."""

    def __init__(
        self,
        source: Source,
        chunk_shapes: Sequence[tuple[int, ...]],
        codec: str,
        measure: Callable[[], Mapping[str, TensorHealth]] | None = None,
    ) -> None:
        self._source = source
        self._measure = measure
        """Reads the source to measure its tensors; None if that is not wanted."""
        self._chunk_shapes = chunk_shapes
        self._codec = codec
        self._records: dict[str, FileRecord] = {}
        """Path → record of each file that was written so far."""
        self._digests: dict[tuple[int, int], Digest] = {}
        """(tensor, first element) → digest of the content of each chunk written so far."""
        self._root = b""
        """Document of the root, by which readers know a store."""
        self.nbytes: int | None = None
        """Size of all files after they are written; None before, or if an earlier run wrote them
        all."""

    @property
    def encode(self) -> Callable[[memoryview], bytes] | None:
        """The function that compresses a chunk of four-byte elements; None without a codec."""
        return None if self._codec == "none" else BloscCodec(4).encode

    def content(self) -> Iterator[FileLayout]:
        """Yield the layouts of all files except the manifest and the root's document."""
        documents = self._documents()
        self._records.update({path: _record_of(data) for path, data in documents.items()})
        self._root = documents.pop(ROOT_DOCUMENT)
        yield from fixed_files(documents)
        for tensor, chunk in self._chunks():
            yield self._chunk_layout(tensor, chunk)

    def byte_counts(self) -> ByteCounts:
        """Count the bytes that are written; an upper bound if the store is compressed.

        Memory for copies is not counted: a file is one chunk, with few of them.
        """
        counts = ByteCounts(self._source)
        with of_file(self._source.path):
            counts.sizes.update(self._sizes())
        counts.times += 1
        return counts

    def passes(self) -> Sequence[Pass]:
        """Return two passes: the manifest lists the checksums of everything else."""
        return [lambda: together(self.content(), self._source), self.manifest]

    def beginnings(self) -> Iterator[FileLayout]:
        """Lay out the root, the training state, and some chunks, with the document of each."""
        documents, chunks = self._documents(), list(self._chunks())
        samples = chunks[:: -(-len(chunks) // _MOST_SAMPLES) or 1]
        tensors = self._source.checkpoint.tensors
        arrays = [f"{array_path(tensors[number])}/zarr.json" for number, _ in samples]
        paths = ROOT_DOCUMENT, STATE_FILES[1], *arrays
        yield from fixed_files({path: documents[path] for path in paths})
        for tensor, chunk in samples:
            yield replace(self._chunk_layout(tensor, chunk), take=ignore)

    def differences(self, place: Path, memory: MemoryPlan, progress: Progress) -> list[str]:
        differences: list[str] = load(READ_BACK)(Request(place), self._source, memory, progress)
        return differences

    def finish(self, report: Report, overflowed: Mapping[str, int]) -> Report:
        return replace(report, bytes_written=self.nbytes or report.bytes_written)

    def _sizes(self) -> dict[str, int]:
        store_state.require_readable(self._state)
        records = self._most_records()
        tensors = self._source.checkpoint.tensors
        tensor_digests = {array_path(tensor): digests.EMPTY.text for tensor in tensors}
        health = None
        if self._measure is not None:
            nothing = TensorHealth(0, 0, 0, 0, 0.0, 0.0)
            health = {array_path(tensor): nothing for tensor in tensors if is_measured(tensor)}
        manifest = store_manifest.serialize(records, self._codec, tensor_digests, health)
        small = _small_array(MANIFEST_PATH, manifest)
        sizes = {path: record.nbytes for path, record in records.items()}
        sizes |= {path: len(data) for path, data in small.items()}
        for path in (MANIFEST_FILES[1], STATE_FILES[1]):
            if sizes[path] > LIMIT_BYTES:
                message = f"{path} of its store would have {sizes[path]:,} bytes, and"
                message = f"{message} {LIMIT_BYTES:,} is most that is read"
                raise UnsupportedError(f"{message}; use a larger {Option('chunk_size')}")
        return sizes

    def _most_records(self) -> dict[str, FileRecord]:
        """Return a record of each file in the manifest, of the size that the file has at most.

        The manifest is as long whatever the checksums are.
        """
        documents, is_raw = self._documents(), self._codec == "none"
        records = {path: FileRecord(len(data), _zeros(1)) for path, data in documents.items()}
        for _, chunk in self._chunks():
            blocks = -(-chunk.nbytes // BLOCK_BYTES) if is_raw else 1
            most_bytes = chunk.nbytes if is_raw else most_encoded_bytes(chunk.nbytes)
            records[chunk.path] = FileRecord(most_bytes + CHECKSUM_BYTES, _zeros(blocks))
        return records

    def manifest(self) -> Iterator[FileLayout]:
        yield from fixed_files(self._manifest())
        yield from fixed_files({ROOT_DOCUMENT: self._root}, is_last=True)

    def _manifest(self) -> dict[str, bytes]:
        # Sorted, because workers and continued runs record the files in any order.
        manifest = store_manifest.serialize(
            dict(sorted(self._records.items())),
            self._codec,
            self._tensor_digests(),
            None if self._measure is None else self._measure(),
        )
        small = _small_array(MANIFEST_PATH, manifest)
        if self._records:
            written = (record.nbytes for record in self._records.values())
            self.nbytes = sum(written) + sum(map(len, small.values()))
        return small

    def _tensor_digests(self) -> Mapping[str, str]:
        pieces: dict[int, list[Digest]] = {}
        for tensor, start in sorted(self._digests):
            pieces.setdefault(tensor, []).append(self._digests[tensor, start])
        return {
            array_path(tensor): digests.joined(pieces.get(index, ())).text
            for index, tensor in enumerate(self._source.checkpoint.tensors)
        }

    def _documents(self) -> dict[str, bytes]:
        """Serialize all files of a store except tensors' chunks and the manifest."""
        found = store_documents(self._source.checkpoint, self._chunk_shapes, self._codec)
        return {**found, **_small_array(STATE_PATH, self._state)}

    @cached_property
    def _state(self) -> bytes:
        return store_state.dump(self._source.checkpoint, self._chunk_shapes)

    def _chunks(self) -> Iterator[tuple[int, StoredChunk]]:
        arrays = stored_arrays(self._source.checkpoint, self._chunk_shapes)
        for number, array in enumerate(arrays):
            for chunk in array.chunks():
                yield number, chunk

    def _chunk_layout(self, tensor: int, chunk: StoredChunk) -> FileLayout:
        dtype, is_raw = self._source.checkpoint.tensors[tensor].dtype, self._codec == "none"
        elements = Elements(
            Whole(tensor),
            chunk.nbytes,  # zeros past the tensor's end are stored too
            dtype,
            chunk.start,
            _TRAILER,
            codec=None if is_raw else BloscCodec(ITEMSIZE[dtype]),
            block_bytes=BLOCK_BYTES if is_raw else 0,
        )
        return FileLayout(chunk.path, [elements], take=partial(self._take, tensor, chunk))

    def _take(self, tensor: int, chunk: StoredChunk, result: SpanResult) -> None:
        """Note a chunk, and the digest of its elements without the zeros past the tensor's end."""
        region, written = result.regions[0], result.written
        crc32s = np.array(region.blocks or [written.crc32], dtype=np.uint32)
        self._records[chunk.path] = FileRecord(written.nbytes, crc32s)
        itemsize = ITEMSIZE[self._source.checkpoint.tensors[tensor].dtype]
        past_end = chunk.nbytes - (chunk.stop - chunk.start) * itemsize
        found = region.content
        self._digests[tensor, chunk.start] = (
            digests.without_zeros(found, past_end) if past_end else found
        )


@dataclass(frozen=True, slots=True)
class KeptArrays:
    """The arrays of a store's tensors that another store has, with the same files."""

    arrays: Sequence[StoredArray]
    manifest: Manifest
    """Manifest of the other store."""

    def records(self) -> dict[str, FileRecord]:
        records = self.manifest.records
        return {path: records[path] for array in self.arrays for path in array.paths()}


class LinkedTargets(StoreTargets):
    """Links the files of all tensors to those of another store, and writes the few others.

    Objects have no links, so they are copied.
    """

    encode = None

    def __init__(self, target: Path, kept: KeptArrays, *planned: Any) -> None:  # noqa: ANN401
        super().__init__(*planned)
        digests = kept.manifest.digests
        self._target = target
        self._kept = kept.records()
        self._kept_digests = {array.path: digests[array.path] for array in kept.arrays}

    def content(self) -> Iterator[FileLayout]:
        self._link()
        yield from (layout for layout in super().content() if layout.path not in self._kept)
        self._records.update(self._kept)

    def _link(self) -> None:
        is_far, full = is_object(self._target), self._source.path
        place = self._target if is_far else partial_of(self._target)

        def link(path: str) -> None:
            link_or_copy(full / path, place / path)

        with target_errors(place):
            if is_far:
                from streamshard.io.objects.buckets import for_each  # not at the top: for buckets

                for_each(self._kept, link)
            else:
                for path in self._kept:
                    link(path)

    def byte_counts(self) -> ByteCounts:
        """Count the bytes that are written: links take no room."""
        counts = super().byte_counts()
        if not is_object(self._target):
            for path in self._kept:
                del counts.sizes[path]
        return counts

    def _most_records(self) -> dict[str, FileRecord]:
        return super()._most_records() | self._kept

    def _tensor_digests(self) -> Mapping[str, str]:
        return self._kept_digests


@cache
def _zeros(count: int) -> NDArray[np.uint32]:
    return np.zeros(count, dtype=np.uint32)


def _small_array(path: str, data: bytes) -> dict[str, bytes]:
    """Serialize an array of raw bytes: its document and its only chunk, by path."""
    return {
        f"{path}/zarr.json": small_array_document(len(data)),
        f"{path}/c/0": data + serialize_checksum(crc32c(data)),
    }


def _record_of(data: bytes) -> FileRecord:
    return FileRecord(len(data), np.array([crc32(data)], dtype=np.uint32))


def chunk_of(tensor: LogicalTensor, chunk_bytes: int) -> tuple[int, ...]:
    """Choose the chunk shape of a tensor; a file's raw bytes are cut where no element of it is."""
    whole = chunk_shape(tensor.shape, ITEMSIZE[tensor.dtype], chunk_bytes)
    if tensor.state not in (BLOB, FILE) or whole == tensor.shape or len(whole) != 1:
        return whole
    blocks = (ceil_div(tensor.numel, ALIGNMENT),)
    (count,) = chunk_shape(blocks, ALIGNMENT, chunk_bytes)
    return (min(count * ALIGNMENT, tensor.numel),) if tensor.numel else whole


def chunk_shape(shape: tuple[int, ...], itemsize: int, chunk_bytes: int) -> tuple[int, ...]:
    """Choose a chunk shape of at most `chunk_bytes` that cuts along the leading dimension.

    Chunks get nearly equal numbers of rows, so that the last chunk, which Zarr stores in full,
    needs little padding. If a single row is larger than `chunk_bytes`, the row is cut by a divisor
    of its length, so that every chunk is still one range of equal length.

    >>> chunk_shape((10, 4), 4, 64)
    (4, 4)
    >>> chunk_shape((3, 10), 4, 20)
    (1, 5)
    >>> chunk_shape((), 4, 64), chunk_shape((0, 3), 4, 64)
    ((), (1, 3))
    """
    if 0 in shape:
        return tuple(max(1, length) for length in shape)
    budget = max(1, chunk_bytes // itemsize)
    for axis, length in enumerate(shape):
        row = math.prod(shape[axis + 1 :])
        if row > budget and axis < len(shape) - 1:
            continue
        wanted = max(1, budget // row)
        rows = ceil_div(length, ceil_div(length, wanted)) if axis == 0 else _divisor(length, wanted)
        return (*(1,) * axis, rows, *shape[axis + 1 :])
    return ()


def _divisor(length: int, at_most: int) -> int:
    divisor = 1
    for small in range(1, math.isqrt(length) + 1):
        if length % small == 0:
            divisor = max([divisor, *(d for d in (small, length // small) if d <= at_most)])
    return divisor


def together(
    layouts: Iterable[FileLayout], source: Source, most_bytes: int | None = None
) -> Iterator[Layout]:
    """Join small files that follow each other and are alike; yield the others as they are."""
    joined, of, nbytes, copies = list[FileLayout](), _Like(None, 0, 0), 0, 0
    for layout in layouts:
        like = _like(layout, source)
        nbytes, copies = nbytes + like.nbytes, copies + like.copies
        is_full = copies > MOST_COPIES or len(joined) == _MOST_FILES
        if joined and (is_full or nbytes > (most_bytes or _MOST_BYTES) or like.kind != of.kind):
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
        """Make the content of all files: that of chunks, one after the other."""
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
    """Return the segments of parts of tensors that lie one after the other."""
    stop = np.minimum(start + nbytes // itemsize, numel)
    return Segments(tensor, start, stop, np.cumsum(nbytes) - nbytes)
