"""How fast archives are made and read, compared with the codec by itself on as many threads."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import zarr
from numcodecs.blosc import Blosc
from numpy.typing import NDArray

from benchmarks._measure import STREAMSHARD, files_in, succeed, warm
from streamshard.formats.zarr.blosc_frame import PIECE_BYTES
from streamshard.io.changes import sync_tree
from streamshard.io.sink import write_blocks
from streamshard.io.writable import aligned, open_direct

A = TypeVar("A")
B = TypeVar("B")
HEAD = ("what", "MB/s", "of the codec's")
ZSTD = ("--codec", "zstd")
_CHECKSUM_BYTES = 4
CODEC = Blosc(cname="zstd", clevel=1, shuffle=Blosc.SHUFFLE, blocksize=512 << 10)


Chunk = NDArray[Any]
"""What a chunk holds, as elements of as many bytes as they have, by which the codec shuffles."""


def speeds(run: Path, tag: str, runs: int) -> tuple[int, list[list[str]]]:
    """Convert a checkpoint to a compressed store and back, and its chunks by as little as it takes.

    That is the codec by itself, over chunks that are in memory, whole into new memory and in pieces
    into memory that is used again, and a bare loop that reads pieces, encodes and writes them past
    the page cache, and syncs at the end.

    Returns
    -------
    tuple of int and list of list of str
        The bytes of all chunks, and the table's rows: medians of the rounds, in each of which
        everything runs once.
    """
    workers = len(os.sched_getaffinity(0))
    made = run.with_name("made")
    made.mkdir()
    raw = made / "raw.zarr"
    succeed(*STREAMSHARD, "convert", run / tag, raw, "--codec", "none")
    paths = _chunk_files(raw)
    chunks = [_content(path, itemsize) for path, itemsize in paths]
    nbytes = sum(chunk.nbytes for chunk in chunks)
    seconds: dict[str, list[float]] = {}
    for number in range(runs):
        # Nothing is removed before the end: the file system looks long for room where files were.
        packed, back, bare = (made / f"{name}-{number}" for name in ("packed", "back", "bare"))
        bare.mkdir()
        with ThreadPoolExecutor(workers) as pool:
            encoded, took = _timed(pool, CODEC.encode, chunks)
            seconds.setdefault("encode, the codec alone", []).append(took)
            _, took = _timed(pool, CODEC.decode, encoded)
            seconds.setdefault("decode, the codec alone", []).append(took)
            del encoded
            _, took = _timed(pool, _encode_pieces, chunks)
            seconds.setdefault("encode, the codec in pieces", []).append(took)
            seconds.setdefault("encode, a bare loop", []).append(_bare(pool, paths, bare))
        for name, reads, command in (
            ("encode, convert --codec zstd", run / tag, ("convert", run / tag, packed, *ZSTD)),
            ("decode, verify", packed, ("verify", packed)),
            ("decode, repartition", packed, ("repartition", packed, back)),
        ):
            warm(reads)
            report = succeed(*STREAMSHARD, *command, "--json").report
            seconds.setdefault(name, []).append(report["seconds"])
    shutil.rmtree(made)
    rows = [
        [name, f"{nbytes / median(took) / 1e6:.0f}", f"{_share(seconds, name):.2f}"]
        for name, took in sorted(seconds.items(), key=lambda item: item[0].startswith("decode"))
    ]
    return nbytes, rows


def _encode_pieces(chunk: Chunk) -> None:
    step = PIECE_BYTES // chunk.itemsize
    for start in range(0, len(chunk), step):
        CODEC.encode(chunk[start : start + step])


def _bare(pool: ThreadPoolExecutor, paths: Sequence[tuple[Path, int]], target: Path) -> float:
    """Read, encode and write all chunks piece by piece, and sync; returns the seconds."""
    local = threading.local()

    def do(job: tuple[int, tuple[Path, int]]) -> None:
        number, (path, itemsize) = job
        if not hasattr(local, "window"):
            local.piece, local.window = bytearray(PIECE_BYTES), aligned(2 * PIECE_BYTES)
        filled = offset = 0
        made, size = target / str(number), path.stat().st_size - _CHECKSUM_BYTES
        with path.open("rb", buffering=0) as source, made.open("wb", buffering=0) as stream:
            direct = open_direct(made, stream.fileno())
            for start in range(0, size, PIECE_BYTES):
                piece = memoryview(local.piece)[: min(PIECE_BYTES, size - start)]
                source.readinto(piece)
                encoded = memoryview(CODEC.encode(np.frombuffer(piece, dtype=f"V{itemsize}")))
                while len(encoded):
                    fits = encoded[: len(local.window) - filled]
                    local.window[filled : filled + len(fits)] = fits
                    filled, encoded = filled + len(fits), encoded[len(fits) :]
                    if filled == len(local.window) or start + PIECE_BYTES >= size:
                        write_blocks(stream.fileno(), direct, local.window[:filled], offset)
                        filled, offset = 0, offset + filled
            if direct >= 0:
                os.close(direct)

    began = time.perf_counter()
    list(pool.map(do, enumerate(paths)))
    sync_tree(target)
    return time.perf_counter() - began


def _share(seconds: dict[str, list[float]], name: str) -> float:
    """Tell how fast something is, compared with the codec in the same round."""
    alone = seconds[f"{name.partition(',')[0]}, the codec alone"]
    return median(one / other for one, other in zip(alone, seconds[name], strict=True))


def _timed(
    pool: ThreadPoolExecutor, do: Callable[[A], B], what: Sequence[A]
) -> tuple[list[B], float]:
    began = time.perf_counter()
    return list(pool.map(do, what)), time.perf_counter() - began


def _chunk_files(store: Path) -> list[tuple[Path, int]]:
    """List all chunks of tensors of a store, each with the bytes of an element."""
    group = zarr.open_group(str(store), mode="r")
    found = []
    for path in files_in(store):
        array, inside, _ = path.relative_to(store).as_posix().partition("/c/")
        if inside and not array.startswith("meta/"):
            found.append((path, int(group[array].dtype.itemsize)))  # type: ignore[union-attr]
    return found


def _content(path: Path, itemsize: int) -> Chunk:
    """Read what a chunk holds that is not compressed."""
    return np.frombuffer(path.read_bytes()[:-_CHECKSUM_BYTES], dtype=f"V{itemsize}")
