"""Our documents against zarr-python's own, field by field: where they part, no tool reads ours."""

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCname, BloscCodec, Crc32cCodec
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from streamshard.formats.zarr.documents import array_document, chunk_keys, group_document
from streamshard.formats.zarr.rewritten import is_serialized_anew
from streamshard.model import ITEMSIZE, LogicalTensor
from streamshard.options import CODECS

STORED_AS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
QUANTISED = ("qint8", "quint8", "qint32")
"""Kept inside of the training state only, as raw bytes."""
SHAPES = {(): (), (7,): (3,), (4, 6): (1, 3), (0, 3): (1, 3), (2, 3, 4): (2, 3, 4)}
"""Shape → shape of the chunks."""
SETTINGS: dict[str, dict[str, Any]] = {
    "lz4": {"clevel": 5, "shuffle": "bitshuffle"},
    "zstd": {"clevel": 1, "shuffle": "shuffle", "blocksize": 1 << 19},
}
OF_NO_ARRAY = {"dimension_names", "consolidated_metadata"}
"""Keys that zarr-python may write with null, which Zarr takes for left out."""


def fields(store: MemoryStore) -> dict[str, Any]:
    """Read the only document that zarr-python wrote, without keys that say nothing."""
    (document,) = [store._store_dict[key] for key in store._store_dict if key == "zarr.json"]
    found = json.loads(document.to_bytes())
    return {k: v for k, v in found.items() if not (k in OF_NO_ARRAY and v is None)}


def theirs(tensor: LogicalTensor, chunk: tuple[int, ...], codec: str) -> dict[str, Any]:
    """Have zarr-python write the document of the array that a tensor is stored in."""
    dtype = STORED_AS.get(tensor.dtype, tensor.dtype)
    store, size = MemoryStore(), ITEMSIZE[tensor.dtype]
    blosc = []
    if codec != "none":
        blosc = [BloscCodec(cname=BloscCname(codec), typesize=size, **SETTINGS[codec])]
    zarr.create_array(
        store,
        shape=tensor.shape,
        dtype=dtype,
        chunks=chunk or "auto",
        compressors=[*blosc, Crc32cCodec()],
        attributes={"dtype": tensor.dtype} if tensor.dtype in STORED_AS else {},
    )
    return fields(store)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", sorted({*ITEMSIZE} - {*QUANTISED}))
def test_an_array_s_document_has_the_fields_of_zarr_python(dtype: str, codec: str) -> None:
    for shape, chunk in SHAPES.items():
        tensor = LogicalTensor("fp32", "w", dtype, shape)
        ours = json.loads(array_document(tensor, chunk, codec))
        wanted = theirs(tensor, chunk, codec)
        assert ours.keys() == wanted.keys()
        for key, value in ours.items():
            assert value == wanted[key], (key, shape)
        assert type(ours["fill_value"]) in (type(wanted["fill_value"]), int)


def test_a_group_s_document_has_the_fields_of_zarr_python() -> None:
    attributes = {"streamshard": {"format_version": 1, "tag": "größe"}}
    for given in ({}, attributes):
        store = MemoryStore()
        zarr.create_group(store, attributes=given)
        assert json.loads(group_document(given)) == fields(store)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", sorted({*ITEMSIZE} - {*QUANTISED}))
def test_zarr_python_reads_our_documents_as_it_reads_its_own(dtype: str, codec: str) -> None:
    for shape, chunk in SHAPES.items():
        tensor = LogicalTensor("fp32", "w", dtype, shape)
        opened = []
        for document in (
            array_document(tensor, chunk, codec),
            json.dumps(theirs(tensor, chunk, codec)).encode(),
        ):
            content = default_buffer_prototype().buffer.from_bytes(document)
            opened.append(zarr.open_array(MemoryStore({"zarr.json": content}), mode="r").metadata)
        assert opened[0].to_dict() == opened[1].to_dict()


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (0, 2)])
def test_our_chunk_keys_are_zarr_python_s(shape: tuple[int, ...]) -> None:
    """Those that zarr-python writes, in the order of the elements."""
    store = MemoryStore()
    array = zarr.create_array(store, shape=shape, dtype="uint8", chunks=(1,) * len(shape) or "auto")
    array[...] = np.arange(1, 1 + math.prod(shape), dtype="uint8").reshape(shape)
    written = {key for key in store._store_dict if key != "zarr.json"}
    ours = chunk_keys(shape)
    assert written == {*ours}
    indices = itertools.product(*map(range, shape)) if math.prod(shape) else []
    assert ours == [array.metadata.encode_chunk_key(index) for index in indices]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "bool"])
def test_no_flipped_bit_of_a_document_says_the_same(dtype: str, codec: str) -> None:
    ours = array_document(LogicalTensor("fp32", "w", dtype, (4, 6)), (1, 3), codec)
    assert is_serialized_anew(json.dumps(json.loads(ours), indent=2).encode(), ours)
    for bit in range(8 * len(ours)):
        flipped = bytearray(ours)
        flipped[bit // 8] ^= 1 << bit % 8
        assert not is_serialized_anew(bytes(flipped), ours), flipped
