"""How fast does zarr-python read a checkpoint that is no store, next to one that `convert` wrote?

    python -m benchmarks.view_vs_store --size 1GB

Page cache warm, in one process, medians of all rounds. `open()` reads the same tensors as NumPy
arrays, without zarr-python. Times to open are until an array can be indexed.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import zarr

import streamshard
from benchmarks._fabricate import fabricate
from benchmarks._measure import machine, print_table, warm
from benchmarks._model import transformer
from streamshard import sizes

RANKS = 8
SHORT = "64MB"
HEAD = ("stage", "what", "open s", "one tensor s", "all tensors s", "MB/s")
Arrays = Iterator[Any]


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", default="1GB", help="size of the checkpoint [1GB]")
    parser.add_argument("--short", action="store_true", help=f"{SHORT}, one round")
    parser.add_argument("--runs", type=int, default=5, help="rounds [5]")
    parser.add_argument("--directory", type=Path, help="where to work [a temporary directory]")
    given = parser.parse_args()
    size, runs = (SHORT, 1) if given.short else (given.size, given.runs)
    print(machine())
    rows: list[list[str]] = []
    for stage in (2, 3):
        with tempfile.TemporaryDirectory(dir=given.directory) as directory:
            run, store = Path(directory) / "run", Path(directory) / "x.zarr"
            fabricate(
                run, transformer(sizes.parse(size), stage=stage), stage=stage, world_size=RANKS
            )
            warm(run)
            rows += [[str(stage), *row] for row in _rows(run, store, runs)]
    print_table(HEAD, rows)
    return 0


def _rows(run: Path, store: Path, runs: int) -> Iterator[list[str]]:
    took, written = [], 0
    for _ in range(runs):
        shutil.rmtree(store, ignore_errors=True)
        start = perf_counter()
        written = streamshard.convert(run, store).bytes_written
        took.append(perf_counter() - start)
    yield ["convert", "", "", *_speed(median(took), written)]
    warm(store)

    def view() -> "zarr.Group":
        return zarr.open_group(streamshard.open(run).zarr(), mode="r")

    def opened() -> streamshard.OpenCheckpoint:
        return streamshard.open(run)

    def converted() -> "zarr.Group":
        return zarr.open_group(store, mode="r")

    kinds: list[tuple[str, Callable[[], Any], Callable[[Any], Arrays]]] = [
        ("open()", opened, _of_checkpoint),
        ("view", view, _of_group),
        ("store", converted, _of_group),
    ]
    for name, opens, arrays in kinds:
        yield [name, *_timed(opens, arrays, runs)]


def _of_checkpoint(found: streamshard.OpenCheckpoint) -> Arrays:
    for parameter in found.values():
        yield from parameter.states.values()


def _of_group(found: "zarr.Group") -> Arrays:
    for _, member in found["state"].members(max_depth=None):  # type: ignore[union-attr]
        if isinstance(member, zarr.Array):
            yield member


def _timed(opens: Callable[[], Any], arrays: Callable[[Any], Arrays], runs: int) -> list[str]:
    times: list[tuple[float, float, float]] = []
    nbytes = 0
    for _ in range(runs):
        start = perf_counter()
        every = arrays(opens())
        first = next(every)
        is_open = perf_counter()
        first[...]
        has_one = perf_counter()
        nbytes = sum(np.asarray(array[...]).nbytes for array in (first, *every))
        times.append((is_open - start, has_one - is_open, perf_counter() - has_one))
    opening, one, whole = map(median, zip(*times, strict=True))
    return [f"{opening:.3f}", f"{one:.3f}", *_speed(whole, nbytes)]


def _speed(seconds: float, nbytes: int) -> list[str]:
    return [f"{seconds:.2f}", f"{nbytes / seconds / 1e6:,.0f}"]


if __name__ == "__main__":
    sys.exit(main())
