"""The documents and keys of a plain Zarr v3 hierarchy (https://zarr-specs.readthedocs.io, v3 core).

zarr-python is not used for writing: it needs a millisecond or more per array and holds whole
chunks. A checkpoint has tens of thousands of arrays, and chunks are streamed here. Tests open the
written stores with zarr-python and TensorStore.

Documents and other small files of a store are read here. Neither they nor paths are trusted.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from streamshard.errors import CorruptFileError, IncompleteError, SourceError
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.zarr.array_paths import array_path, is_shortened
from streamshard.formats.zarr.chunks import EARLY_SETTINGS, SETTINGS, require_checksum
from streamshard.formats.zarr.store_state import VERSION, ChunkShapes
from streamshard.io.entries import examine, read_all, resolve
from streamshard.io.files import stays_inside
from streamshard.layout.zero import ceil_div
from streamshard.model import BLOB, ITEMSIZE, LogicalTensor

ROOT_KEY: Final = "streamshard"
"""Attribute of the root group that makes a hierarchy a store."""
VERSION_KEY: Final = "format_version"
WEIGHTS_KEY: Final = "weights_only"
STATE_PATH: Final = "meta/state"
MANIFEST_PATH: Final = "meta/manifest"
_STORED_DTYPES: Final = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
"""Dtype without a name in Zarr's core → the integer dtype that stores its bits."""
LIMIT_BYTES: Final = 1 << 30
"""Most bytes of a document, manifest or training state. A sparse file can claim any size."""


def group_document(attributes: Mapping[str, Any] | None = None) -> bytes:
    return _json({"zarr_format": 3, "node_type": "group", "attributes": dict(attributes or {})})


def array_document(path: str, tensor: LogicalTensor, chunk: tuple[int, ...], codec: str) -> bytes:
    name = tensor.name if is_shortened(path) else None
    return _serialize_array(tensor.dtype, tensor.shape, chunk, codec, name)


@lru_cache(maxsize=256)  # thousands of experts have one shape
def _serialize_array(
    dtype: str, shape: tuple[int, ...], chunk: tuple[int, ...], codec: str, name: str | None
) -> bytes:
    stored = _STORED_DTYPES.get(dtype, dtype)
    fill: Any = False if stored == "bool" else [0.0, 0.0] if stored.startswith("complex") else 0
    attributes = {"dtype": dtype} if stored != dtype else {}
    if name is not None:
        attributes["name"] = name
    codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if ITEMSIZE[dtype] == 1:
        codecs = [{"name": "bytes"}]
    if codec != "none":
        settings = {"cname": codec, "typesize": ITEMSIZE[dtype], **SETTINGS}
        codecs.append({"name": "blosc", "configuration": settings})
    return _json(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(shape),
            "data_type": stored,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": fill,
            "codecs": [*codecs, {"name": "crc32c"}],
            "attributes": attributes,
            "dimension_names": _dimension_names(shape),
            "storage_transformers": [],
        }
    )


def _dimension_names(shape: tuple[int, ...]) -> list[str]:
    """Name axes by their lengths: for xarray a name has one length in all arrays of a group."""
    before = [shape[:axis].count(length) for axis, length in enumerate(shape)]
    both = zip(shape, before, strict=True)
    return [f"size_{length}_{count + 1}" if count else f"size_{length}" for length, count in both]


def store_documents(
    checkpoint: Checkpoint, chunk_shapes: ChunkShapes, codec: str
) -> dict[str, bytes]:
    paths = list(map(array_path, checkpoint.tensors))
    documents = dict.fromkeys(group_paths(paths), group_document())
    documents["zarr.json"] = group_document({ROOT_KEY: _attributes(checkpoint)})
    for tensor, path, chunk in zip(checkpoint.tensors, paths, chunk_shapes, strict=True):
        documents[f"{path}/zarr.json"] = array_document(path, tensor, chunk, codec)
    return documents


def group_paths(arrays: Iterable[str]) -> Iterator[str]:
    """Yield the path of the zarr.json of every group above the arrays of tensors."""
    yield from ("zarr.json", "meta/zarr.json")
    known: set[str] = set()
    for above in (path.rpartition("/")[0] for path in arrays):
        while above and above not in known:
            known.add(above)
            yield f"{above}/zarr.json"
            above = above.rpartition("/")[0]


def small_array_document(nbytes: int) -> bytes:
    """Serialize the zarr.json of raw bytes in one uncompressed chunk, whose key is `c/0`."""
    return array_document("", LogicalTensor(BLOB, "", "uint8", (nbytes,)), (nbytes,), "none")


def _attributes(checkpoint: Checkpoint) -> dict[str, Any]:
    layout = checkpoint.layout
    dropped = {} if checkpoint.dropped is None else {WEIGHTS_KEY: asdict(checkpoint.dropped)}
    provenance = {field.name: getattr(layout, field.name) for field in fields(layout)}
    return {
        VERSION_KEY: VERSION,
        "tag": checkpoint.tag,
        **dropped,
        "saved_by": {
            **provenance,
            "model_parallel": len(checkpoint.model_parts),
            "expert_parallel": checkpoint.expert_parallel,
            "module_dtype": checkpoint.module_dtype,
        },
    }


def forms(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List the forms of an array's parsed document: as it is, and as early stores have it."""
    unnamed = {key: value for key, value in document.items() if key != "dimension_names"}
    early = [
        {**codec, "configuration": codec["configuration"] | EARLY_SETTINGS}
        if codec["name"] == "blosc"
        else codec
        for codec in document["codecs"]
    ]
    return [{**document}, unnamed, {**unnamed, "codecs": early}]


def chunk_counts(shape: tuple[int, ...], chunk: tuple[int, ...]) -> tuple[int, ...]:
    if shape == chunk and 0 not in shape:  # as of nearly all small tensors
        return (1,) * len(shape)
    return tuple(ceil_div(length, step) for length, step in zip(shape, chunk, strict=True))


def chunk_keys(counts: Sequence[int]) -> list[str]:
    """List the keys of an array's chunks in the order of the elements that they hold."""
    if math.prod(counts) == 0:
        return []
    keys = ["c"]
    for count in counts:
        keys = [f"{key}/{index}" for key in keys for index in range(count)]
    return keys


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=1).encode()


def require_inside(path: Path, root: Path) -> None:
    if not stays_inside(path, root):
        message = f"a symbolic link leads out of the store here, to {resolve(path)}"
        raise SourceError(f"{message}; copy the store with 'cp -rL'", path=path)


def read_small(path: Path) -> bytes:
    try:
        stat = examine(path)
    except (FileNotFoundError, NotADirectoryError):
        raise IncompleteError("missing; the store is not whole", path=path) from None
    if not stat.is_file:
        raise CorruptFileError("not a regular file", path=path)
    if stat.nbytes > LIMIT_BYTES:
        raise CorruptFileError(f"{stat.nbytes:,} bytes, where {LIMIT_BYTES:,} is most", path=path)
    return read_all(path)


def read_checked(path: Path) -> bytes:
    """Read a small array's only chunk. The checksum at its end is checked and left out."""
    return bytes(require_checksum(read_small(path), path))
