"""What an executor promises of its jobs, however workers and their leader fare."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from streamshard.cluster import dask_executor
from streamshard.cluster.dask_executor import DaskExecutor
from streamshard.engine.jobs.executor import Host, Toolkit
from streamshard.errors import ClusterError
from tests.cluster.conftest import started
from tests.cluster.workers import PAUSE, ROOT

LEADER = """
import sys
from pathlib import Path
from distributed import Client
from tests.cluster.test_jobs import hanging
if __name__ == "__main__":
    next(hanging(Client(sys.argv[1]), Path(sys.argv[2])))
"""


@dataclass(frozen=True)
class Witness:
    """Tools that leave a sign of what they do."""

    place: Path
    stop: threading.Event

    def settle(self) -> None:
        """Read nothing."""

    def close(self) -> None:
        """Leave a sign."""
        (self.place / "closed").touch()

    def work(self, number: int) -> int:
        """Do nothing."""
        return number

    def die(self, times: int) -> int:
        """Kill the process, so many times; then return how often that was."""
        deaths = len(list(self.place.glob("death.*")))
        if deaths < times:
            (self.place / f"death.{deaths}").touch()
            os._exit(1)
        return deaths

    def freeze(self) -> str:
        """Stop the process as `kill -STOP` does, once."""
        try:
            (self.place / "begun").touch(exist_ok=False)
        except FileExistsError:
            return "done by another"
        os.kill(os.getpid(), signal.SIGSTOP)
        return "woken up"

    def hang(self) -> None:
        """Work until it is stopped."""
        (self.place / "begun").touch()
        self.stop.wait()
        (self.place / "stopped").touch()


@dataclass(frozen=True)
class Witnesses(Toolkit[Witness]):
    """Describes witnesses."""

    place: Path

    def prove(self) -> str:
        """Leave a sign."""
        (self.place / f"proof.{time.monotonic_ns()}").touch()
        return "seen"

    def accept(self, evidence: str) -> None:
        """Accept what `prove` returned."""
        assert evidence == "seen"

    def make(self, host: Host) -> Witness:
        """Make a witness."""
        return Witness(self.place, host.stop)


def results(
    client: Client, place: Path, jobs: Iterator[Any] | list[Any], *, is_ordered: bool = False
) -> Any:  # noqa: ANN401
    """Run jobs on a cluster."""
    options: dict[str, Any] = {"workers": 2, "progress": lambda nbytes: None}
    return DaskExecutor(client).run(jobs, Witnesses(place), is_ordered=is_ordered, **options)


def hanging(client: Client, place: Path) -> Any:  # noqa: ANN401
    """Run a job that never ends."""
    return results(client, place, [Witness.hang])


def numbers(count: int) -> list[Any]:
    return [partial(Witness.work, number=number) for number in range(count)]


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(PAUSE)


@pytest.mark.parametrize("is_ordered", [True, False])
def test_order_and_barriers(cluster: Client, tmp_path: Path, is_ordered: bool) -> None:
    jobs = [*numbers(20), None, *numbers(40)[20:]]
    found = list(results(cluster, tmp_path, jobs, is_ordered=is_ordered))
    wanted = [(number, number) for number in range(40)]
    assert (found if is_ordered else sorted(found)) == wanted
    assert sorted(found[:20]) == wanted[:20]


@pytest.mark.parametrize("is_ordered", [True, False])
def test_only_a_few_jobs_are_under_way(cluster: Client, tmp_path: Path, is_ordered: bool) -> None:
    begun = 0

    def jobs() -> Iterator[Any]:
        nonlocal begun
        for job in numbers(100):
            begun += 1
            yield job

    for count, _ in enumerate(results(cluster, tmp_path, jobs(), is_ordered=is_ordered)):
        assert begun - count <= 5  # two workers of one thread have four, and one more is made


def test_a_job_goes_to_a_worker_that_came_later_if_its_own_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dask_executor, "_SILENT_SECONDS", 2.0)
    with started(1) as client, ThreadPoolExecutor() as pool:
        found = pool.submit(list, results(client, tmp_path, [Witness.freeze]))
        wait_for(tmp_path / "begun")
        untyped: Any = client
        untyped.cluster.scale(2)
        assert found.result() == [(0, "done by another")]


def test_a_worker_that_hangs_is_waited_for_only_for_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(1) as client:
        list(results(client, tmp_path, numbers(1)))  # who has imported all answers at once
        monkeypatch.setattr(dask_executor, "_PROOF_SECONDS", 2.0)
        untyped: Any = client
        os.kill(next(iter(untyped.cluster.workers.values())).pid, signal.SIGSTOP)
        found = results(client, tmp_path, numbers(3))
        with pytest.raises(ClusterError, match="has not answered for 2 seconds"):
            next(found)


def test_a_job_that_kills_its_workers_ends_the_run(tmp_path: Path) -> None:
    job = partial(Witness.die, times=100)
    with started(1) as client, pytest.raises(ClusterError, match="run out of memory"):
        list(results(client, tmp_path, [job]))
    assert 4 <= len(list(tmp_path.glob("death.*"))) <= 8


def test_a_run_that_ends_stops_its_jobs(cluster: Client, tmp_path: Path) -> None:
    run = results(cluster, tmp_path, [partial(Witness.work, number=0), Witness.hang])
    next(run)
    wait_for(tmp_path / "begun")
    run.close()
    wait_for(tmp_path / "stopped")


def test_a_leader_that_is_killed_leaves_no_job(cluster: Client, tmp_path: Path) -> None:
    address = cluster.scheduler_info()["address"]
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER, address, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    wait_for(tmp_path / "begun")
    leader.kill()
    leader.wait()
    wait_for(tmp_path / "stopped")


def test_a_worker_that_had_nothing_to_do_for_long_takes_part_again(tmp_path: Path) -> None:
    def impatient() -> None:
        from streamshard.cluster import worker_run

        worker_run.__dict__["_IDLE_SECONDS"] = 2.0

    with started(1) as client:
        untyped: Any = client
        untyped.run(impatient)
        found = results(client, tmp_path, numbers(20))
        before = [next(found)]
        wait_for(tmp_path / "closed")
        assert sorted([*before, *found]) == [(number, number) for number in range(20)]
    assert len(list(tmp_path.glob("proof.*"))) > 1
