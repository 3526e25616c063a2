"""Clusters of real processes, one of each size for all tests of this folder."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster

import streamshard
from streamshard.transfer import file_layout
from tests.cluster.workers import addresses

SPAN_BYTES = 4096
"""Files are cut into many spans."""
QUIET = {
    "distributed.worker.profile.enabled": False,
    "distributed.admin.system-monitor.interval": "20s",
    "distributed.admin.tick.interval": "1s",
}
"""Processes that wait take a tenth of a core for what no test asks about."""


@contextmanager
def started(
    workers: int,
    threads: int = 1,
    method: str = "forkserver",
    **options: Any,  # noqa: ANN401
) -> Iterator[Client]:
    """Start a cluster, and connect to it.

    Its processes are forked from one that has imported Dask, with the environment of the first
    start; with the method "spawn" they start from nothing.
    """
    start: Any = LocalCluster
    connect: Any = Client
    quiet = {"dashboard_address": "127.0.0.1:0", "memory_limit": 0, "silence_logs": "CRITICAL"}
    with (
        dask.config.set({"distributed.worker.multiprocessing-method": method, **QUIET}),
        start(n_workers=workers, threads_per_worker=threads, **quiet, **options) as cluster,
        connect(cluster, set_as_default=False) as client,
    ):
        yield client


@pytest.fixture(scope="package")
def clusters() -> Iterator[Any]:
    """Return a client of a cluster with so many workers."""
    with ExitStack() as stack:
        yield cache(lambda workers: stack.enter_context(started(workers, 1 + workers % 2)))


@pytest.fixture
def cluster(clusters: Any) -> Client:  # noqa: ANN401
    """Two workers."""
    client: Client = clusters(2)
    return client


@pytest.fixture
def many_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut files into many spans. This happens where the run is led, so workers need not know."""
    monkeypatch.setattr(file_layout, "SPAN_BYTES", SPAN_BYTES)


def on(client: Client, verb: str, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
    """Run a verb on a cluster; each worker must have had a part of it, and nothing is left."""
    with streamshard.executor(client) as chosen:
        found = getattr(streamshard, verb)(*arguments, **options)
    assert sum(rate.jobs for rate in chosen.rates.values()) > 0
    assert chosen.rates.keys() <= addresses(client)
    return found


def names(place: Path) -> list[str]:
    """List what is at a place."""
    return sorted(path.name for path in place.iterdir())
