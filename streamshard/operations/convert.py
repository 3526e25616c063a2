"""`convert`: shards into chunked Zarr arrays that no longer know how many ranks there were."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import google_crc32c
import numpy as np

from streamshard.engine import memory
from streamshard.engine.checksums import ChunkChecksums, Crc32, crc32
from streamshard.engine.work import Fixed, Region, Span, TargetFile
from streamshard.errors import UsageError
from streamshard.formats import store_manifest, store_state, zarr_writer
from streamshard.formats.store_manifest import BLOCK_BYTES, FileRecord
from streamshard.formats.zarr_chunks import CHECKSUM_BYTES, BloscChunk, spell_checksum
from streamshard.formats.zarr_documents import (
    CODECS,
    MANIFEST_PATH,
    STATE_PATH,
    array_path,
    chunk_keys,
)
from streamshard.model import ITEMSIZE, Copies
from streamshard.operations import running
from streamshard.operations.report import Progress, Report, Silent
from streamshard.operations.source import Source, open_source
from streamshard.operations.target import (
    PartialTarget,
    require_free,
    require_separate,
    require_space,
)
from streamshard.plan.cutting import Segments, coalesce
from streamshard.plan.grid import chunk_counts, chunk_shape
from streamshard.plan.memory import MIB, MemoryPlan

DEFAULT_CHUNK_BYTES: Final = 64 * MIB


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk to be written."""

    path: str
    tensor: int
    start: int
    """First element."""
    stop: int
    """Element after the last; the chunk itself may reach past the tensor's end."""
    nbytes: int
    """Content, what lies past the tensor's end included."""


@dataclass(frozen=True, slots=True)
class ConvertPlan:
    """A conversion that fits memory and disk, ready to run."""

    source: Source
    target: Path
    codec: str
    chunk_shapes: Sequence[tuple[int, ...]]
    memory: MemoryPlan
    overwrite: bool
    report: Report
    """What running it will do."""
    _records: dict[str, FileRecord] = field(default_factory=dict)
    """What was written so far, for the manifest."""

    def run(self, progress: Progress | None = None) -> Report:
        """Write the store.

        Raises
        ------
        StreamshardError
            The source changed or the target cannot be written; no store is left then.
        """
        with PartialTarget(self.target, overwrite=self.overwrite) as partial_target:
            told = progress or Silent()

            def work() -> None:
                running.run(self.source, self._targets(), partial_target, self.memory, told)
                # Last, because it lists the checksums of everything else.
                manifest = small_array(
                    MANIFEST_PATH, store_manifest.spell(self._records, self.codec)
                )
                running.run(self.source, _fixed(manifest), partial_target, self.memory, told)
                partial_target.commit()

            return running.measured(self.report, told, work)

    def _targets(self) -> Iterator[TargetFile]:
        documents = store_documents(self.source, self.chunk_shapes, self.codec)
        self._records.update({path: record_of(data) for path, data in documents.items()})
        yield from _fixed(documents)
        for chunk in chunks(self.source, self.chunk_shapes):
            yield self._chunk_target(chunk)

    def _chunk_target(self, chunk: Chunk) -> TargetFile:
        dtype = self.source.checkpoint.tensors[chunk.tensor].dtype
        itemsize = ITEMSIZE[dtype]
        copies = self._copies(chunk, itemsize)
        if self.codec == "none":
            region = self._raw_region(chunk, copies)
        else:
            region = self._encoded_region(chunk, copies, itemsize)
        return TargetFile(chunk.path, [Span(0, [region])], sync_late=True)

    def _copies(self, chunk: Chunk, itemsize: int) -> Copies:
        one = np.array([chunk.tensor], dtype=np.int64)
        segments = Segments(one, np.array([chunk.start]), np.array([chunk.stop]), one * 0)
        found = self.source.cutting.locate(segments, target_itemsize=itemsize)
        return coalesce(found, itemsize=itemsize, target_itemsize=itemsize)

    def _raw_region(self, chunk: Chunk, copies: Copies) -> Region:
        sums = ChunkChecksums(BLOCK_BYTES)

        def trailer() -> bytes:
            size = chunk.nbytes + CHECKSUM_BYTES
            self._records[chunk.path] = FileRecord(size, sums.blocks.values())
            return spell_checksum(sums.crc32c.value)

        return Region(chunk.nbytes, copies, sums, trailer, CHECKSUM_BYTES)

    def _encoded_region(self, chunk: Chunk, copies: Copies, itemsize: int) -> Region:
        codec = BloscChunk(self.codec, itemsize)

        def encode(content: memoryview) -> bytes:
            stored = codec.encode(content)
            self._records[chunk.path] = record_of(stored)
            return stored

        return Region(chunk.nbytes, copies, Crc32(), encode=encode)


def plan_convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    codec: str = "none",
    chunk_size: int = DEFAULT_CHUNK_BYTES,
    source_ds_config_file: str | os.PathLike[str] | None = None,
    like: str | os.PathLike[str] | None = None,
    tag: str | None = None,
    memory_limit: int = running.DEFAULT_LIMIT_BYTES,
    workers: int | None = None,
    overwrite: bool = False,
) -> ConvertPlan:
    """Read the source's headers and plan a conversion; writes nothing.

    Parameters
    ----------
    source
        Run directory with `latest`, tag directory, or another store.
    target
        Store to make; by convention it ends in `.zarr`.
    codec
        `none`, `lz4` or `zstd`.
    chunk_size
        Bytes per chunk at most, before compression.
    source_ds_config_file, like
        For sources that do not tell all that is needed; see `plan_repartition`.
    memory_limit
        Bytes allowed above what the program itself occupies.

    Raises
    ------
    StreamshardError
        One of its subclasses, each with its own exit code; see `streamshard.errors`.
    """
    floor_bytes = memory.resident_bytes()
    memory.restart_peak()
    if codec not in CODECS:
        raise UsageError(f"--codec {codec}: choose one of {', '.join(CODECS)}")
    if chunk_size < 1:
        raise UsageError(f"--chunk-size {chunk_size}: at least one byte is needed")
    target = Path(target)
    require_free(target, overwrite=overwrite)
    opened = open_source(source, tag, ds_config_file=source_ds_config_file, like=like)
    require_separate(opened.path, opened.files, target)
    opened.require_use_of_like()
    tensors = opened.checkpoint.tensors
    shapes = [chunk_shape(t.shape, ITEMSIZE[t.dtype], chunk_size) for t in tensors]
    sizes = _sizes(opened, shapes, codec)
    both = zip(shapes, tensors, strict=True)
    largest = max((math.prod(s) * ITEMSIZE[t.dtype] for s, t in both), default=0)
    memory_plan = running.fit_memory(
        floor_bytes=floor_bytes,
        # While a chunk is compressed: its content, the result, that with its checksum behind, and
        # what the allocator keeps of the chunk before.
        codec_bytes=opened.codec_bytes + (0 if codec == "none" else 4 * largest + MIB),
        workers=workers,
        limit_bytes=memory_limit,
    )
    require_space(target, sum(sizes))
    report = Report(
        verb="convert",
        source=str(source),
        target=str(target),
        tag=opened.checkpoint.tag,
        zero_stage=opened.checkpoint.layout.stage,
        source_world_size=opened.checkpoint.layout.world_size,
        world_size=None,
        files=len(sizes),
        bytes_written=sum(sizes),
        floor_bytes=floor_bytes,
        limit_bytes=memory_limit,
        projected_bytes=memory_plan.projected_bytes,
        notes=opened.checkpoint.notes,
    )
    return ConvertPlan(opened, target, codec, shapes, memory_plan, overwrite, report)


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    codec: str = "none",
    chunk_size: int = DEFAULT_CHUNK_BYTES,
    source_ds_config_file: str | os.PathLike[str] | None = None,
    like: str | os.PathLike[str] | None = None,
    tag: str | None = None,
    memory_limit: int = running.DEFAULT_LIMIT_BYTES,
    workers: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Write a checkpoint's store; see `plan_convert`."""
    plan = plan_convert(
        source,
        target,
        codec=codec,
        chunk_size=chunk_size,
        source_ds_config_file=source_ds_config_file,
        like=like,
        tag=tag,
        memory_limit=memory_limit,
        workers=workers,
        overwrite=overwrite,
    )
    return plan.run(progress)


def chunks(source: Source, chunk_shapes: Sequence[tuple[int, ...]]) -> Iterator[Chunk]:
    """Yield the chunks of all tensors, in the order of their elements."""
    both = zip(source.checkpoint.tensors, chunk_shapes, strict=True)
    for index, (tensor, shape) in enumerate(both):
        step, itemsize = math.prod(shape), ITEMSIZE[tensor.dtype]
        path = array_path(tensor)
        for number, key in enumerate(chunk_keys(chunk_counts(tensor.shape, shape))):
            start = number * step
            stop = min(start + step, tensor.numel)
            yield Chunk(f"{path}/{key}", index, start, stop, step * itemsize)


def store_documents(
    source: Source, chunk_shapes: Sequence[tuple[int, ...]], codec: str
) -> dict[str, bytes]:
    """Spell all files of a store that are not a tensor's chunks, but for the manifest."""
    state = store_state.dump(source.checkpoint, chunk_shapes)
    documents = zarr_writer.documents(source.checkpoint, chunk_shapes, codec)
    return {**documents, **small_array(STATE_PATH, state)}


def small_array(path: str, data: bytes) -> dict[str, bytes]:
    """Spell an array of raw bytes: its document and its only chunk, by path."""
    return {
        f"{path}/zarr.json": zarr_writer.small_array_document(len(data)),
        f"{path}/c/0": data + spell_checksum(google_crc32c.value(data)),
    }


def record_of(data: bytes) -> FileRecord:
    """Record a file whose bytes are at hand."""
    return FileRecord(len(data), np.array([crc32(data)], dtype=np.uint32))


def _fixed(files: Mapping[str, bytes]) -> Iterator[TargetFile]:
    for path, data in files.items():
        yield TargetFile(path, [Span(0, [Fixed(data)])], sync_late=True)


def _sizes(source: Source, chunk_shapes: Sequence[tuple[int, ...]], codec: str) -> list[int]:
    """Work out the size of every file; exact without compression, else an upper bound."""
    documents = store_documents(source, chunk_shapes, codec)
    records = {path: record_of(data) for path, data in documents.items()}
    for chunk in chunks(source, chunk_shapes):
        blocks = -(-chunk.nbytes // BLOCK_BYTES) if codec == "none" else 1
        # Blosc stores what does not shrink, with a header.
        extra = CHECKSUM_BYTES if codec == "none" else CHECKSUM_BYTES + 16
        records[chunk.path] = FileRecord(chunk.nbytes + extra, np.zeros(blocks, dtype=np.uint32))
    manifest = small_array(MANIFEST_PATH, store_manifest.spell(records, codec))
    return [*(record.nbytes for record in records.values()), *map(len, manifest.values())]
