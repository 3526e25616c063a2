"""A Dask cluster on this machine, for as long as something is measured."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from distributed import Client, LocalCluster


@contextmanager
def local_cluster(workers: int, threads: int, *, processes: bool = True) -> Iterator[Client]:
    """Start workers; yields a client."""
    start: Any = LocalCluster
    connect: Any = Client
    with (
        start(
            n_workers=workers,
            threads_per_worker=threads,
            processes=processes,
            dashboard_address="127.0.0.1:0",
            memory_limit=0,
        ) as cluster,
        connect(cluster, set_as_default=False) as client,
    ):
        yield client
