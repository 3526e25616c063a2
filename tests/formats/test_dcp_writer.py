"""The metadata that we write is what torch unpickles, whatever its keys, shapes and numbers are."""

import pickle
from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from streamshard.errors import UnsupportedError
from streamshard.formats.dcp.dcp_writer import ItemPlace, PlacedEntry, key_of, serialize_metadata

LARGE = (1 << 63) + 5
ENTRIES = [
    PlacedEntry(
        (("model", "w"), ("model", "tied")),
        (ItemPlace("__0_0.distcp", 0, 255, 0, (1, 3)), ItemPlace("x" * 300, 256, 65536, 1, (2, 3))),
        "bfloat16",
        (3, 3),
    ),
    PlacedEntry((("層", "\0"),), (ItemPlace("__0_0.distcp", LARGE, (1 << 31) - 1),), "bool", ()),
    PlacedEntry(
        (("a", "b"),), (ItemPlace("é", 1 << 31, 1, 0, (0, 1 << 40)),), "float32", (0, 1 << 40)
    ),
    PlacedEntry((("optim", 0, "lr"), ("optim", 1 << 20, "lr")), (ItemPlace("__0_0.distcp", 7, 9),)),
    PlacedEntry((("optim", 0, "eps"),), (ItemPlace("__0_0.distcp", 7, LARGE),)),
]
"""Tensors in several items, under several names, of no elements; and values."""


def test_torch_reads_what_was_meant() -> None:
    assert pickle.loads(serialize_metadata(ENTRIES)) == wanted(ENTRIES)
    same = replace(ENTRIES[0], paths=(("optim.0", "lr"),))
    with pytest.raises(UnsupportedError, match="two values would have the key"):
        serialize_metadata([*ENTRIES, same])


def test_many_keys_are_read() -> None:
    """A dict is filled by batches, and what is memoized late has a long number."""
    paths = tuple(("optim", f"param_groups.layers.{number}.lr") for number in range(2500))
    entries = [PlacedEntry(paths, (ItemPlace("__0_0.distcp", 7, 9),))]
    assert pickle.loads(serialize_metadata(entries)) == wanted(entries)


def wanted(entries: list[PlacedEntry]) -> Metadata:
    found = Metadata({}, {}, {}, None, "1.0.0")
    for entry in entries:
        for path in entry.paths:
            key = key_of(path)
            found.planner_data[key] = path
            described: BytesStorageMetadata | TensorStorageMetadata = BytesStorageMetadata()
            if entry.dtype:
                described = TensorStorageMetadata(
                    TensorProperties(dtype=getattr(torch, entry.dtype)),
                    torch.Size(entry.shape),
                    [
                        ChunkStorageMetadata(torch.Size(offsets(item)), torch.Size(item.shape))
                        for item in entry.items
                    ],
                )
            found.state_dict_metadata[key] = described
            for item in entry.items:
                index = MetadataIndex(key, offsets(item) if entry.dtype else None)
                found.storage_data[index] = _StorageInfo(item.file, item.offset, item.nbytes)
    return found


def offsets(item: ItemPlace) -> tuple[int, ...]:
    return (item.first, *[0] * (len(item.shape) - 1)) if item.shape else ()
