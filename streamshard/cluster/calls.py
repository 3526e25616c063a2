"""Calls to a Dask cluster: what is sent, and the errors that they end with."""

import asyncio
import io
import pickle
from collections.abc import Callable, Coroutine, Iterable
from concurrent import futures
from pathlib import PosixPath
from typing import Any, Final

from distributed import KilledWorker
from distributed.comm.core import CommClosedError

from streamshard.errors import ClusterError, UsageError

DaskClient = Any
DaskFuture = Any
"""Dask's own types. Their methods have no types."""
CallFuture = futures.Future[Any]

_SILENT_SECONDS: Final = 300.0
"""A scheduler that is busy, and alive, answers sooner."""


class _AbsolutePathPickler(pickle.Pickler):
    """Makes paths absolute: workers have other working directories."""

    def reducer_override(self, obj: object) -> Any:  # noqa: ANN401
        if type(obj) is PosixPath and not obj.is_absolute():
            return PosixPath, (str(obj.absolute()),)
        return NotImplemented


def serialized(data: object) -> bytes:
    """Return a job, a toolkit, or what else workers are to know, as bytes."""
    buffer = io.BytesIO()
    _AbsolutePathPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(data)
    return buffer.getvalue()


def begin(client: DaskClient, call: Coroutine[Any, Any, Any]) -> CallFuture:
    """Let Dask's own thread wait for a call."""
    return asyncio.run_coroutine_threadsafe(call, client.loop.asyncio_loop)


def cancel(client: DaskClient, jobs: Iterable[DaskFuture]) -> None:
    """Cancel jobs, without waiting: workers stop them within one window."""
    cancelled = list(jobs)
    if cancelled and client.status == "running":
        begin(client, client.cancel(cancelled, asynchronous=True, reason="not needed"))


def workers_of(client: DaskClient) -> dict[str, dict[str, Any]]:
    """Return what the scheduler says of each of its workers, by address."""
    address = client.scheduler.address
    question: Callable[..., Any] = client.scheduler.identity
    try:
        answer = client.sync(question, n_workers=-1, callback_timeout=_SILENT_SECONDS)
    except TimeoutError:
        what = f"{address}: the scheduler has not answered for {_SILENT_SECONDS:.0f} seconds"
        how = "Let it go on, start another one, or run without a cluster"
        raise _lost(f"{what}. {how}") from None
    except OSError as error:
        raise _lost(f"{address}: the scheduler does not answer ({error})") from error
    return dict(answer["workers"])


def readable_error(error: BaseException, worker: str = "a worker") -> BaseException:
    """Return the error to raise for one that a worker or the scheduler met."""
    if isinstance(error, KilledWorker):
        return workers_died(str(error))
    if isinstance(error, (CommClosedError, asyncio.CancelledError, futures.CancelledError)):
        return _lost("the connection to the cluster's scheduler is lost, or it was restarted")
    # A scheduler that does not know an exception's class passes on its text, as an `Exception`.
    is_import_error = isinstance(error, (ImportError, AttributeError)) or type(error) is Exception
    if is_import_error and "streamshard" in str(error):
        return UsageError(f"{worker}: has no streamshard, or another version of it ({error})")
    if isinstance(error, RuntimeError) and "deserialization" in str(error):
        message = "the scheduler has no streamshard, or another version of it, or of Dask"
        return UsageError(f"{message} ({error.__cause__ or error})")
    return error


def workers_died(reason: str) -> ClusterError:
    """Return the error for a job that is not tried again."""
    message = "all workers that were given one of the jobs died"
    return ClusterError(f"{message}. Did they run out of memory? ({reason})")


def _lost(what: str) -> ClusterError:
    """Return the error for a cluster that is lost while a run is under way."""
    return ClusterError(f"{what}; run the same command again to go on")
