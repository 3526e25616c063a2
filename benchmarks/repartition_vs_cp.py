"""How fast is resharding, compared with `cp -r` of the same bytes?

    python -m benchmarks.repartition_vs_cp --size 8GB --stage 2 --runs 5

Whole processes, page cache warm or, with --cold, cold, all on one file system; every round runs
each program once, and ratios are taken within a round. streamshard makes its output durable, which
`cp` leaves to the kernel: so there is a ratio to `cp` alone, and one to `cp` followed by fsync of
every copy. The limit is what the machine takes to read the same bytes, to write them past the page
cache by one thread per core, and to sync them. From streamshard's times the start-up is subtracted,
which is the time of `inspect` on the same source.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._bare_copy import bare_copy
from benchmarks._check import native_differences, store_differences
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
from benchmarks._model import Model, transformer
from streamshard import sizes
from streamshard.io.page_cache import drop_cached

FROM, TO = 8, 6
SHORT = "256MB"
HEAD = (
    "program",
    "start-up s",
    "less start-up s",
    "x limit",
    "x cp",
    "x cp + fsync",
    "peak above floor MiB",
    "projected MiB",
)


class Bench:
    """One checkpoint, the store made of it, and the programs that are compared."""

    def __init__(
        self, root: Path, model: Model, stage: int, extra: list[str], *, cold: bool
    ) -> None:
        self.source, self.store, self.target = root / "source", root / "kept.zarr", root / "target"
        self._model, self._stage = model, stage
        self._extra = extra
        self._cold = cold
        self.nbytes = fabricate(self.source, model, stage=stage, world_size=FROM)
        self._verb("convert", self.source, self.store)

    def _verb(self, verb: str, source: Path, target: Path, *options: str) -> Measured:
        return succeed(*STREAMSHARD, verb, source, target, "--json", *options, *self._extra)

    def repartition(self) -> Measured:
        """Reshard without a store."""
        return self._verb("repartition", self.source, self.target, "--world-size", str(TO))

    def convert(self) -> Measured:
        """Make a store, uncompressed."""
        return self._verb("convert", self.source, self.target, "--codec", "none")

    def from_store(self) -> Measured:
        """Reshard from the store."""
        return self._verb("repartition", self.store, self.target, "--world-size", str(TO))

    def copy(self) -> Measured:
        """Copy the source."""
        return succeed("cp", "-r", self.source, self.target)

    def sync_copies(self) -> Measured:
        """Make durable what was copied."""
        return succeed("sync", *files_in(self.target))

    def start_up(self, source: Path) -> float:
        """Time what every verb does before it moves bytes."""
        return succeed(*STREAMSHARD, "inspect", source, "--quiet").seconds

    def check(self) -> None:
        """Hold every element of each result against the function that made the source."""
        for make, differences in (
            (self.repartition, self._native_differences),
            (self.from_store, self._native_differences),
            (self.convert, lambda: store_differences(self.target, self._model, stage=self._stage)),
        ):
            with self.prepared(self.source):
                make()
                wrong = next(differences(), None)
            if wrong is not None:
                raise RuntimeError(f"{make.__name__} went wrong: {wrong}")

    def _native_differences(self) -> Iterator[str]:
        return native_differences(self.target, self._model, stage=self._stage, world_size=TO)

    @contextmanager
    def prepared(self, source: Path) -> Iterator[None]:
        """Have the source in the cache, or not, and the disk idle; empty the target after.

        Its files stay, without content: for seconds after many were removed, ext4 takes long to
        make others.
        """
        os.sync()
        if self._cold:
            drop_cached(source)
        else:
            warm(source)
        yield
        for path in files_in(self.target):
            os.truncate(path, 0)
        self.target.rename(tempfile.mkdtemp(prefix="emptied", dir=self.target.parent))


def run_rounds(bench: Bench, runs: int) -> list[list[str]]:
    """Run everything once per round; returns the table's rows."""
    verbs: dict[str, tuple[Path, Callable[[], Measured]]] = {
        f"repartition {FROM} -> {TO}": (bench.source, bench.repartition),
        "convert --codec none": (bench.source, bench.convert),
        f"repartition store -> {TO}": (bench.store, bench.from_store),
    }
    copies, synced, limits = [], [], []
    starts: dict[str, list[float]] = {name: [] for name in verbs}
    moves: dict[str, list[float]] = {name: [] for name in verbs}
    reports: dict[str, dict[str, Any]] = {}
    for _ in range(runs):
        with bench.prepared(bench.source):
            copies.append(bench.copy().seconds)
            synced.append(copies[-1] + bench.sync_copies().seconds)
        with bench.prepared(bench.source):
            limits.append(bare_copy(bench.source, bench.target))
        for name, (source, run) in verbs.items():
            with bench.prepared(source):
                starts[name].append(bench.start_up(source))
                done = run()
            moves[name].append(done.seconds - starts[name][-1])
            reports[name] = done.report
    others = limits, copies, synced
    return [
        _row("cp -r", [], copies, others),
        _row("cp -r, fsync", [], synced, others),
        _row("limit", [], limits, others),
        *(_row(name, starts[name], moves[name], others, reports[name]) for name in verbs),
    ]


def _row(
    name: str,
    starts: list[float],
    moves: list[float],
    others: tuple[list[float], ...],
    report: dict[str, Any] | None = None,
) -> list[str]:
    start, memory = f"{median(starts):.2f}" if starts else "", ["", ""]
    if report is not None:
        floor, ends = report["floor_bytes"], (report["peak_bytes"], report["projected_bytes"])
        memory = [f"{(end - floor) / (1 << 20):.1f}" for end in ends]
    ratios = [ratio_cell(moves, times) for times in others]
    return [name, start, f"{median(moves):.2f}", *ratios, *memory]


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", default="8GB", help="size of the checkpoint [8GB]")
    parser.add_argument("--short", action="store_true", help=f"{SHORT}, two rounds")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), help="ZeRO stage [both 2 and 3]")
    parser.add_argument("--runs", type=int, default=5, help="rounds [5]")
    parser.add_argument("--directory", help="where to work; three times the size is needed there")
    parser.add_argument("--cold", action="store_true", help="have the source read from the disk")
    parser.add_argument("--workers", help="passed on to streamshard")
    parser.add_argument("--memory-limit", help="passed on to streamshard")
    given = parser.parse_args()
    size, runs = (SHORT, 2) if given.short else (given.size, given.runs)
    options = {"--workers": given.workers, "--memory-limit": given.memory_limit}
    extra = [text for key, value in options.items() if value for text in (key, value)]
    print(machine())
    for stage in [given.stage] if given.stage else [2, 3]:
        with tempfile.TemporaryDirectory(dir=given.directory) as directory:
            model = transformer(sizes.parse(size), stage=stage)
            bench = Bench(Path(directory), model, stage, extra, cold=given.cold)
            bench.check()
            rows = run_rounds(bench, runs)
        count = len(model.trained)
        print(f"\nZeRO stage {stage}, {bench.nbytes:,} bytes, {count} parameters, {runs} rounds")
        print_table(HEAD, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
