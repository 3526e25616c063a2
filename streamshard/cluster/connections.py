"""Connects to Dask clusters, and lets verbs run on them."""

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from streamshard.engine.jobs.executor import runs_on
from streamshard.errors import ClusterError, Option, UsageError
from streamshard.io.entries import exists, read_document

if TYPE_CHECKING:
    from distributed import Client

    from streamshard.cluster.dask_executor import DaskExecutor

_LOCAL: Final = "local:"
_HEEDS_NO_INTERRUPT: Final = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
"""A terminal sends Ctrl-C to all processes; only the one that leads the run is to act on it."""
_CONNECT_SECONDS: Final = 30
_TLS: Final = "DASK_DISTRIBUTED__COMM__TLS"


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
        yield chosen


@contextmanager
def _connected(address: str, threads: int) -> Iterator["Client"]:
    from distributed import Client

    with ExitStack() as stack:
        if address.startswith(_LOCAL):
            scheduler = stack.enter_context(_local_cluster(address, threads))
        elif address.endswith(".json"):
            scheduler = _address_in(Path(address))
        elif ":" in address:
            scheduler = address
        else:
            message = "an address (tcp://host:8786), a scheduler file (*.json) or local:N"
            raise UsageError(f"{Option('address', address)}: not {message}")
        _require_encryption(scheduler)
        stack.enter_context(_silent_client())
        try:
            options = {"timeout": _CONNECT_SECONDS, "set_as_default": False}
            connect: Any = Client
            client = stack.enter_context(connect(scheduler, **options))
        except (OSError, ValueError) as error:
            raise ClusterError(f"{Option('address', address)}: nobody answers ({error})") from error
        yield client


def _address_in(path: Path) -> str:
    """Return the address in a file that a scheduler has written."""
    option = Option("address", path)
    if not exists(path):
        raise UsageError(f"{option}: no such file; has the scheduler started?")
    try:
        return str(json.loads(read_document(path))["address"])
    except (ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{option}: not a file that a Dask scheduler has written") from error


def _require_encryption(address: str) -> None:
    """Refuse an address that Dask's settings here do not allow a client to connect to."""
    from distributed.security import Security

    option = Option("address", address)
    try:
        untyped: Any = Security
        settings = untyped().get_connection_args("client")
    except (OSError, ValueError) as error:
        raise UsageError(f"{option}: Dask's certificate or key cannot be read ({error})") from error
    if address.startswith("tls://") and settings["ssl_context"] is None:
        raise UsageError(
            f"{option}: the scheduler takes only whoever has its key, and Dask's settings here "
            f"name none. Set {_TLS}__CA_FILE, {_TLS}__CLIENT__CERT and {_TLS}__CLIENT__KEY"
        )
    if settings["require_encryption"] and not address.startswith("tls://"):
        message = "Dask's settings here require encryption, and the address does not begin with"
        raise UsageError(f"{option}: {message} tls://")


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
