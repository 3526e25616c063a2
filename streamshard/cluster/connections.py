"""Connects to Dask clusters, and lets verbs run on them."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from streamshard.batches import mapped_by
from streamshard.engine.jobs.batch_jobs import on_workers
from streamshard.engine.jobs.executor import runs_on
from streamshard.errors import ClusterError, Option, UsageError
from streamshard.io.entries import exists

if TYPE_CHECKING:
    from distributed import Client

    from streamshard.cluster.dask_executor import DaskExecutor

_LOCAL: Final = "local:"
_HEEDS_NO_INTERRUPT: Final = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
"""A terminal sends Ctrl-C to all processes; only the one that leads the run is to act on it."""
_CONNECT_SECONDS: Final = 30


@contextmanager
def executor(client: "Client | str", *, workers: int | None = None) -> Iterator["DaskExecutor"]:
    """Let verbs run on a Dask cluster, as long as the context lasts; files come out the same.

    All processes must see the source and the target at the same paths, and have the same versions
    of streamshard and Python: each shows this before it gets work.

    Parameters
    ----------
    client
        A client of the cluster, which stays open; or the address of a
        scheduler, the path of a scheduler file, or `local:N` for N new processes of this machine.
    workers
        Threads of each process of `local:N`; by default one.

    Raises
    ------
    UsageError
        Dask is not installed, or there is no such address.
    ClusterError
        Nobody answers at the address.

    Examples
    --------
    >>> import streamshard
    >>> with streamshard.executor("local:2"):
    ...     report = streamshard.convert("runs/7b", "7b.zarr")
    """
    try:
        from distributed import Client

        from streamshard.cluster.dask_executor import DaskExecutor
    except ImportError as error:
        message = "a Dask cluster needs Dask: pip install 'streamshard[dask]'"
        raise UsageError(f"{message} ({error})") from error
    with ExitStack() as stack:
        if isinstance(client, str):
            client = stack.enter_context(_connected(client, workers or 1))
        elif not isinstance(client, Client):
            raise UsageError(f"executor({client!r}): a dask.distributed.Client, or an address")
        chosen = DaskExecutor(client)
        stack.enter_context(runs_on(chosen))
        stack.enter_context(mapped_by(on_workers()))
        yield chosen


@contextmanager
def _connected(address: str, threads: int) -> Iterator["Client"]:
    from distributed import Client

    with ExitStack() as stack:
        if address.startswith(_LOCAL):
            where = {"address": stack.enter_context(_local_cluster(address, threads))}
        elif address.endswith(".json"):
            if not exists(Path(address)):
                message = f"{Option('address', address)}: no such file; has the scheduler started?"
                raise UsageError(message)
            where = {"scheduler_file": address}
        elif ":" in address:
            where = {"address": address}
        else:
            message = "an address (tcp://host:8786), a scheduler file (*.json) or local:N"
            raise UsageError(f"{Option('address', address)}: not {message}")
        stack.enter_context(_silent_client())
        try:
            options = {"timeout": _CONNECT_SECONDS, "set_as_default": False}
            connect: Any = Client
            client = stack.enter_context(connect(**where, **options))
        except (OSError, ValueError) as error:
            raise ClusterError(f"{Option('address', address)}: nobody answers ({error})") from error
        yield client


@contextmanager
def _silent_client() -> Iterator[None]:
    """Keep Dask's client from logging tracebacks: the run's own error says what happened."""
    loggers = [logging.getLogger(name) for name in ("distributed", "distributed.client")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextmanager
def _local_cluster(address: str, threads: int) -> Iterator[str]:
    """Start processes on this machine; yields the address of their scheduler."""
    from distributed import LocalCluster

    number = address.removeprefix(_LOCAL)
    if not number.isdecimal() or not int(number):
        raise UsageError(f"{Option('address', address)}: local:N, with the number of processes")
    start: Any = LocalCluster
    with start(
        n_workers=int(number),
        threads_per_worker=threads,
        host="127.0.0.1",  # whoever reaches a scheduler can run what they like
        dashboard_address="127.0.0.1:0",
        memory_limit=0,  # each run has a limit of its own
        silence_logs="CRITICAL",  # workers that lose their scheduler at the end say so
        preload=[_HEEDS_NO_INTERRUPT],
    ) as cluster:
        yield str(cluster.scheduler_address)
