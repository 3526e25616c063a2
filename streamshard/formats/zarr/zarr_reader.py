"""Opens a store: its training state, its manifest, and the chunk files of each logical tensor."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from streamshard.defaults import CODECS
from streamshard.errors import (
    CorruptFileError,
    IntegrityError,
    SourceError,
    SourceNotFoundError,
    UnsupportedError,
)
from streamshard.formats import strict_json
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.pickle.inert import show
from streamshard.formats.pickle.node_checks import of_file
from streamshard.formats.zarr import store_manifest, store_state
from streamshard.formats.zarr.chunks import CHECKSUM_BYTES, BloscChunk, EncodedChunk
from streamshard.formats.zarr.documents import (
    MANIFEST_PATH,
    ROOT_DOCUMENT,
    ROOT_KEY,
    STATE_PATH,
    array_path,
    chunk_counts,
    chunk_keys,
)
from streamshard.formats.zarr.rewritten_array import RewrittenArray, RewrittenPiece
from streamshard.formats.zarr.rewritten_documents import find_rewritten, read_small_array
from streamshard.formats.zarr.store_manifest import Manifest
from streamshard.formats.zarr.store_paths import read_small, require_inside
from streamshard.io.entries import examine
from streamshard.layout.cutting import Cutting, CuttingBuilder
from streamshard.model import ITEMSIZE, BlockDigests, Slot, SourceFile

ChunkDecoder = BlockDigests | EncodedChunk | RewrittenPiece


@dataclass(frozen=True, slots=True)
class Store:
    """An opened store."""

    checkpoint: Checkpoint
    cutting: Cutting
    files: tuple[SourceFile, ...]
    decoders: dict[int, ChunkDecoder]
    codec_bytes: int
    rewritten: tuple[str, ...]
    """Paths of the arrays that another tool rewrote."""


def read(root: Path) -> Store:
    """Open a store."""
    for path in (ROOT_DOCUMENT, f"{MANIFEST_PATH}/c/0", f"{STATE_PATH}/c/0"):
        require_inside(root / path, root)
    _require_version(root)
    with of_file(root):
        manifest = store_manifest.read(read_small_array(root, MANIFEST_PATH))
        checkpoint, chunk_shapes = store_state.load(read_small_array(root, STATE_PATH, manifest))
    if _version(root) != store_state.version_of(checkpoint):
        message = f"says format {show(_version(root))}, and the training"
        raise CorruptFileError(
            f"{message} state is of {store_state.version_of(checkpoint)}", path=root / ROOT_DOCUMENT
        )
    if manifest.codec not in CODECS:
        message = f"compressed with {show(manifest.codec)}, which is not known"
        raise UnsupportedError(message, path=root)
    return _StoreReader(root, checkpoint, manifest).open(chunk_shapes)


def is_store(root: Path) -> bool:
    """Tell whether a Zarr hierarchy is one of streamshard's stores, of any version."""
    return _version(root) is not None


def is_of_known_version(root: Path) -> bool:
    """Tell whether a store's recorded version can be read here."""
    return _version(root) in store_state.VERSIONS


def _version(root: Path) -> object:
    try:
        document: Any = strict_json.parse(read_small(root / "zarr.json"))
        found: object = document["attributes"][ROOT_KEY]["format_version"]
    except (KeyError, TypeError, ValueError):
        return None
    return found


def _require_version(root: Path) -> None:
    found = _version(root)
    if found is None:
        message = "a Zarr hierarchy, but not one that streamshard wrote"
        raise SourceNotFoundError(message, path=root)
    if found not in store_state.VERSIONS:
        known = " and ".join(map(str, store_state.VERSIONS))
        message = f"store format {show(found)}; this streamshard reads {known}"
        raise UnsupportedError(f"{message}: use a newer one", path=root)


class _StoreReader:
    def __init__(self, root: Path, checkpoint: Checkpoint, manifest: Manifest) -> None:
        self._root = root
        self._checkpoint = checkpoint
        self._manifest = manifest
        self._records = manifest.records
        self._codec = manifest.codec
        self._files: list[SourceFile] = []
        self._decoders: dict[int, ChunkDecoder] = {}
        self._codec_bytes = 0
        self._rewritten: list[str] = []

    def open(self, chunk_shapes: store_state.ChunkShapes) -> Store:
        builder = CuttingBuilder([ITEMSIZE[tensor.dtype] for tensor in self._checkpoint.tensors])
        both = zip(self._checkpoint.tensors, chunk_shapes, strict=True)
        for index, (tensor, shape) in enumerate(both):
            numel = math.prod(shape)
            if len(shape) != len(tensor.shape) or not numel:
                message = f"chunks of {show(shape)} for {tensor.name}"
                raise CorruptFileError(f"{message} of {show(tensor.shape)}", path=self._root)
            rewritten = find_rewritten(self._root, tensor, shape, self._manifest)
            if rewritten is not None:
                slot = self._add_rewritten(rewritten, array_path(tensor))
                builder.place(index, builder.slot(slot), piece_numel=rewritten.numel)
                continue
            counts = chunk_counts(tensor.shape, shape)
            if math.prod(counts) > len(self._records):
                message = f"{math.prod(counts):,} chunks of {tensor.name}, where the manifest lists"
                raise CorruptFileError(f"{message} {len(self._records):,} files", path=self._root)
            keys = chunk_keys(counts)
            first = len(self._files)
            array = array_path(tensor)
            for directory in sorted({os.path.dirname(key) for key in keys}):  # noqa: PTH120
                require_inside(self._root / array / directory, self._root)
            for key in keys:
                self._add(f"{array}/{key}", numel, ITEMSIZE[tensor.dtype])
            slot = Slot(
                files=np.arange(first, first + len(keys), dtype=np.int64),
                offsets=np.zeros(len(keys), dtype=np.int64),
                numels=np.full(len(keys), numel, dtype=np.int64),
            )
            builder.place(index, builder.slot(slot), piece_numel=numel)
        return Store(
            self._checkpoint,
            builder.build(),
            tuple(self._files),
            self._decoders,
            self._codec_bytes,
            tuple(self._rewritten),
        )

    def _add_rewritten(self, array: RewrittenArray, path: str) -> Slot:
        """Add an array that another tool rewrote, in pieces that are not its chunks."""
        first = len(self._files)
        for number in range(array.pieces):
            self._decoders[first + number] = RewrittenPiece(array, number)
            self._files.append(array.document)
        # Nothing is read from these; the run ends with an error if one of them changes.
        self._files += array.files.values()
        self._codec_bytes = max(self._codec_bytes, array.codec_bytes)
        self._rewritten.append(path)
        return Slot(
            files=np.arange(first, first + array.pieces, dtype=np.int64),
            offsets=np.zeros(array.pieces, dtype=np.int64),
            numels=np.full(array.pieces, array.numel, dtype=np.int64),
        )

    def _add(self, path: str, numel: int, itemsize: int) -> None:
        """Add one chunk. It must be complete: Zarr would read a missing chunk as zeros."""
        full, record = self._root / path, self._records.get(path)
        if record is None:
            raise CorruptFileError("a chunk that the manifest does not list", path=full)
        try:
            stat = examine(full, follows=False)
        except OSError as error:
            message = f"this chunk of the store cannot be read ({error.strerror})"
            raise SourceError(message, path=full) from error
        if not stat.is_file:
            raise SourceError("not a regular file; copy the store with 'cp -rL'", path=full)
        if stat.nbytes != record.nbytes:
            message = f"{stat.nbytes} bytes where {record.nbytes} were written"
            raise IntegrityError(message, path=full)
        content_bytes = numel * itemsize
        if self._codec == "none":
            if record.nbytes != content_bytes + CHECKSUM_BYTES:
                message = f"{record.nbytes} bytes for {content_bytes} of data"
                raise CorruptFileError(message, path=full)
            block = store_manifest.BLOCK_BYTES
            if len(record.crc32s) != -(-content_bytes // block):
                message = f"the manifest lists {len(record.crc32s)} checksums"
                raise CorruptFileError(message, path=full)
            digests = BlockDigests(content_bytes, block, record.crc32s)
            self._decoders[len(self._files)] = digests
        else:
            codec = BloscChunk(self._codec, itemsize)
            if len(record.crc32s) != 1:
                message = f"the manifest lists {len(record.crc32s)} checksums"
                raise CorruptFileError(message, path=full)
            chunk = EncodedChunk(
                full,
                codec,
                stored_bytes=record.nbytes,
                stored_crc32=int(record.crc32s[0]),
                content_bytes=content_bytes,
            )
            self._decoders[len(self._files)] = chunk
            # Twice, because the allocator keeps the memory of the previous chunk.
            self._codec_bytes = max(self._codec_bytes, 2 * (content_bytes + record.nbytes))
        self._files.append(stat.source_file(full))
