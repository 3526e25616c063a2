"""How fast is taking the weights out, compared with `cp` of the bytes and DeepSpeed's own script?

    python -m benchmarks.export_vs_cp --size 8GB --stage 3 --runs 5

In fp32 an export reads as many bytes as it writes, so `cp` copies what was exported before; each
round runs every program once, page cache warm, and ratios are taken within a round. From
streamshard's times the start-up is subtracted, which is the time of `inspect` on the same source.
`zero_to_fp32` runs once, as it needs minutes where these need seconds; its time is the whole
process's. Memory is that of the whole tree of processes, above what a Python does that has
imported the same packages and nothing else.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks._check import exported_differences
from benchmarks._fabricate import fabricate
from benchmarks._measure import (
    STREAMSHARD,
    files_in,
    machine,
    print_table,
    ratio_cell,
    succeed,
    warm,
)
from benchmarks._model import transformer
from benchmarks.versus_deepspeed import Watched, watch
from streamshard import sizes

RANKS = 8
SHORT = "256MB"
HEAD = (
    "program",
    "bytes written",
    "less start-up s",
    "x cp",
    "x cp + fsync",
    "peak above floor MiB",
)
_MIB = 1 << 20


class Bench:
    """One checkpoint, what was exported of it, and the programs that are compared."""

    def __init__(self, root: Path, nbytes: int, stage: int) -> None:
        self.source, self.kept, self.target = root / "source", root / "kept", root / "target"
        self.model = transformer(nbytes, stage=stage)
        self.nbytes = fabricate(self.source, self.model, stage=stage, world_size=RANKS)
        succeed(*self.export(self.kept), "--verify")
        wrong = next(exported_differences(self.kept, self.model), None)
        if wrong is not None:
            raise RuntimeError(f"the export went wrong: {wrong}")

    def export(self, target: Path, dtype: str = "fp32") -> tuple[str, ...]:
        """Spell an export."""
        return (*STREAMSHARD, "export", str(self.source), str(target), "--dtype", dtype)

    def zero_to_fp32(self) -> tuple[str, ...]:
        """Spell DeepSpeed's own way, which writes torch files: tied weights stop the other."""
        script = (sys.executable, "-m", "deepspeed.utils.zero_to_fp32")
        return (*script, str(self.source), str(self.target))

    def copy(self) -> tuple[float, float]:
        """Time a copy of what was exported, without and with its being made durable."""
        with self.prepared(self.kept):
            copying = succeed("cp", "-r", self.kept, self.target).seconds
            syncing = succeed("sync", *files_in(self.target)).seconds
        return copying, copying + syncing

    def start_up(self) -> float:
        """Time what every verb does before it moves bytes."""
        return succeed(*STREAMSHARD, "inspect", self.source, "--quiet").seconds

    def timed_export(self, dtype: str) -> float:
        """Time an export, less the start-up."""
        with self.prepared(self.source):
            start = self.start_up()
            return succeed(*self.export(self.target, dtype)).seconds - start

    def watched(self, command: tuple[str, ...]) -> Watched:
        """Look at all the memory that a program takes above its floor."""
        package = command[2].partition(".")[0]
        floor = watch((sys.executable, "-c", f"import {package}"), self.target.parent / "floor")
        warm(self.source)
        found = watch(command, self.target)
        return Watched(found.seconds, found.peak_bytes - floor.peak_bytes, found.temporary_bytes)

    def written(self, dtype: str = "fp32") -> int:
        """Count the bytes that an export writes."""
        dry = succeed(*self.export(self.target, dtype), "-n", "--json")
        return int(dry.report["bytes_written"])

    @contextmanager
    def prepared(self, source: Path) -> Iterator[None]:
        """Have the source in the cache and the disk idle before; remove the target after."""
        warm(source)
        os.sync()
        yield
        shutil.rmtree(self.target)


def compare(bench: Bench, runs: int) -> list[list[str]]:
    """Run everything; returns the table's rows."""
    copies: list[float] = []
    synced: list[float] = []
    times: dict[str, list[float]] = {dtype: [] for dtype in ("fp32", "bf16")}
    for _ in range(runs):
        for both, seconds in zip((copies, synced), bench.copy(), strict=True):
            both.append(seconds)
        for dtype, taken in times.items():
            taken.append(bench.timed_export(dtype))
    whole = f"{bench.written():,}"
    rows = [
        ["cp -r", whole, f"{median(copies):.2f}", "1.00", "", ""],
        ["cp -r, fsync", whole, f"{median(synced):.2f}", ratio_cell(synced, copies), "1.00", ""],
    ]
    for dtype, taken in times.items():
        peak = bench.watched(bench.export(bench.target / "out", dtype)).peak_bytes
        ratios = [ratio_cell(taken, copies), ratio_cell(taken, synced)]
        cells = [f"{bench.written(dtype):,}", f"{median(taken):.2f}", *ratios, f"{peak / _MIB:.0f}"]
        rows.append([f"export --dtype {dtype}", *cells])
    theirs = bench.watched(bench.zero_to_fp32())
    ratios = [f"{theirs.seconds / median(base):.2f}" for base in (copies, synced)]
    peak_mib = f"{theirs.peak_bytes / _MIB:.0f}"
    rows.append(["zero_to_fp32", whole, f"{theirs.seconds:.2f}", *ratios, peak_mib])
    return rows


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", default="8GB", help="size of the checkpoint [8GB]")
    parser.add_argument("--short", action="store_true", help=f"{SHORT}, two rounds")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), help="ZeRO stage [both 2 and 3]")
    parser.add_argument("--runs", type=int, default=5, help="rounds [5]")
    parser.add_argument("--directory", type=Path, help="where to work; twice the size is needed")
    given = parser.parse_args()
    size, runs = (SHORT, 2) if given.short else (given.size, given.runs)
    print(machine())
    for stage in [given.stage] if given.stage else [2, 3]:
        with tempfile.TemporaryDirectory(dir=given.directory) as directory:
            bench = Bench(Path(directory), sizes.parse(size), stage)
            rows = compare(bench, runs)
        print(f"\nZeRO stage {stage}, {bench.nbytes:,} bytes of {RANKS} ranks, {runs} rounds")
        print_table(HEAD, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
