"""How fast archives are made and read, beside the codec by itself on as many threads."""

import os
import shutil
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

A = TypeVar("A")
B = TypeVar("B")
HEAD = ("what", "MB/s", "of the codec's")
_CHECKSUM_BYTES = 4


Chunk = NDArray[Any]
"""What a chunk holds, as elements of as many bytes as they have, by which the codec shuffles."""


def speeds(run: Path, tag: str, runs: int) -> tuple[int, list[list[str]]]:
    """Convert a checkpoint to a compressed store and back, and its chunks with the codec alone.

    Returns
    -------
    tuple of int and list of list of str
        The bytes of all chunks, and the table's rows: medians of the rounds, in each of which
        everything runs once.
    """
    workers = len(os.sched_getaffinity(0))
    raw, packed, back = (run.with_name(name) for name in ("raw.zarr", "packed.zarr", "back"))
    warm(run / tag)
    source, fixed = str(run / tag), ("--workers", str(workers), "--json")
    succeed(*STREAMSHARD, "convert", source, raw, "--codec", "none", *fixed)
    chunks = _chunks(raw)
    nbytes = sum(chunk.nbytes for chunk in chunks)
    convert = ("convert", source, str(packed), "--codec", "zstd", *fixed)
    repartition = ("repartition", str(packed), str(back), *fixed)
    verify = ("verify", str(packed), *fixed)
    seconds: dict[str, list[float]] = {}
    for _ in range(runs):
        with ThreadPoolExecutor(workers) as pool:
            codec = Blosc(cname="zstd", clevel=5, shuffle=Blosc.BITSHUFFLE)
            encoded, took = _timed(pool, codec.encode, chunks)
            seconds.setdefault("encode, the codec alone", []).append(took)
            _, took = _timed(pool, codec.decode, encoded)
            seconds.setdefault("decode, the codec alone", []).append(took)
        warm(run / tag)
        for name, command in (
            ("encode, convert --codec zstd", convert),
            ("decode, verify", verify),
            ("decode, repartition", repartition),
        ):
            report = succeed(*STREAMSHARD, *command).report
            seconds.setdefault(name, []).append(report["seconds"])
        shutil.rmtree(packed)
        shutil.rmtree(back)
    shutil.rmtree(raw)
    rows = [
        [name, f"{nbytes / median(took) / 1e6:.0f}", f"{_share(seconds, name):.2f}"]
        for name, took in sorted(seconds.items(), key=lambda item: item[0].startswith("decode"))
    ]
    return nbytes, rows


def _share(seconds: dict[str, list[float]], name: str) -> float:
    """Tell how fast something is beside the codec in the same round."""
    alone = seconds[f"{name.partition(',')[0]}, the codec alone"]
    return median(one / other for one, other in zip(alone, seconds[name], strict=True))


def _timed(
    pool: ThreadPoolExecutor, do: Callable[[A], B], what: Sequence[A]
) -> tuple[list[B], float]:
    began = time.perf_counter()
    return list(pool.map(do, what)), time.perf_counter() - began


def _chunks(store: Path) -> list[Chunk]:
    """Read all chunks of tensors of a store that is not compressed."""
    group = zarr.open_group(str(store), mode="r")
    found = []
    for path in files_in(store):
        name = path.relative_to(store).as_posix()
        array, inside, _ = name.partition("/c/")
        if not inside or array.startswith("meta/"):
            continue
        itemsize = group[array].dtype.itemsize  # type: ignore[union-attr]
        content = path.read_bytes()[:-_CHECKSUM_BYTES]
        found.append(np.frombuffer(content, dtype=f"V{itemsize}"))
    return found
