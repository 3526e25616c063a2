"""The metadata that we write is what torch unpickles, whatever its keys, shapes and numbers are."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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

NUMBERS = st.sampled_from([0, 1, 255, 256, 65536, (1 << 31) - 1, 1 << 31, (1 << 63) + 5])
NAMES = st.text(st.characters(exclude_characters="."), min_size=1, max_size=300)
SHAPES = st.lists(st.integers(0, 1 << 40), max_size=4).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> PlacedEntry:
    """Make up a tensor in one or several items."""
    shape = draw(SHAPES)
    count = draw(st.integers(1, 3)) if shape else 1
    places = tuple(
        ItemPlace(draw(NAMES), draw(NUMBERS), draw(NUMBERS), number, (1, *shape[1:]))
        if shape
        else ItemPlace(draw(NAMES), draw(NUMBERS), draw(NUMBERS))
        for number in range(count)
    )
    paths = draw(st.lists(st.tuples(NAMES, NAMES), min_size=1, max_size=3))
    dtype = draw(st.sampled_from(["float32", "bfloat16", "bool"]))
    return PlacedEntry(tuple(paths), places, dtype, shape)


@st.composite
def plain_values(draw: st.DrawFn) -> PlacedEntry:
    part = st.one_of(NAMES, st.integers(0, 1 << 20))
    paths = draw(st.lists(st.tuples(NAMES, part, NAMES), min_size=1, max_size=3))
    return PlacedEntry(tuple(paths), (ItemPlace(draw(NAMES), draw(NUMBERS), draw(NUMBERS)),))


@given(
    st.lists(
        st.one_of(tensors(), plain_values()),
        max_size=6,
        unique_by=lambda entry: entry.paths[0],
    )
)
def test_torch_reads_what_was_meant(entries: list[PlacedEntry]) -> None:
    keys = [key_of(path) for entry in entries for path in entry.paths]
    if len(set(keys)) < len(keys):
        with pytest.raises(UnsupportedError, match="two values would have the key"):
            serialize_metadata(entries)
        return
    assert pickle.loads(serialize_metadata(entries)) == wanted(entries)


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
