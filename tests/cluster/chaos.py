"""Workers that die, hang and leave while a run goes on, at instants that a seed chooses."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from distributed import Client, LocalCluster

from streamshard.operations.transfer.report import Silent
from tests.cluster.workers import addresses


class Chaos(Silent):
    """Progress at whose seeded steps something happens to a worker.

    Parameters
    ----------
    events
        How often something happens.
    """

    def __init__(self, client: Client, cluster: LocalCluster, seed: int, events: int = 2) -> None:
        self._client: Any = client
        self._cluster: Any = cluster
        self._random = random.Random(seed)
        later = [self._random.randrange(4, 30) for _ in range(events - 1)]
        self._steps = [self._random.randrange(1, 4), *sorted(later)]
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
        nannies = self._cluster.workers.values()
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
            self._cluster.scale(3 + len(self._stopped))
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


@contextmanager
def fragile(workers: int = 3) -> Iterator[tuple[Client, LocalCluster]]:
    """Start a cluster that may be broken."""
    start: Any = LocalCluster
    connect: Any = Client
    options: dict[str, Any] = {"dashboard_address": "127.0.0.1:0", "memory_limit": 0}
    with (
        start(n_workers=workers, threads_per_worker=2, silence_logs="CRITICAL", **options) as made,
        connect(made, set_as_default=False) as client,
    ):
        yield client, made
