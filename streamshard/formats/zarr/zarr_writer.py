"""Serializes the documents of a store."""

from dataclasses import asdict, fields
from typing import Any

from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.zarr import store_state
from streamshard.formats.zarr.documents import ROOT_KEY, array_document, array_path, group_document
from streamshard.model import BLOB, LogicalTensor


def documents(
    checkpoint: Checkpoint, chunk_shapes: store_state.ChunkShapes, codec: str
) -> dict[str, bytes]:
    """Serialize the zarr.json of every group and of every tensor's array, by path."""
    found = {
        "zarr.json": group_document({ROOT_KEY: _attributes(checkpoint)}),
        "meta/zarr.json": group_document(),
    }
    for tensor, chunk in zip(checkpoint.tensors, chunk_shapes, strict=True):
        path = array_path(tensor)
        parents = path.split("/")[:-1]
        for depth in range(1, len(parents) + 1):
            found.setdefault("/".join(parents[:depth]) + "/zarr.json", group_document())
        found[f"{path}/zarr.json"] = array_document(tensor, chunk, codec)
    return found


def small_array_document(nbytes: int) -> bytes:
    """Serialize the zarr.json of raw bytes in one uncompressed chunk, whose key is `c/0`."""
    return array_document(LogicalTensor(BLOB, "", "uint8", (nbytes,)), (nbytes,), "none")


def _attributes(checkpoint: Checkpoint) -> dict[str, Any]:
    layout = checkpoint.layout
    dropped = {} if checkpoint.dropped is None else {"weights_only": asdict(checkpoint.dropped)}
    provenance = {field.name: getattr(layout, field.name) for field in fields(layout)}
    return {
        "format_version": store_state.version_of(checkpoint),
        "tag": checkpoint.tag,
        **dropped,
        "saved_by": {
            **provenance,
            "model_parallel": len(checkpoint.families),
            "expert_parallel": checkpoint.expert_parallel,
            "module_dtype": checkpoint.module_dtype,
        },
    }
