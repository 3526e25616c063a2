"""Hostile files that would take memory or time out of proportion to their own size.

Every bound is on what the kernel counts for the process: its CPU time and its peak memory.
"""

import functools
import gzip
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numcodecs import Blosc, Zstd

import streamshard
from benchmarks._measure import STREAMSHARD, measure
from tests.cli.hostile import MIB
from tests.fabricated import write
from tests.forked import Finished, run_forked
from tests.job import Job

ARRAY = "state/exp_avg/embed.weight"
BOMB_BYTES = 256 * MIB
FREE_BYTES = 50 * MIB
PER_BYTE = 80
"""Bytes of memory that a byte of input may take, besides those that any input may."""


def cost(verb: str, *arguments: object) -> Finished:
    """Run a verb under a memory limit, unless it has none; a traceback fails the test."""
    limit = ["--memory-limit", "64MiB"] if verb in ("repartition", "verify") else []
    done = run_forked(verb, *limit, *map(str, arguments))
    assert "Traceback" not in done.err, done.err
    return done


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a store that is not to be changed."""
    directory = tmp_path_factory.mktemp("honest")
    write(Job(stage=2, world_size=2, parts=1), directory / "run")
    streamshard.convert(directory / "run", directory / "x.zarr", codec="zstd")
    return directory / "x.zarr"


@pytest.fixture(scope="module")
def floor(honest: Path) -> Finished:
    """Measure what it takes to read an honest store that zarr-python rewrote."""
    store = honest.parent / "rewritten.zarr"
    shutil.copytree(honest, store)
    content = np.arange(44, dtype="<f4").reshape(11, 4).tobytes()
    replace_array(store, ARRAY, [{"name": "gzip", "configuration": {"level": 1}}], [11, 4],
                  gzip.compress(content))  # fmt: skip
    return cost("verify", store)


@pytest.fixture
def store(honest: Path, tmp_path: Path) -> Iterator[Path]:
    yield Path(shutil.copytree(honest, tmp_path / "x.zarr"))
    shutil.rmtree(tmp_path)


def replace_array(
    store: Path, path: str, codecs: list[Any], shape: list[int], *chunks: bytes
) -> None:
    """Replace an array by one of other codecs, as one that another tool rewrote."""
    place = store / path
    document = json.loads((place / "zarr.json").read_text())
    document["codecs"] = [document["codecs"][0], *codecs]
    document["shape"] = shape
    document["chunk_grid"]["configuration"]["chunk_shape"] = shape
    (place / "zarr.json").write_text(json.dumps(document, indent=2))
    shutil.rmtree(place / "c")
    for chunk in chunks:
        file = place.joinpath("c", *"0" * len(shape))
        file.parent.mkdir(parents=True)
        file.write_bytes(chunk)


def bytes_below(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


ZSTD = {"name": "zstd", "configuration": {"level": 0, "checksum": False}}
GZIP = {"name": "gzip", "configuration": {"level": 1}}
BLOSC = {
    "name": "blosc",
    "configuration": {
        "typesize": 1, "cname": "zstd", "clevel": 5, "shuffle": "noshuffle", "blocksize": 0
    },
}  # fmt: skip


def unsized_zstd(count: int) -> bytes:
    """Make a frame that does not say how much it holds: blocks of one byte, 128 KiB times."""
    block = (1 << 17) << 3 | 1 << 1
    blocks = block.to_bytes(3, "little") + b"\0"
    last = (block | 1).to_bytes(3, "little") + b"\0"
    return b"\x28\xb5\x2f\xfd\x00\x58" + blocks * (count // (1 << 17) - 1) + last


def packed(data: bytes) -> bytes:
    return gzip.compress(data, 1)


def empty_member(more: int) -> bytes:
    """Make a member of a gzip file: nothing, after a header with so many more bytes."""
    header = b"\x1f\x8b\x08\x04" + bytes(6) + more.to_bytes(2, "little") + bytes(more)
    return header + packed(b"")[10:]


@functools.cache
def zeros() -> bytes:
    return bytes(Zstd().encode(bytes(BOMB_BYTES)))


BOMBS: dict[str, tuple[list[Any], Callable[[], bytes]]] = {
    "zstd": ([ZSTD], zeros),
    "zstd behind an honest frame": ([ZSTD], lambda: Zstd().encode(bytes(176)) + zeros()),
    "zstd of a size not told": ([ZSTD], lambda: unsized_zstd(BOMB_BYTES)),
    "gzip": ([GZIP], lambda: packed(bytes(BOMB_BYTES))),
    "gzip, many members": ([GZIP], lambda: packed(bytes(MIB)) * (BOMB_BYTES // MIB)),
    "gzip, empty members": ([GZIP], lambda: empty_member(350) * 20_000 + b"\x1f\x8b"),
    "blosc": ([BLOSC], lambda: bytes(Blosc("zstd").encode(bytes(BOMB_BYTES)))),
    "in a zarr shard": ([], zeros),
}


def sharded(codecs: list[Any]) -> dict[str, Any]:
    index = [{"name": "bytes", "configuration": {"endian": "little"}}]
    settings = {"chunk_shape": [11, 4], "codecs": codecs, "index_codecs": index}
    return {"name": "sharding_indexed", "configuration": {**settings, "index_location": "end"}}


@pytest.mark.parametrize("bomb", BOMBS)
def test_no_frame_is_decoded_further_than_its_chunk(
    store: Path, tmp_path: Path, floor: Finished, bomb: str
) -> None:
    codecs, make = BOMBS[bomb]
    data = make()
    if codecs:
        replace_array(store, ARRAY, codecs, [11, 4], data)
    else:
        little = {"name": "bytes", "configuration": {"endian": "little"}}
        index = np.array([0, len(data)], "<u8").tobytes()
        replace_array(store, ARRAY, [], [11, 4], data + index)
        place = store / ARRAY / "zarr.json"
        document = json.loads(place.read_text())
        document["codecs"] = [sharded([little, ZSTD])]
        place.write_text(json.dumps(document))
    for verb, *rest in (["verify"], ["repartition", tmp_path / "out", "--world-size", 3]):
        done = cost(str(verb), store, *rest)
        assert done.code == 6, done.err
        most = floor.peak_bytes + FREE_BYTES + PER_BYTE * bytes_below(store)
        assert done.peak_bytes < min(most, floor.peak_bytes + BOMB_BYTES // 4)
        assert done.cpu_seconds < floor.cpu_seconds + 2
        assert "cannot be decoded" in done.err + done.out


@pytest.mark.parametrize("what", ["meta/manifest", "meta/state"])
@pytest.mark.parametrize("kind", ["shape", "chunks", "many chunks"])
def test_a_small_array_that_claims_much_is_refused(
    store: Path, floor: Finished, what: str, kind: str
) -> None:
    content = (store / what / "c/0").read_bytes()[:-4]
    claimed = 1 << 29
    replace_array(store, what, [GZIP], [claimed], gzip.compress(content))
    if kind != "shape":
        place = store / what / "zarr.json"
        document = json.loads(place.read_text())
        document["shape"] = [len(content) if kind == "chunks" else 1 << 24]
        chunk = claimed if kind == "chunks" else 1
        document["chunk_grid"]["configuration"]["chunk_shape"] = [chunk]
        place.write_text(json.dumps(document))
    for verb, code in (("inspect", 3), ("verify", 6), ("repartition", 3)):
        rest = ["--world-size", 3, store.parent / "out"] if verb == "repartition" else []
        done = cost(verb, store, *rest)
        assert done.code == code, done.err
        assert done.peak_bytes < floor.peak_bytes + FREE_BYTES
        assert done.cpu_seconds < floor.cpu_seconds + 2


def test_no_memory_is_exit_5(store: Path) -> None:
    """The system refuses, not the plan: an address space as large as a sparse manifest."""
    os.truncate(store / "meta/manifest/c/0", 1 << 30)
    command = 'ulimit -v 1048576; exec "$@"'
    done = measure("bash", "-c", command, "-", *STREAMSHARD, "inspect", str(store))
    assert done.exit_code == 5, done.stderr
    assert done.stderr.startswith("streamshard: the system has no more memory")
    assert "Traceback" not in done.stderr
