"""How well many workers are kept busy, with Dask's real scheduler and I/O that only sleeps.

`python -m benchmarks.dask_simulation [--short]`: jobs that sleep, for times that a seed chooses
around what a part of a file takes, run on 1 to 64 workers. All of these are in this process, as
sleeping takes no core; what each of Dask's workers watches about its process is off, as that 64
times takes a core. Efficiency is the time that the jobs sleep, divided by workers and by the time
that the run takes. Each worker has 32 jobs.
"""

import argparse
import random
import time
from dataclasses import dataclass
from functools import partial

import dask.config

from benchmarks._cluster import local_cluster
from streamshard.cluster.dask_executor import DaskExecutor
from streamshard.engine.jobs.executor import Host, Toolkit

LEAST = 0.85
JOBS = 32
SECONDS = 0.25, 0.75
UNWATCHED = {
    "distributed.admin.tick.interval": "10s",
    "distributed.admin.system-monitor.interval": "10s",
    "distributed.worker.profile.enabled": False,
}
"""A real worker watches its own process only; here all of them watch one."""


class Sleeper:
    """A worker that only sleeps."""

    def sleep(self, seconds: float) -> float:
        """Sleep, as I/O would."""
        time.sleep(seconds)
        return seconds

    def settle(self) -> None:
        """Read nothing."""

    def close(self) -> None:
        """Close nothing."""


@dataclass(frozen=True)
class Sleepers(Toolkit[Sleeper]):
    """Describes sleepers, which read no file."""

    sources = ()

    def make(self, host: Host) -> Sleeper:
        """Make a sleeper."""
        return Sleeper()


def efficiency(workers: int, seed: int) -> float:
    """Return which part of the time workers were busy."""
    chance = random.Random(seed)  # noqa: S311
    times = [chance.uniform(*SECONDS) for _ in range(JOBS * workers)]
    with dask.config.set(UNWATCHED), local_cluster(workers, 1, processes=False) as client:
        run = DaskExecutor(client).run(
            (partial(Sleeper.sleep, seconds=seconds) for seconds in times),
            Sleepers(),
            # The limit of a process: here all workers are in one.
            workers=workers,
            progress=lambda nbytes: None,
        )
        began = time.monotonic()
        slept = sum(found for _, found in run)
        return slept / workers / (time.monotonic() - began)


def main() -> None:
    """Print the efficiency for each number of workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="up to 16 workers")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for workers in (1, 2, 4, 8, 16) if arguments.short else (1, 2, 4, 8, 16, 32, 64):
        found = efficiency(workers, arguments.seed)
        print(f"{workers:2} workers: {found:.2f} (wanted: at least {LEAST})", flush=True)


if __name__ == "__main__":
    main()
