"""How much faster are several workers than one?

    python -m benchmarks.workers --size 2GB --workers 1,2,4

Page cache warm; every round runs each count once, and ratios are taken within a round.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks._fabricate import fabricate
from benchmarks._measure import STREAMSHARD, machine, print_table, succeed, warm
from benchmarks._model import transformer
from streamshard import sizes

FROM, TO = 8, 6
SHORT = "128MB"
HEAD = ("program", "workers", "seconds", "x one worker")


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", default="2GB", help="size of the checkpoint [2GB]")
    parser.add_argument("--short", action="store_true", help=f"{SHORT}, two rounds")
    parser.add_argument("--workers", default="1,2", help="counts to compare [1,2]")
    parser.add_argument("--runs", type=int, default=5, help="rounds [5]")
    parser.add_argument("--directory", type=Path, help="where to work [a temporary directory]")
    given = parser.parse_args()
    size, runs = (SHORT, 2) if given.short else (given.size, given.runs)
    counts = [int(count) for count in given.workers.split(",")]
    print(machine())
    rows = []
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        source = Path(directory, "source")
        fabricate(source, transformer(sizes.parse(size), stage=2), stage=2, world_size=FROM)
        verbs: tuple[tuple[str, tuple[str, ...]], ...] = (
            (f"repartition {FROM} -> {TO}", ("repartition", "--world-size", str(TO))),
            ("convert --codec none", ("convert",)),
            ("convert --codec zstd", ("convert", "--codec", "zstd", "--chunk-size", "16MiB")),
        )
        for name, options in verbs:
            rows += _compare(name, source, options, counts, runs)
    print_table(HEAD, rows)
    return 0


def _compare(
    name: str, source: Path, options: tuple[str, ...], counts: list[int], runs: int
) -> list[list[str]]:
    """Run a verb with each count of workers once per round; returns the table's rows."""
    target = source.with_name("target")
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(runs):
        for count in counts:
            warm(source)
            command: list[str | Path] = [options[0], source, target, *options[1:], "--json"]
            report = succeed(*STREAMSHARD, *command, "--workers", str(count)).report
            seconds[count].append(report["seconds"])
            shutil.rmtree(target)
    first = seconds[counts[0]]
    return [
        [
            name,
            str(count),
            f"{median(times):.2f}",
            f"{median(a / b for a, b in zip(times, first, strict=True)):.2f}",
        ]
        for count, times in seconds.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
