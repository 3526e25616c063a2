"""Stores, as zarr-python and TensorStore read them, against the values that were saved."""

import json
import struct
import urllib.parse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import torch
import zarr
from numcodecs.blosc import Blosc
from numpy.typing import NDArray
from zarr.codecs import BloscCodec

import streamshard
from streamshard.formats.zarr.array_paths import array_path
from streamshard.formats.zarr.documents import array_document
from streamshard.formats.zarr.rewritten_documents import is_serialized_again
from streamshard.model import ITEMSIZE, LogicalTensor
from tests.fabricated import client_state, write
from tests.formats.conftest import files_of
from tests.job import Job, expected

STORED_AS = {
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
QUANTISED = ("qint8", "quint8", "qint32")
"""Kept inside of the training state only, as raw bytes."""


def store_of(job: Job, directory: Path, codec: str = "none", chunk_size: int = 50) -> Path:
    write(job, directory / "run")
    store = directory / "x.zarr"
    streamshard.convert(directory / "run", store, codec=codec, chunk_size=chunk_size)
    return store


def bits(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a tensor as NumPy has it, bfloat16 as its bits."""
    stored = STORED_AS.get(tensor.dtype)
    array: NDArray[Any] = (tensor if stored is None else tensor.view(stored)).numpy()
    return array


def path_in(state: str, name: str) -> str:
    return array_path(LogicalTensor(state, name, "float32", ()))


def with_tensorstore(path: Path) -> NDArray[Any]:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    array: NDArray[Any] = tensorstore.open(spec).result().read().result()
    return array


def require_same_files(directory: Path, world_size: int = 1) -> None:
    """Require that a checkpoint rebuilt from its store is what it would become directly."""
    for source in ("x.zarr", "run"):
        streamshard.repartition(
            directory / source, directory / f"of-{source}", world_size=world_size
        )
    found, wanted = files_of(directory / "of-x.zarr"), files_of(directory / "of-run")
    assert found.keys() == wanted.keys()
    assert [name for name in found if found[name] != wanted[name]] == []


def of_every_dtype() -> dict[str, torch.Tensor]:
    """Make a buffer of each dtype, of 1 to 4 dimensions, a scalar, and one without elements."""
    made = {"scalar": torch.tensor(7), "empty": torch.empty(0, 3)}
    for number, name in enumerate(sorted({*ITEMSIZE} - {*QUANTISED})):
        shape = (6, 4, 1, 1)[: 1 + number % 4]
        made[name] = torch.arange(torch.Size(shape).numel()).reshape(shape).to(getattr(torch, name))
    return made


@pytest.mark.parametrize(("codec", "stage"), [("none", 3), ("zstd", 2)])
def test_every_array_is_read_by_zarr_and_tensorstore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, stage: int
) -> None:
    for module in ("job", "fabricated"):
        monkeypatch.setattr(f"tests.{module}.buffers", of_every_dtype)
    job = Job(stage=stage, world_size=3, sub_group_size=20, client_state=client_state())
    store = store_of(job, tmp_path, codec)
    group = zarr.open_group(store, mode="r")
    for (state, name), tensor in expected(job).items():
        path = path_in(state, name)
        array = group[path]
        assert isinstance(array, zarr.Array)
        wanted = bits(tensor)
        for found in (np.asarray(array[...]), with_tensorstore(store / path)):
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
            assert found.tobytes() == wanted.tobytes()
        named = str(tensor.dtype).removeprefix("torch.")
        assert dict(array.attrs) == ({"dtype": named} if tensor.dtype in STORED_AS else {})


def test_a_chunk_of_several_blocks_is_made_as_its_document_says(tmp_path: Path) -> None:
    """Other programs read it, and it is smaller than early stores have it."""
    job = Job(groups=((("wide", (600, 700)),),), tied={})
    path = store_of(job, tmp_path, "zstd", chunk_size=4 << 20) / "state/exp_avg/wide"
    wanted = bits(job.values("exp_avg", "wide"))
    found = zarr.open_array(path, mode="r")
    for read in (np.asarray(found[...]), with_tensorstore(path)):
        assert read.tobytes() == wanted.tobytes()
    (stored,) = [file.read_bytes()[:-4] for file in path.glob("c/*/*")]
    (said,) = [codec for codec in found.compressors if isinstance(codec, BloscCodec)]
    assert struct.unpack("<3I", stored[4:16]) == (wanted.nbytes, said.blocksize, len(stored))
    assert wanted.nbytes > 2 * said.blocksize
    assert len(stored) < len(Blosc("zstd", 5, Blosc.BITSHUFFLE).encode(wanted))


def test_nothing_but_provenance_depends_on_the_source_s_world_size(tmp_path: Path) -> None:
    files = []
    for world_size in (1, 4):
        place = tmp_path / str(world_size)
        store = store_of(Job(stage=2, world_size=world_size), place, "zstd")
        found = {p.relative_to(store).as_posix(): p for p in store.rglob("*") if p.is_file()}
        root = json.loads(found.pop("zarr.json").read_bytes())
        assert root["attributes"]["streamshard"]["saved_by"]["world_size"] == world_size
        files.append({n: p.read_bytes() for n, p in found.items() if not n.startswith("meta/")})
    assert files[0] == files[1]


NAMES = ["a/b", "100%", "%41", ".", "..", ".hidden", "_x", "__x", "__zarr", "zarr.json", "c", "c/0",
         "größe", "層.重み", "a b", "a'b\"c", "a:b", "a\\b", "*?", "état", "x" * 200]  # fmt: skip


def test_any_name_is_an_array_of_its_own(tmp_path: Path) -> None:
    job = Job(groups=(tuple((name, (2,)) for name in NAMES),), tied={}, frozen=())
    store = store_of(job, tmp_path)
    group = zarr.open_group(store, mode="r")
    wanted = expected(job)
    paths = {path_in("fp32", name): name for name in NAMES}
    assert len(paths) == len(NAMES)
    for path, name in paths.items():
        assert path.count("/") == 2
        assert urllib.parse.unquote(path.rpartition("/")[2]) == name
        found = np.asarray(group[path][...])  # type: ignore[index]
        assert found.tobytes() == bits(wanted["fp32", name]).tobytes()
        assert with_tensorstore(store / path).tobytes() == found.tobytes()
    listed = dict(group.members(max_depth=None))
    assert set(paths) <= set(listed)
    require_same_files(tmp_path)


# Documents ---------------------------------------------------------------------------------------


def test_a_document_of_an_early_store_says_the_same() -> None:
    """It does not name dimensions. Other names are not ours."""
    ours = array_document("w", LogicalTensor("fp32", "w", "float32", (4, 6)), (1, 3), "none")
    document = json.loads(ours)
    names = document.pop("dimension_names")
    assert names == ["size_4", "size_6"]
    for said, is_same in ((document, True), ({**document, "dimension_names": names[::-1]}, False)):
        assert is_serialized_again(json.dumps(said, indent=1).encode(), ours) == is_same


def test_no_flipped_bit_of_a_document_says_the_same() -> None:
    tensor = LogicalTensor("fp32", "w", "bfloat16", (4, 6))
    ours = array_document("state/fp32/w", tensor, (1, 3), "zstd")
    assert is_serialized_again(json.dumps(json.loads(ours), indent=2).encode(), ours)
    for bit in range(8 * len(ours)):
        flipped = bytearray(ours)
        flipped[bit // 8] ^= 1 << bit % 8
        assert not is_serialized_again(bytes(flipped), ours), flipped
