"""Stores hold what `docs/store-format.md` says: read here by that page, without streamshard.

What is imported from it makes the stores, and shows that they are read where this reader passes.
"""

import base64
import hashlib
import io
import itertools
import json
import math
import pickle
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import quote

import google_crc32c
import pytest
from numcodecs.blosc import Blosc

import streamshard
from tests.documents import blocks, page
from tests.fabricated import client_state, write
from tests.job import Job

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int64": 8, "bool": 1, "uint8": 1}
STORED_AS = {"bfloat16": "uint16"}
BLOCK_BYTES = 1 << 20
LONG, WIDE = "a/b." + "x" * 300, "x" + "層" * 100
JOBS = {
    "stage 2": Job(stage=2, world_size=3, client_state=client_state()),
    "stage 3": Job(stage=3, sub_group_size=20),
    "parts of a model": Job(stage=2, parts=2),
    "names": Job(
        stage=2, groups=(((LONG, (7, 3)), (WIDE, (2,)), ("__x", (4,)), ("..", (2, 5, 3))),), tied={}
    ),
}


class Named:
    """Takes the place of whatever the pickle would import, and of what it would make of that."""

    def __new__(cls, *_: object) -> "Named":
        return object.__new__(cls)

    def __init__(self, *_: object) -> None: ...

    def __setitem__(self, key: object, value: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...

    def append(self, value: object) -> None: ...


class Training(pickle.Unpickler):
    """The training state, read without importing or calling what it names."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.blobs: list[tuple[str, str, int, int]] = []

    def find_class(self, module: str, name: str) -> type[Named]:
        return type(name, (Named,), {})

    def persistent_load(self, pid: tuple[str, str, int, int]) -> object:
        self.blobs.append(pid)
        return pid


def node(name: str) -> str:
    """Name a node by the three rules under 'Names'."""
    found = quote(name, safe="_.-~ !#$&'()+,;=@[]{}^")
    if not found.strip(".") or found.startswith("__") or found == "zarr.json":
        found = (f"%{ord(name[0]):02X}" + found[1:]) if name else "%"
    if len(found) > 255:
        start = found[:189]
        while start[-1:] == "%" or start[-2:-1] == "%":
            start = start[:-1]
        found = f"{start}%~{hashlib.sha256(name.encode()).hexdigest()}"
    return found


def array_of(state: str, name: str, part: str) -> str:
    top = state if state in ("module", "blob", "file") else f"state/{node(state)}"
    return "/".join(filter(None, [part, top, node(name)]))


def small(store: Path, path: str) -> bytes:
    data = (store / path / "c" / "0").read_bytes()
    assert google_crc32c.value(data[:-4]) == int.from_bytes(data[-4:], "little")
    return data[:-4]


def sums(text: str) -> list[int]:
    data = base64.b64decode(text)
    return [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]


def content_of(path: Path, codec: str, nbytes: int, checksums: list[int]) -> bytes:
    """Read a chunk file, and look at each of its checksums."""
    data = path.read_bytes()
    assert google_crc32c.value(data[:-4]) == int.from_bytes(data[-4:], "little")
    if codec == "none":
        content = data[:-4]
        pieces = [content[at : at + BLOCK_BYTES] for at in range(0, nbytes, BLOCK_BYTES)]
        assert checksums == [zlib.crc32(piece) for piece in pieces]
    else:
        content = bytes(Blosc(codec).decode(data[:-4]))
        assert checksums == [zlib.crc32(data)]
    assert len(content) == nbytes
    return content


@pytest.mark.parametrize(
    ("name", "codec"), [*zip(JOBS, ("none", "zstd", "zstd", "none"), strict=True)]
)
def test_a_store_is_as_its_page_says(tmp_path: Path, name: str, codec: str) -> None:
    write(JOBS[name], tmp_path / "run")
    store = tmp_path / "x.zarr"
    streamshard.convert(tmp_path / "run", store, codec=codec, chunk_size=50)
    manifest = json.loads(small(store, "meta/manifest"))
    training = Training(small(store, "meta/state"))
    state = training.load()
    assert (manifest["block_bytes"], manifest["codec"]) == (BLOCK_BYTES, codec)
    root = json.loads((store / "zarr.json").read_bytes())["attributes"]["streamshard"]
    assert (root["format_version"], root["tag"]) == (1, state["tag"])
    assert [*root["saved_by"].values()][:8] == [*state["layout"]]
    chunks = set()
    for tensor, shape in zip(state["tensors"], state["chunk_shapes"], strict=True):
        chunks |= look_at(store, manifest, tensor, shape)
    files = {path.relative_to(store).as_posix() for path in store.rglob("*") if path.is_file()}
    documents = {path for path in files if path.endswith("zarr.json")}
    assert files == chunks | documents | {"meta/state/c/0", "meta/manifest/c/0"}
    assert files == manifest["files"].keys() | {"meta/manifest/zarr.json", "meta/manifest/c/0"}
    for path in files - chunks - {"meta/manifest/zarr.json", "meta/manifest/c/0"}:
        data = (store / path).read_bytes()
        assert manifest["files"][path] == [len(data), manifest["files"][path][1]]
        assert sums(manifest["files"][path][1]) == [zlib.crc32(data)]
    for _, dtype, numel, index in training.blobs:
        kind, _, stored, shape, _ = state["tensors"][index]
        assert (kind, stored, shape) == ("blob", "uint8", (numel * ITEM_BYTES[dtype],))
    assert training.blobs


def look_at(
    store: Path, manifest: dict[str, Any], tensor: tuple[Any, ...], chunk: tuple[int, ...]
) -> set[str]:
    """Look at an array, its chunks and its digest; returns the paths of the chunks."""
    state, name, dtype, shape, part = tensor
    array, itemsize = array_of(state, name, part), ITEM_BYTES[dtype]
    document = json.loads((store / array / "zarr.json").read_bytes())
    assert (document["shape"], document["data_type"]) == ([*shape], STORED_AS.get(dtype, dtype))
    assert document["chunk_grid"]["configuration"]["chunk_shape"] == [*chunk]
    assert document["dimension_names"] == [
        f"size_{length}" + f"_{shape[: axis + 1].count(length)}" * (length in shape[:axis])
        for axis, length in enumerate(shape)
    ]
    assert document["attributes"].get("name", name) == name
    assert document["attributes"].get("dtype", dtype) == dtype
    wanted = ["bytes", "blosc", "crc32c"]
    assert [codec["name"] for codec in document["codecs"]] == [
        codec for codec in wanted if codec != "blosc" or manifest["codec"] != "none"
    ]
    counts = [-(-length // step) for length, step in zip(shape, chunk, strict=True)]
    content, paths = b"", set()
    for key in itertools.product(*map(range, counts)):
        path = "/".join([array, "c", *map(str, key)])
        nbytes, checksums = manifest["files"][path]
        assert (store / path).stat().st_size == nbytes
        whole = math.prod(chunk) * itemsize
        content += content_of(store / path, manifest["codec"], whole, sums(checksums))
        paths.add(path)
    numel = math.prod(shape)
    elements, past_end = content[: numel * itemsize], content[numel * itemsize :]
    assert not any(past_end)
    digest = f"{zlib.crc32(elements):08x}{google_crc32c.value(elements):08x}"
    assert (len(elements), manifest["digests"][array]) == (numel * itemsize, digest)
    return paths


def test_the_page_shows_a_manifest_that_is_one() -> None:
    (shown,) = blocks(page("store-format"), "json")
    assert {*json.loads(shown)} == {"block_bytes", "codec", "files", "digests"}
