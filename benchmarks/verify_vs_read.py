"""How fast is verifying, compared with reading the same bytes and doing nothing with them?

    python -m benchmarks.verify_vs_read --size 2GB

Page cache warm; every round runs each program once, and ratios are taken within a round. From
streamshard's times the start-up is subtracted, which is the time of `inspect` on the same source.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks._fabricate import fabricate
from benchmarks._measure import STREAMSHARD, files_in, machine, print_table, succeed, warm
from benchmarks._model import transformer
from streamshard import sizes

FROM, TO = 8, 6
SHORT = "128MB"
HEAD = ("program", "less start-up s", "x cat of what it reads")


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", default="2GB", help="size of the checkpoint [2GB]")
    parser.add_argument("--short", action="store_true", help=f"{SHORT}, two rounds")
    parser.add_argument("--runs", type=int, default=5, help="rounds [5]")
    parser.add_argument("--directory", type=Path, help="where to work [a temporary directory]")
    given = parser.parse_args()
    size, runs = (SHORT, 2) if given.short else (given.size, given.runs)
    print(machine())
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        rows = measure_all(Path(directory), sizes.parse(size), runs)
    print_table(HEAD, rows)
    return 0


def measure_all(root: Path, nbytes: int, runs: int) -> list[list[str]]:
    """Verify shards, a store, and one against the other; returns the table's rows."""
    source, store, target = root / "source", root / "store.zarr", root / "target"
    fabricate(source, transformer(nbytes, stage=2), stage=2, world_size=FROM)
    succeed(*STREAMSHARD, "convert", source, store)
    succeed(*STREAMSHARD, "repartition", source, target, "--world-size", str(TO))
    return [
        _row("verify shards", [source], ("verify", source), runs),
        _row("verify store", [store], ("verify", store), runs),
        _row("verify --against", [target, store], ("verify", target, "--against", store), runs),
        _row("diff, equal", [target, store], ("diff", target, store), runs),
    ]


def _row(name: str, reads: list[Path], command: tuple[str | Path, ...], runs: int) -> list[str]:
    times, ratios = [], []
    for _ in range(runs):
        for path in reads:
            warm(path)
        start = sum(succeed(*STREAMSHARD, "inspect", path, "-q").seconds for path in reads)
        # Each side's headers are read here too, and the program itself is started once.
        alone = succeed(*STREAMSHARD, "--help").seconds * (len(reads) - 1)
        took = succeed(*STREAMSHARD, *command, "-q").seconds - (start - alone)
        files = [file for path in reads for file in files_in(path)]
        cat = succeed("sh", "-c", 'cat "$@" > /dev/null', "sh", *files).seconds
        times.append(took)
        ratios.append(took / cat)
    return [name, f"{median(times):.2f}", f"{median(ratios):.2f}"]


if __name__ == "__main__":
    sys.exit(main())
