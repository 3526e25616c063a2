"""How fast are the verbs where a checkpoint has thousands of small tensors, as experts are?

    python -m benchmarks.many_tensors --tensors 1000,4000,16000 --runs 3

Beside each verb stands `cp -r` of what it writes, or reads if it writes nothing, with a sync of
that file system; each round runs every program once, page cache warm, and ratios are taken within a
round. Times are of whole processes. A busy machine disturbs them more than the processor time.
Nothing is removed before the end: ext4 searches long for inodes where files were removed in the
last half minute. A --directory on a new file system is best.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

from benchmarks._fabricate import fabricate
from benchmarks._measure import (
    STREAMSHARD,
    Measured,
    files_in,
    machine,
    print_table,
    ratio_cell,
    succeed,
    warm,
)
from benchmarks._model import Model, Shape

RANKS, TO = 8, 6
SHAPE: Shape = (16, 1_024)
SHORT = "200"
HEAD = ("program", "files", "seconds", "of CPU", "of cp -r", "x cp -r and sync", "x cp -r")
_PLAN = """
import sys, streamshard.cli.main
streamshard.plan_convert(sys.argv[1], sys.argv[2], memory_limit=16 << 30)
"""


@dataclass(frozen=True, slots=True)
class Program:
    """A verb: what it reads, and what it writes if it writes anything."""

    name: str
    command: tuple[str | Path, ...]
    source: Path
    target: Path | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """A program, and a copy of what it wrote, or read if it wrote nothing."""

    done: Measured
    copied: Measured
    files: int
    synced_seconds: float
    """Of the copy and its sync."""


class Bench:
    """One checkpoint, its stores, and the programs that are timed."""

    def __init__(self, root: Path, tensors: int, stage: int) -> None:
        self._left = (root / f"left-{number}" for number in count())
        self.source, self.target, self.copy = root / "run", root / "out", root / "copy"
        self.packed = root / "out.zarr.zip"
        codecs = "none", "zstd"
        self.stores = {codec: root / f"{codec}.zarr" for codec in codecs}
        self.files = {codec: root / f"{codec}.zarr.zip" for codec in codecs}
        fabricate(self.source, experts(tensors), stage=stage, world_size=RANKS)
        for stores in (self.stores, self.files):
            for codec, store in stores.items():
                succeed(*STREAMSHARD, "convert", self.source, store, "--codec", codec)

    def programs(self) -> Iterator[Program]:
        """Yield every program."""
        source, target = self.source, self.target

        def program(name: str, verb: str, place: Path, *options: str) -> Program:
            return Program(name, (*STREAMSHARD, verb, place, target, *options), place, target)

        def reader(name: str, verb: str, place: Path) -> Program:
            return Program(name, (*STREAMSHARD, verb, place), place)

        planning = (sys.executable, "-c", _PLAN, source, target)
        yield Program("plan of convert", planning, source)
        for codec in self.stores:
            yield program(f"convert --codec {codec}", "convert", source, "--codec", codec)
            name = f"convert --codec {codec}, into one file"
            command = (*STREAMSHARD, "convert", source, self.packed, "--codec", codec)
            yield Program(name, command, source, self.packed)
        yield program("export --format dcp", "export", source, "--format", "dcp")
        yield program("export", "export", source)
        for name, place in (
            ("shards", source),
            *((f"store, {c}", s) for c, s in self.stores.items()),
            *((f"store in one file, {c}", s) for c, s in self.files.items()),
        ):
            yield program(f"repartition of {name}", "repartition", place, "--world-size", str(TO))
            for verb in ("inspect", "verify"):
                yield reader(f"{verb} of {name}", verb, place)

    def run(self, program: Program) -> Round:
        """Run a program, then `cp -r` of what it wrote or read."""
        warm(program.source)
        succeed("sync", "-f", self.source)
        done = succeed(*program.command)
        place = program.target if program.target and program.target.exists() else program.source
        files = len(files_in(place))
        succeed("sync", "-f", self.source)
        copied = succeed("cp", "-r", place, self.copy)
        syncing = succeed("sync", "-f", self.copy).seconds
        for made in filter(Path.exists, (self.copy, self.target, self.packed)):
            for file in files_in(made):
                os.truncate(file, 0)
            made.rename(next(self._left))
        return Round(done, copied, files, copied.seconds + syncing)


def experts(tensors: int) -> Model:
    """Make up a model of many parameters of one small shape."""
    shapes = {f"layers.{n // 64}.experts.{n % 64}.weight": SHAPE for n in range(tensors)}
    return Model((shapes,), sub_group_numel=max(1, tensors * 16 * 1_024 // RANKS // 5))


def compare(bench: Bench, runs: int) -> list[list[str]]:
    """Run everything; returns the table's rows."""
    programs = list(bench.programs())
    found: dict[str, list[Round]] = {program.name: [] for program in programs}
    for _ in range(runs):
        for program in programs:
            found[program.name].append(bench.run(program))
    rows = []
    for name, times in found.items():
        seconds = [one.done.seconds for one in times]
        rows.append(
            [
                name,
                f"{times[0].files:,}",
                f"{median(seconds):.2f}",
                f"{median(one.done.cpu_seconds for one in times):.2f}",
                f"{median(one.copied.cpu_seconds for one in times):.2f}",
                ratio_cell(seconds, [one.synced_seconds for one in times]),
                ratio_cell(seconds, [one.copied.seconds for one in times]),
            ]
        )
    return rows


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--tensors", default="1000,4000,16000", help="counts of parameters [1000,4000,16000]"
    )
    parser.add_argument("--short", action="store_true", help=f"{SHORT} parameters, one round")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), help="ZeRO stage [both 2 and 3]")
    parser.add_argument("--runs", type=int, default=3, help="rounds [3]")
    parser.add_argument("--directory", type=Path, help="where to work [a temporary directory]")
    given = parser.parse_args()
    counts, runs = (SHORT, 1) if given.short else (given.tensors, given.runs)
    print(machine())
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        for stage in [given.stage] if given.stage else [2, 3]:
            for tensors in map(int, counts.split(",")):
                bench = Bench(Path(directory) / f"{stage}-{tensors}", tensors, stage)
                rows = compare(bench, runs)
                print(f"\nZeRO stage {stage}, {tensors:,} parameters, {RANKS} ranks, {runs} rounds")
                print_table(HEAD, rows)
                sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
