"""How fast is the export of a distributed checkpoint, compared with `cp` and torch's own save?

    python -m benchmarks.dcp_vs_cp --size 4GB --stage 3 --runs 5

`cp` copies what was exported before, so it reads and writes as many bytes; each round runs every
program once, page cache warm, and ratios are taken within a round. From streamshard's times the
start-up is subtracted, which is the time of `inspect` on the same source. torch saves the same
state out of memory: its time is that of `dcp.save` alone, without the load before it, and it syncs
its files, as the export does. Memory is that which the run reports, above the program's own.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median

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
from streamshard import sizes

RANKS = 8
SHORT = "256MB"
HEAD = ("program", "bytes written", "seconds", "x cp", "x cp + fsync", "x dcp.save", "memory MiB")
_MIB = 1 << 20


class Bench:
    """One checkpoint, what was exported of it, and the programs that are compared."""

    def __init__(self, root: Path, nbytes: int, stage: int) -> None:
        self.source, self.kept, self.target = root / "source", root / "kept", root / "target"
        model = transformer(nbytes, stage=stage)
        self.nbytes = fabricate(self.source, model, stage=stage, world_size=RANKS)
        report = succeed(*self.export(self.kept), "--verify", "--json").report
        self.written = int(report["bytes_written"])
        self.memory = (int(report["projected_bytes"]), int(report["peak_bytes"]))

    def export(self, target: Path) -> tuple[str, ...]:
        """Spell an export."""
        ends = ("--format", "dcp")
        return (*STREAMSHARD, "export", str(self.source), str(target), *ends)

    def round(self) -> dict[str, float]:
        """Run every program once; returns the seconds of each."""
        self._prepare(self.kept)
        copying = succeed("cp", "-r", self.kept, self.target).seconds
        syncing = succeed("sync", *files_in(self.target)).seconds
        self._prepare(self.source)
        start = succeed(*STREAMSHARD, "inspect", self.source, "--quiet").seconds
        exporting = succeed(*self.export(self.target)).seconds - start
        self._prepare(self.kept)
        script = (sys.executable, "-W", "ignore", "-m", "benchmarks._dcp_save")
        saving = succeed(*script, self.kept, self.target).report["seconds"]
        shutil.rmtree(self.target)
        return {
            "cp -r": copying,
            "cp -r, fsync": copying + syncing,
            "export --format dcp": exporting,
            "dcp.save from memory": saving,
        }

    def _prepare(self, source: Path) -> None:
        """Remove the last target; have the source in the cache, and the disk idle."""
        shutil.rmtree(self.target, ignore_errors=True)
        warm(source)
        os.sync()


def compare(bench: Bench, runs: int) -> list[list[str]]:
    """Run everything; returns the table's rows."""
    rounds = [bench.round() for _ in range(runs)]
    projected, peak = (f"{nbytes / _MIB:.0f}" for nbytes in bench.memory)
    times = {program: [one[program] for one in rounds] for program in rounds[0]}
    rows = []
    for program in times:
        ratios = [
            "1.00" if other == program else ratio_cell(times[program], times[other])
            for other in ("cp -r", "cp -r, fsync", "dcp.save from memory")
        ]
        memory = f"{peak} of {projected}" if program.startswith("export") else ""
        seconds = f"{median(times[program]):.2f}"
        rows.append([program, f"{bench.written:,}", seconds, *ratios, memory])
    return rows


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", default="4GB", help="size of the checkpoint [4GB]")
    parser.add_argument("--short", action="store_true", help=f"{SHORT}, two rounds")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), help="ZeRO stage [both 2 and 3]")
    parser.add_argument("--runs", type=int, default=5, help="rounds [5]")
    parser.add_argument("--directory", type=Path, help="where to work; thrice the size is needed")
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
