"""How fast are runs from and to a bucket, beside obstore's bare get and put of the same bytes?

    python -m benchmarks.object_stores --size 400MB --latency 0,20,80

The bucket is a process of this machine that delays each answer. It takes CPU as well, more or less
what obstore takes. Bare is what a script of a few lines does: whole objects, as many at a time as
streamshard has workers, with obstore's own defaults; from a bucket to a bucket each object is
downloaded, then uploaded. A ratio is bytes per second over those of bare, within a round; where
the bytes read and written differ, as with `convert`, both are those of the source.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

from obstore.store import from_url

from benchmarks._bucket import BUCKET, Bucket, bucket
from benchmarks._fabricate import fabricate
from benchmarks._measure import STREAMSHARD, files_in, machine, print_table, succeed, warm
from benchmarks._model import transformer
from streamshard import sizes
from streamshard.operations.transfer.execution import default_workers

if TYPE_CHECKING:
    from obstore.store import ObjectStore

FROM, TO = 8, 6
SHORT = "64MB"
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
            self.source, transformer(nbytes, stage=2), stage=2, world_size=FROM
        )
        self.store: ObjectStore = from_url(BUCKET, client_options={"allow_http": True})
        self.files = [path.relative_to(self.source).as_posix() for path in files_in(self.source)]
        self.each(self.upload)
        self.remove("target")

    def each(self, work: Callable[[str], object]) -> float:
        """Do something with every file of the source; returns the seconds."""
        began = time.perf_counter()
        with ThreadPoolExecutor(self.workers) as pool:
            list(pool.map(work, self.files))
        return time.perf_counter() - began

    def upload(self, name: str) -> None:
        """Upload a local file."""
        self.store.put(f"source/{name}", self.source / name)

    def again(self, name: str) -> None:
        """Upload a local file as another object."""
        self.store.put(f"target/{name}", self.source / name)

    def download(self, name: str) -> None:
        """Make a local file from an object, durably."""
        path = self.target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as stream:
            stream.write(self.store.get(f"source/{name}").bytes())
            os.fsync(stream.fileno())

    def copy(self, name: str) -> None:
        """Download an object and upload it."""
        self.store.put(f"target/{name}", self.store.get(f"source/{name}").bytes())

    def remove(self, prefix: str) -> None:
        """Remove what a run made, in the bucket or here."""
        for page in self.store.list(prefix):
            self.store.delete([one["path"] for one in page])
        shutil.rmtree(self.target, ignore_errors=True)

    def run(self, verb: str, source: str | Path, target: str | Path) -> tuple[float, Counter[str]]:
        """Run a verb; returns its seconds, and its requests."""
        name, *options = VERBS[verb]
        options += ["--workers", str(self.workers), "--json"]
        self.server.delay(self.milliseconds)
        report = succeed(*STREAMSHARD, name, source, target, *options).report
        return report["seconds"], self.server.delay(self.milliseconds)

    def compare(self, milliseconds: float, runs: int) -> list[list[str]]:
        """Run everything with a latency; returns the table's rows."""
        self.milliseconds = milliseconds
        ways = (
            ("bucket -> bucket", _SOURCE, _TARGET, self.copy),
            ("bucket -> local", _SOURCE, self.target, self.download),
            ("local -> bucket", self.source, _TARGET, self.again),
        )
        rows = []
        for way, source, target, bare in ways:
            times: dict[str, list[float]] = {verb: [] for verb in ("", *VERBS)}
            requests: dict[str, Counter[str]] = {}
            for _ in range(runs):
                warm(self.source)
                self.server.delay(milliseconds)
                times[""].append(self.each(bare))
                for verb in VERBS:
                    self.server.delay()
                    self.remove("target")
                    seconds, requests[verb] = self.run(verb, source, target)
                    times[verb].append(seconds)
                self.server.delay()
                self.remove("target")
            for verb in VERBS:
                rows.append([verb, way, f"{milliseconds:g}", *self._speeds(times, verb)])
                rows[-1].append(_shown(requests[verb]))
        return rows

    def _speeds(self, times: dict[str, list[float]], verb: str) -> list[str]:
        ratios = [bare / own for own, bare in zip(times[verb], times[""], strict=True)]
        speeds = [self.nbytes / statistics.median(times[key]) / 1e6 for key in (verb, "")]
        return [*(f"{speed:.0f}" for speed in speeds), f"{statistics.median(ratios):.2f}"]

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
    parser.add_argument("--size", default="400MB", help="size of the checkpoint [400MB]")
    parser.add_argument("--short", action="store_true", help=f"{SHORT}, one round")
    parser.add_argument("--latency", default="0,20,80", help="ms a request [0,20,80]")
    parser.add_argument("--workers", type=int, default=WORKERS, help=f"[{WORKERS}]")
    parser.add_argument("--runs", type=int, default=3, help="rounds [3]")
    parser.add_argument("--directory", type=Path, help="where to work [a temporary directory]")
    given = parser.parse_args()
    size, runs = (SHORT, 1) if given.short else (given.size, given.runs)
    latencies = [float(latency) for latency in given.latency.split(",")]
    print(machine())
    with tempfile.TemporaryDirectory(dir=given.directory) as directory, bucket() as server:
        bench = Bench(server, Path(directory), sizes.parse(size), given.workers)
        print(f"{bench.nbytes:,} bytes of {FROM} ranks, {given.workers} workers, {runs} rounds")
        for latency in (0, *latencies):
            print(f"inspect, {latency:g} ms a request: {bench.inspect(latency)}")
        rows = [row for latency in latencies for row in bench.compare(latency, runs)]
    print_table(HEAD, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
