"""Does the memory that a run takes grow with the checkpoint?

    python -m benchmarks.memory_vs_size --sizes 1GB,30GB
    python -m benchmarks.memory_vs_size --sizes 10GB --cgroup 512MiB

Peak resident memory above the floor, as the kernel counts it, of every verb that moves tensors.
Each checkpoint is resharded once per verb and removed; twice its size is needed on the disk.
"""

import argparse
import shutil
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks._cgroup import inside, memory_cgroup
from benchmarks._fabricate import fabricate
from benchmarks._measure import STREAMSHARD, machine, print_table, succeed
from benchmarks._model import transformer
from streamshard import sizes

FROM, TO = 8, 6
SHORT = "64MB,256MB"
HEAD = ("program", "stage", "checkpoint GB", "peak above floor MiB", "projected MiB", "limit MiB")


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sizes", default="1GB,30GB", help="of the checkpoints [1GB,30GB]")
    parser.add_argument("--short", action="store_true", help=SHORT)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), help="ZeRO stage [both 2 and 3]")
    parser.add_argument("--directory", type=Path, help="where to work [a temporary directory]")
    parser.add_argument("--cgroup", help="run in a memory cgroup of this size, page cache included")
    given = parser.parse_args()
    print(machine())
    rows = []
    for stage in [given.stage] if given.stage else [2, 3]:
        for size in (SHORT if given.short else given.sizes).split(","):
            with (
                group_of(given.cgroup) as group,
                tempfile.TemporaryDirectory(dir=given.directory) as directory,
            ):
                enter = inside(group) if group else ()
                rows += measure_size(Path(directory), sizes.parse(size), stage, enter)
    print_table(HEAD, rows)
    return 0


def group_of(size: str | None) -> AbstractContextManager[Path | None]:
    """Make the group that runs are to be in, if any."""
    return nullcontext() if size is None else memory_cgroup(sizes.parse(size))


def measure_size(root: Path, nbytes: int, stage: int, enter: tuple[str, ...]) -> list[list[str]]:
    """Reshard a checkpoint of this size in all ways; returns the table's rows."""
    source, store, target = root / "source", root / "store.zarr", root / "target"
    made = fabricate(source, transformer(nbytes, stage=stage), stage=stage, world_size=FROM)
    to = ("--world-size", str(TO))
    runs: tuple[tuple[str, tuple[str | Path, ...], Path | None], ...] = (
        (f"repartition {FROM} -> {TO}", ("repartition", source, target, *to), None),
        ("verify --against", ("verify", target, "--against", source), target),
        ("convert --codec none", ("convert", source, store), source),
        (f"repartition store -> {TO}", ("repartition", store, target, *to), None),
        ("verify --against store", ("verify", target, "--against", store), None),
    )
    rows = []
    for name, command, unneeded in runs:
        done = succeed(*enter, *STREAMSHARD, *command, "--json")
        rows.append(_row(name, stage, made, done.report))
        if unneeded is not None:
            shutil.rmtree(unneeded)
    return rows


def _row(name: str, stage: int, nbytes: int, report: dict[str, Any]) -> list[str]:
    above = [report[key] - report["floor_bytes"] for key in ("peak_bytes", "projected_bytes")]
    memory = [f"{value / (1 << 20):.1f}" for value in (*above, report["limit_bytes"])]
    return [name, str(stage), f"{nbytes / 1e9:.2f}", *memory]


if __name__ == "__main__":
    sys.exit(main())
