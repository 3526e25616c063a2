"""Lists the files that a store must have, by its training state and by its manifest."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from streamshard.errors import CorruptFileError
from streamshard.formats import strict_json
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.pickle.inert import show
from streamshard.formats.pickle.node_checks import of_file
from streamshard.formats.zarr import store_manifest, store_state, zarr_writer
from streamshard.formats.zarr.chunks import CHECKSUM_BYTES, LIMIT_BYTES
from streamshard.formats.zarr.documents import (
    MANIFEST_PATH,
    STATE_PATH,
    array_path,
    chunk_counts,
    chunk_keys,
    forms,
)
from streamshard.formats.zarr.rewritten_documents import (
    is_serialized_anew,
    is_small_rewritten,
    read_small_array,
)
from streamshard.formats.zarr.store_manifest import FileRecord, Manifest
from streamshard.formats.zarr.store_paths import read_small, require_inside
from streamshard.io.entries import is_file
from streamshard.model import ITEMSIZE

MANIFEST_FILES: Final = (f"{MANIFEST_PATH}/zarr.json", f"{MANIFEST_PATH}/c/0")
"""Files that the manifest itself does not list."""
STATE_FILES: Final = (f"{STATE_PATH}/zarr.json", f"{STATE_PATH}/c/0")

_TOLD_TWICE: Final = ("node_type", "shape", "data_type", "chunk_grid", "codecs")
"""Keys of an array's document whose values the training state determines as well."""


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """A chunk as the training state describes it."""

    path: str
    nbytes: int
    """Size of the content, including the part past the tensor's end."""
    own_bytes: int
    """Size of the content that belongs to the tensor."""


def may_be_store(root: Path) -> bool:
    """Tell whether a directory looks like a store, which may be damaged."""
    return any(is_file(root / path) for path in (MANIFEST_FILES[1], STATE_FILES[1]))


def read_manifest(root: Path) -> Manifest:
    """Read a store's manifest, and check the document of the manifest's array."""
    for path in MANIFEST_FILES:
        require_inside(root / path, root)
    data = read_small_array(root, MANIFEST_PATH)
    with of_file(root / MANIFEST_FILES[1]):
        manifest = store_manifest.read(data)
    document = root / MANIFEST_FILES[0]
    found, expected = read_small(document), zarr_writer.small_array_document(len(data))
    is_ours = found == expected or is_serialized_anew(found, expected)
    if not is_ours and not is_small_rewritten(root, MANIFEST_PATH, data):
        message = f"not the document of a manifest of {len(data)} bytes"
        raise CorruptFileError(message, path=document)
    return manifest


def read_state(root: Path, manifest: Manifest) -> tuple[Checkpoint, store_state.ChunkShapes]:
    """Read a store's training state, and the shape of the chunks of every tensor.

    The tensors together have no more chunks than the manifest lists files. No chunk is too large
    to be compressed.
    """
    path = root / STATE_FILES[1]
    with of_file(path):
        try:
            require_inside(path, root)
            checkpoint, shapes = store_state.load(read_small_array(root, STATE_PATH, manifest))
            _require_listed(checkpoint, shapes, manifest)
        except ValueError as error:
            raise CorruptFileError(str(error), path=path) from error
    return checkpoint, shapes


def _require_listed(
    checkpoint: Checkpoint, shapes: store_state.ChunkShapes, manifest: Manifest
) -> None:
    files, chunks = len(manifest.records), 0
    for tensor, shape in zip(checkpoint.tensors, shapes, strict=True):
        if len(shape) != len(tensor.shape) or not math.prod(shape):
            message = f"chunks of {show(shape)} for {tensor.name} of {show(tensor.shape)}"
            raise CorruptFileError(message)
        counts = chunk_counts(tensor.shape, shape)
        chunks += math.prod(counts)
        if chunks > files:
            message = f"{chunks:,} chunks up to {show(tensor.name)}, where the manifest lists"
            raise CorruptFileError(f"{message} {files:,} files")
        nbytes = math.prod(shape) * ITEMSIZE[tensor.dtype]
        if manifest.codec != "none" and nbytes > LIMIT_BYTES:
            message = f"chunks of {nbytes:,} bytes of {show(tensor.name)}, which is more than can"
            raise CorruptFileError(f"{message} be compressed")


def places(
    checkpoint: Checkpoint, shapes: store_state.ChunkShapes
) -> Iterator[tuple[str, list[ChunkPlace]]]:
    """Yield the path of every tensor's array, and its chunks in the order of their elements."""
    for tensor, shape in zip(checkpoint.tensors, shapes, strict=True):
        itemsize, step = ITEMSIZE[tensor.dtype], math.prod(shape)
        counts = chunk_counts(tensor.shape, shape)
        path = array_path(tensor)
        yield (
            path,
            [
                ChunkPlace(
                    f"{path}/{key}",
                    step * itemsize,
                    min(step, tensor.numel - number * step) * itemsize,
                )
                for number, key in enumerate(chunk_keys(counts))
            ],
        )


def documents(
    checkpoint: Checkpoint, shapes: store_state.ChunkShapes, codec: str
) -> Mapping[str, bytes]:
    """Serialize the documents that a store must hold, except that of the manifest."""
    found = zarr_writer.documents(checkpoint, shapes, codec)
    return {**found, STATE_FILES[0]: b""}


def is_same_array(found: bytes, expected: bytes) -> bool:
    """Tell whether a document describes the array that the training state describes."""
    try:
        said: Any = strict_json.parse(found)
        wanted = strict_json.parse(expected)
        shown = [said.get(key) for key in _TOLD_TWICE]
    except (AttributeError, ValueError):
        return False
    known = forms(wanted) if "codecs" in wanted else [wanted]  # without codecs, a group's
    return any(shown == [form.get(key) for key in _TOLD_TWICE] for form in known)


def content_bytes(record: FileRecord) -> int:
    """Return the size of the content in an uncompressed chunk's file."""
    return record.nbytes - CHECKSUM_BYTES
