"""Stores, read by zarr-python and TensorStore, against the values that were saved."""

import hashlib
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
from streamshard.formats.zarr.documents import array_path
from streamshard.model import LogicalTensor
from tests.fabricated import client_state, write
from tests.job import TAG, Job, expected

CODECS = ("none", "lz4", "zstd")
STORED_AS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}


def store_of(job: Job, directory: Path, codec: str = "none", chunk_size: int = 50) -> Path:
    write(job, directory / "run")
    streamshard.convert(
        directory / "run", directory / "x.zarr", codec=codec, chunk_size=chunk_size
    )  # fmt: skip
    return directory / "x.zarr"


def bits(tensor: torch.Tensor) -> NDArray[Any]:
    """Show a tensor as NumPy has it, bfloat16 as its bits."""
    stored = STORED_AS.get(tensor.dtype)
    array: NDArray[Any] = (tensor if stored is None else tensor.view(stored)).numpy()
    return array


def path_in(state: str, name: str) -> str:
    return array_path(LogicalTensor(state, name, "float32", ()))


def with_tensorstore(path: Path) -> NDArray[Any]:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    array: NDArray[Any] = tensorstore.open(spec).result().read().result()
    return array


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_array_is_read_by_zarr_and_tensorstore(
    tmp_path: Path, codec: str, stage: int
) -> None:
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


def test_the_group_lists_everything_that_it_has(tmp_path: Path) -> None:
    job = Job(stage=2, client_state=client_state())
    store = store_of(job, tmp_path)
    group = zarr.open_group(store, mode="r")
    members = dict(group.members(max_depth=None))
    arrays = {path for path, member in members.items() if isinstance(member, zarr.Array)}
    wanted = {path_in(state, name) for state, name in expected(job)}
    wanted |= {"meta/state", "meta/manifest", "file/zero_to_fp32.py"}
    blobs = {path for path in arrays if path.startswith("blob/")}
    assert arrays - blobs == wanted
    assert blobs
    documents = {p.parent.relative_to(store).as_posix() for p in store.rglob("zarr.json")}
    assert documents == {".", *members}


@pytest.mark.parametrize("codec", CODECS)
def test_nothing_but_provenance_depends_on_the_source_s_world_size(
    tmp_path: Path, codec: str
) -> None:
    files = []
    for world_size in (1, 4):
        place = tmp_path / str(world_size)
        store = store_of(Job(stage=2, world_size=world_size), place, codec)
        found = {p.relative_to(store).as_posix(): p for p in store.rglob("*") if p.is_file()}
        root = json.loads(found.pop("zarr.json").read_bytes())
        assert root["attributes"]["streamshard"]["saved_by"]["world_size"] == world_size
        files.append({n: p.read_bytes() for n, p in found.items() if not n.startswith("meta/")})
    assert files[0] == files[1]


def test_other_files_are_arrays_of_their_bytes(tmp_path: Path) -> None:
    store = store_of(Job(), tmp_path)
    array = zarr.open_array(store / "file" / "zero_to_fp32.py", mode="r")
    content = (tmp_path / "run" / "zero_to_fp32.py").read_bytes()
    assert np.asarray(array[...]).tobytes() == content


@pytest.mark.parametrize("chunk_size", [1, 16, 100, 1 << 20])
def test_chunks_are_no_larger_than_asked_for(tmp_path: Path, chunk_size: int) -> None:
    store = store_of(Job(world_size=1), tmp_path, chunk_size=chunk_size)
    group = zarr.open_group(store, mode="r")
    for path, array in group.members(max_depth=None):
        if isinstance(array, zarr.Array) and not path.startswith("meta/"):
            itemsize = array.dtype.itemsize
            nbytes = int(np.prod(array.chunks)) * itemsize
            least = 64 if path.startswith(("blob/", "file/")) else itemsize
            assert nbytes <= max(chunk_size, least) or not array.size


LONG = ["a." * 200 + "w", "a." * 200 + "v", "層" * 100, "%" * 100, "x" * 84 + "層" * 40, "y" * 4000]


def test_a_long_name_is_shortened_and_kept_beside(tmp_path: Path) -> None:
    """A directory's name ends at 255 bytes; `{name}` and SHA-256 tell what it is."""
    job = Job(groups=(tuple((name, (2,)) for name in ["y" * 255, *LONG]),), tied={}, frozen=())
    store = store_of(job, tmp_path)
    group = zarr.open_group(store, mode="r")
    wanted = expected(job)
    assert path_in("fp32", "y" * 255) == "state/fp32/" + "y" * 255
    for name in LONG:
        path = path_in("fp32", name)
        last = path.rpartition("/")[2]
        start, _, digest = last.partition("%~")
        assert len(last) <= 255
        assert digest == hashlib.sha256(name.encode()).hexdigest()
        assert name.encode().startswith(urllib.parse.unquote_to_bytes(start))
        array = group[path]
        assert isinstance(array, zarr.Array)
        assert array.attrs["name"] == name
        assert np.asarray(array[...]).tobytes() == bits(wanted["fp32", name]).tobytes()
        assert with_tensorstore(store / path).tobytes() == bits(wanted["fp32", name]).tobytes()
    found = streamshard.verify(store, against=tmp_path / "run")
    assert not found.problems
    streamshard.repartition(store, tmp_path / "back", world_size=1)
    streamshard.repartition(tmp_path / "run", tmp_path / "direct", world_size=1)
    for path_ in (tmp_path / "direct" / TAG).iterdir():
        assert (tmp_path / "back" / TAG / path_.name).read_bytes() == path_.read_bytes()


@pytest.mark.parametrize("codec", CODECS)
def test_the_report_has_the_size_of_the_store(tmp_path: Path, codec: str) -> None:
    write(Job(), tmp_path / "run")
    plan = streamshard.plan_convert(tmp_path / "run", tmp_path / "x.zarr", codec=codec)
    done = plan.run()
    found = sum(p.stat().st_size for p in (tmp_path / "x.zarr").rglob("*") if p.is_file())
    assert done.bytes_written == found <= plan.report.bytes_written


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
    again = streamshard.repartition(store, tmp_path / "out", world_size=1)
    assert again.tag == TAG


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 4])
def test_by_the_store_or_directly_the_files_are_the_same(
    tmp_path: Path, codec: str, stage: int, world_size: int
) -> None:
    job = Job(stage=stage, world_size=3, client_state=client_state(), sub_group_size=30)
    store = store_of(job, tmp_path, codec)
    streamshard.repartition(store, tmp_path / "by-store", world_size=world_size)
    streamshard.repartition(tmp_path / "run", tmp_path / "direct", world_size=world_size)
    found = [
        {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}
        for root in (tmp_path / "by-store", tmp_path / "direct")
    ]
    assert found[0].keys() == found[1].keys()
    assert [name for name in found[0] if found[0][name] != found[1][name]] == []
