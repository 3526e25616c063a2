"""How fast are runs from and to a bucket, compared with obstore's bare get and put of the objects?

    python -m benchmarks.object_stores --size 1GB --latency 0,20,80

The bucket is a process of this machine that holds objects in memory and delays each answer: moto's
server reads a whole object for each range of it. It takes CPU as well, about as much as obstore.
Bare is a script of a few lines with obstore's own defaults: it downloads whole objects of the
source, and uploads those that the verb made, as many at a time as streamshard has workers. From a
bucket to a bucket it does one after the other. A ratio is of bytes per second, within a round;
streamshard's seconds are those of its report, so without opening the source, which `inspect` shows.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final, TypeVar

from obstore.store import from_url

from benchmarks._bucket import BUCKET, Bucket, bucket
from benchmarks._fabricate import fabricate
from benchmarks._measure import STREAMSHARD, files_in, machine, print_table, succeed, warm
from benchmarks._model import transformer
from streamshard import sizes
from streamshard.engine.run.memory_limits import default_workers

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

FROM, TO = 8, 6
SHORT = "64MB"
LAYERS = 2
"""Few, so that tensors are as large as in a checkpoint of many GB: each takes requests."""
WORKERS = default_workers(is_remote=True)
HEAD = ("verb", "from -> to", "ms", "MB/s", "bare MB/s", "x bare", "requests")
VERBS: Final = {
    "repartition": ("repartition", "--world-size", str(TO)),
    "convert": ("convert",),
}
_SOURCE: Final = f"{BUCKET}/source"
_TARGET: Final = f"{BUCKET}/target"


class Bench:
    """One checkpoint, local and in a bucket."""

    def __init__(self, server: Bucket, root: Path, nbytes: int, workers: int) -> None:
        self.server, self.workers = server, workers
        self.source, self.target = root / "source", root / "target"
        self.nbytes = fabricate(
            self.source, transformer(nbytes, stage=2, layers=LAYERS), stage=2, world_size=FROM
        )
        self.store: ObjectStore = from_url(BUCKET, client_options={"allow_http": True})
        self.files = [path.relative_to(self.source).as_posix() for path in files_in(self.source)]
        self.each(self.files, lambda name: self.put(self.source / name, f"source/{name}"))
        self.made = {verb: root / verb for verb in VERBS}
        for verb, path in self.made.items():
            self.run(verb, self.source, path)

    def each(self, items: Iterable[T], work: Callable[[T], object]) -> float:
        """Do something with all items, as many at a time as there are workers; time it."""
        began = time.perf_counter()
        with ThreadPoolExecutor(self.workers) as pool:
            list(pool.map(work, items))
        return time.perf_counter() - began

    def put(self, path: Path, key: str) -> None:
        """Upload a local file."""
        self.store.put(key, path)

    def get(self, name: str) -> None:
        """Download an object."""
        self.store.get(f"source/{name}").bytes()

    def get_file(self, name: str) -> None:
        """Make a local file from an object, durably."""
        path = self.target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as stream:
            stream.write(self.store.get(f"source/{name}").bytes())
            os.fsync(stream.fileno())

    def bare(self, verb: str, source: str | Path, target: str | Path) -> float:
        """Move the bytes of a verb by obstore alone; returns the seconds."""
        seconds = 0.0
        if source == _SOURCE:
            seconds += self.each(self.files, self.get if target == _TARGET else self.get_file)
        if target == _TARGET:
            made = files_in(self.made[verb])
            seconds += self.each(made, lambda path: self.put(path, f"target{path}"))
        return seconds

    def remove(self) -> Counter[str]:
        """Remove what a run made, in the bucket or here; returns the requests before that."""
        requests = self.server.delay()
        for page in self.store.list("target"):
            self.store.delete([one["path"] for one in page])
        shutil.rmtree(self.target, ignore_errors=True)
        return requests

    def run(self, verb: str, source: str | Path, target: str | Path) -> float:
        """Run a verb; returns its seconds."""
        name, *options = VERBS[verb]
        options += ["--workers", str(self.workers), "--json"]
        report = succeed(*STREAMSHARD, name, source, target, *options).report
        return float(report["seconds"])

    def compare(self, milliseconds: float, runs: int) -> list[list[str]]:
        """Run everything with a latency; returns the table's rows."""
        ways = (
            ("bucket -> bucket", _SOURCE, _TARGET),
            ("bucket -> local", _SOURCE, self.target),
            ("local -> bucket", self.source, _TARGET),
        )
        return [
            [verb, way, f"{milliseconds:g}", *self._row(verb, source, target, milliseconds, runs)]
            for way, source, target in ways
            for verb in VERBS
        ]

    def _row(
        self, verb: str, source: str | Path, target: str | Path, milliseconds: float, runs: int
    ) -> list[str]:
        bare, own = [], []
        warm(self.source)
        warm(self.made[verb])
        for _ in range(runs):
            self.server.delay(milliseconds)
            bare.append(self.bare(verb, source, target))
            self.remove()
            self.server.delay(milliseconds)
            own.append(self.run(verb, source, target))
            requests = self.remove()
        speeds = [f"{self.nbytes / median(seconds) / 1e6:.0f}" for seconds in (own, bare)]
        ratios = [one / other for one, other in zip(bare, own, strict=True)]
        return [*speeds, f"{median(ratios):.2f}", _shown(requests)]

    def inspect(self, milliseconds: float) -> str:
        """Time `inspect`, start-up and all."""
        self.server.delay(milliseconds)
        took = succeed(*STREAMSHARD, "inspect", _SOURCE, "-q").seconds
        return f"{took:.2f} s, {_shown(self.server.delay())}"


def _shown(requests: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in requests.most_common())


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", default="1GB", help="size of the checkpoint [1GB]")
    parser.add_argument("--short", action="store_true", help=f"{SHORT}, 20 ms, one round")
    parser.add_argument("--latency", default="0,20,80", help="ms a request [0,20,80]")
    parser.add_argument("--workers", type=int, default=WORKERS, help=f"[{WORKERS}]")
    parser.add_argument("--runs", type=int, default=3, help="rounds [3]")
    parser.add_argument("--directory", type=Path, help="where to work [a temporary directory]")
    given = parser.parse_args()
    size, runs = (SHORT, 1) if given.short else (given.size, given.runs)
    latencies = [20.0] if given.short else [float(one) for one in given.latency.split(",")]
    print(machine())
    with tempfile.TemporaryDirectory(dir=given.directory) as directory, bucket() as server:
        bench = Bench(server, Path(directory), sizes.parse(size), given.workers)
        print(f"{bench.nbytes:,} bytes of {FROM} ranks, {given.workers} workers, {runs} rounds")
        for latency in latencies:
            print(f"inspect, {latency:g} ms a request: {bench.inspect(latency)}")
        rows = [row for latency in latencies for row in bench.compare(latency, runs)]
    print_table(HEAD, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
