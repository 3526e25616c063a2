"""What a Dask cluster costs, and what it is worth where the disk or the network is the limit.

`python -m benchmarks.dask_overhead [--short]`: repartitions a checkpoint with two threads of one
process, and with one worker of a cluster that has two threads, in turn; then with one and with four
workers that may each read and write so many bytes a second. The same files must come out.
"""

import argparse
import filecmp
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import streamshard
from benchmarks._cluster import local_cluster
from benchmarks._fabricate import fabricate
from benchmarks._model import transformer
from streamshard.cluster.dask_executor import DaskExecutor
from streamshard.engine.jobs.executor import runs_on

GIB = 1 << 30
MOST_OVERHEAD = 1.15
LEAST_SPEED_UP = 3.4
TURNS = 5


def timed(run: Callable[[Path], object], out: Path) -> float:
    """Return the seconds of a run that begins with an empty place."""
    shutil.rmtree(out, ignore_errors=True)
    began = time.monotonic()
    run(out)
    return time.monotonic() - began


def repartition(source: Path, out: Path) -> None:
    """Repartition with two threads of each process."""
    streamshard.repartition(source, out, world_size=6, workers=2)


def differ(one: Path, other: Path) -> bool:
    """Tell whether two directories hold other files."""
    names = [path.relative_to(one) for path in one.rglob("*") if path.is_file()]
    found = filecmp.cmpfiles(one, other, [str(name) for name in names], shallow=False)
    return bool(found[1] or found[2])


def overhead(source: Path, place: Path) -> float:
    """Return how many times as long a cluster of one worker takes as threads; the median."""
    near, far = place / "near", place / "far"
    ratios = []
    with local_cluster(1, 2) as client:
        for _ in range(TURNS):
            alone = timed(lambda out: repartition(source, out), near)
            with streamshard.executor(client):
                on_dask = timed(lambda out: repartition(source, out), far)
            print(f"threads {alone:.2f} s, Dask {on_dask:.2f} s")
            ratios.append(on_dask / alone)
        assert not differ(near, far)
    return statistics.median(ratios)


def speed_up(source: Path, place: Path, bytes_per_second: int) -> float:
    """Return how many times as fast four workers are as one, each with a limit."""
    seconds = {}
    for workers in (1, 4):
        with (
            local_cluster(workers, 1) as client,
            runs_on(DaskExecutor(client, worker_bytes_per_second=bytes_per_second)),
        ):
            seconds[workers] = timed(lambda out: repartition(source, out), place / f"on-{workers}")
            print(f"{workers} limited workers: {seconds[workers]:.2f} s")
    assert not differ(place / "on-1", place / "on-4")
    return seconds[1] / seconds[4]


def main() -> None:
    """Measure, and print what is wanted next to it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="1 GiB in place of 4")
    parser.add_argument("--place", type=Path, help="directory on the disk to measure")
    arguments = parser.parse_args()
    nbytes = (1 if arguments.short else 4) * GIB
    with tempfile.TemporaryDirectory(dir=arguments.place) as made:
        place = Path(made)
        fabricate(
            place / "source",
            transformer(nbytes, stage=2, layers=32, vocabulary=2000),
            stage=2,
            world_size=16,
        )
        found = overhead(place / "source", place)
        print(f"Dask / threads: {found:.2f} (wanted: at most {MOST_OVERHEAD})")
        found = speed_up(place / "source", place, nbytes // 40)
        print(f"four limited workers / one: {found:.2f} x (wanted: at least {LEAST_SPEED_UP})")


if __name__ == "__main__":
    main()
