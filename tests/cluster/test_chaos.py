"""Workers are killed, retired and stopped at random instants: not a byte is wrong."""

import asyncio
import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import dask.config
import pytest
from distributed import Client

import streamshard
from streamshard.cluster import dask_executor
from streamshard.cluster.dask_executor import DaskExecutor
from streamshard.engine.jobs.executor import runs_on
from streamshard.engine.run.phases import Silent
from tests.cli.conftest import tree
from tests.cluster.conftest import names, started
from tests.cluster.workers import addresses
from tests.fabricated import write
from tests.job import Job

RUNS = 300 if "EVERY_REQUEST" in os.environ else 12
RATE = 100_000
"""Bytes a second of each worker, so that what happens to it happens within a job."""

SOON_LOST = {"distributed.scheduler.worker-ttl": "5s"}
"""Dask takes a worker that does not answer for lost."""

pytestmark = pytest.mark.usefixtures("many_spans")

VERBS: dict[str, Callable[..., Any]] = {
    "repartition": lambda run, out, shown: streamshard.repartition(
        run, out, world_size=3, zero_stage=2, progress=shown
    ),
    "convert": lambda run, out, shown: streamshard.convert(
        run, out, codec="zstd", chunk_size=2048, progress=shown
    ),
    "export": lambda run, out, shown: streamshard.export(run, out, progress=shown),
}


class Chaos(Silent):
    """Progress at two steps of which, that a seed chooses, something happens to a worker."""

    def __init__(self, client: Client, seed: int) -> None:
        self._client: Any = client
        self._random = random.Random(seed)
        later = self._random.randrange(4, 30)
        self._steps = [self._random.randrange(1, 4), later]
        self._step = 0
        self._stopped: list[int] = []
        self.happened: list[str] = []

    def advance(self, nbytes: int) -> None:
        """Count a step."""
        self._step += 1
        while self._steps and self._step >= self._steps[0]:
            self._steps.pop(0)
            self._happen()

    def _happen(self) -> None:
        """Kill, stop or retire a worker that is at work; another one always stays."""
        nannies = self._client.cluster.workers.values()
        pids = {nanny.worker_address: nanny.pid for nanny in nannies if nanny.pid is not None}
        known = addresses(self._client) & pids.keys()
        working = sorted(one for one in known if pids[one] not in self._stopped)
        if len(working) < 2:
            return
        address = self._random.choice(working)
        what = self._random.choice(["kill", "retire", "hang"])
        self.happened.append(what)
        if what == "retire":
            # Without waiting: a worker that is to take over what this one holds may hang.
            retiring = self._client.scheduler.retire_workers(workers=[address], close_workers=True)
            asyncio.run_coroutine_threadsafe(retiring, self._client.loop.asyncio_loop)
            self._client.cluster.scale(3 + len(self._stopped))
            return
        pid = pids[address]
        os.kill(pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        if what == "hang":
            self._stopped.append(pid)

    def wake(self) -> None:
        """Let workers go on that were stopped."""
        for pid in self._stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(1, RUNS))]
)
def test_workers_that_die_leave_and_hang_do_no_harm(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dask_executor, "_SILENT_SECONDS", 4.0)
    run = write(Job(stage=3), tmp_path / "run")
    verb = list(VERBS.values())[seed % len(VERBS)]
    verb(run, tmp_path / "near", None)
    with dask.config.set(SOON_LOST), started(3, threads=2) as client:
        chaos = Chaos(client, seed)
        try:
            with runs_on(DaskExecutor(client, worker_bytes_per_second=RATE)):
                verb(run, tmp_path / "far", chaos)
        finally:
            chaos.wake()
    assert chaos.happened
    assert tree(tmp_path / "far") == tree(tmp_path / "near")
    assert names(tmp_path) == ["far", "near", "run"]
