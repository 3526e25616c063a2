"""Calls functions on the workers of a Dask cluster, and hands on what comes of them, one by one."""

import asyncio
import queue
from collections.abc import Callable, Collection, Iterable
from concurrent import futures
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import dask.config
from distributed.comm.core import CommClosedError

from streamshard.errors import ClusterError

DaskClient = Any
CallFuture = Any
"""Dask's own types: a client, and the future of a call. Their methods have no types."""

POLL_SECONDS: Final = 0.5
_SILENT_SECONDS: Final = 300.0
"""A scheduler that is busy, and alive, answers sooner."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that has happened in the cluster."""

    subject: Any
    """What the call was made for; None for a poll: `found` says what workers there are."""
    future: CallFuture
    found: Any
    """The result of the call, or the error."""


class Calls:
    """The calls of one run. Dask's own thread waits for results; the run's thread takes them."""

    def __init__(self, client: DaskClient, token: str) -> None:
        self.client = client
        self._address = client.scheduler.address
        self._token = token
        self._numbers = count(1)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._loop = client.loop.asyncio_loop
        self._polling = asyncio.run_coroutine_threadsafe(self._poll(), self._loop)

    def begin(
        self,
        subject: object,
        function: Callable[..., object],
        *arguments: object,
        workers: Collection[str],
        priority: int = 0,
    ) -> CallFuture:
        """Call a function on one of these workers; an event says what came of it."""
        with _large_graphs():
            future = self.client.submit(
                function,
                *arguments,
                key=f"streamshard-{function.__name__}-{self._token}-{next(self._numbers)}",
                workers=sorted(workers),
                allow_other_workers=False,
                priority=priority,
                pure=False,
            )
        asyncio.run_coroutine_threadsafe(self._fetch(subject, future), self._loop)
        return future

    def next(self) -> Event:
        """Wait for the next event."""
        try:
            event = self._events.get(timeout=_SILENT_SECONDS)
        except queue.Empty:
            raise _silent(self._address) from None
        if event.subject is None and isinstance(event.found, BaseException):
            raise lost(f"{self._address}: the scheduler does not answer ({event.found})")
        return event

    def take_back(self, left: Iterable[CallFuture]) -> None:
        """Take calls back, without waiting: workers stop them within one window."""
        taken = list(left)
        if taken and self.client.status == "running":
            cancelling = self.client.cancel(taken, asynchronous=True, reason="not needed")
            asyncio.run_coroutine_threadsafe(cancelling, self._loop)

    def close(self) -> None:
        """End the polls."""
        self._polling.cancel()

    async def _fetch(self, subject: object, future: CallFuture) -> None:
        found: Any
        try:
            found = await self.client.gather(future, asynchronous=True)
        except CommClosedError as error:
            found = lost("the connection to the cluster's scheduler is lost")
            found.__cause__ = error
        except BaseException as error:  # whatever it is, the run's thread is to have it
            found = error
        self._events.put(Event(subject, future, found))

    async def _poll(self) -> None:
        """Find out now and then what workers there are."""
        while True:
            found: Any
            try:
                found = await self.client.scheduler.identity(n_workers=-1)
            except (TimeoutError, OSError) as error:
                found = error
            self._events.put(Event(None, None, found))
            await asyncio.sleep(POLL_SECONDS)


def asked(client: DaskClient, question: Callable[..., Any]) -> Any:  # noqa: ANN401
    """Return what the scheduler answers to a question of its own interface."""
    address = client.scheduler.address
    try:
        return client.sync(question, workers=None, callback_timeout=_SILENT_SECONDS)
    except TimeoutError:
        raise _silent(address) from None
    except OSError as error:
        raise lost(f"{address}: the scheduler does not answer ({error})") from error


def is_cancelled(error: object) -> bool:
    """Tell whether a call was taken back, by whoever did it."""
    return isinstance(error, (asyncio.CancelledError, futures.CancelledError))


def lost(what: str) -> ClusterError:
    """Return the error for a cluster that is lost while a run is under way."""
    return ClusterError(f"{what}; run the same command again to go on")


def _silent(address: str) -> ClusterError:
    """Return the error for a scheduler that is connected and says nothing."""
    what = f"{address}: the scheduler has not answered for {_SILENT_SECONDS:.0f} seconds"
    return lost(f"{what}. Let it go on, start another one, or run without a cluster")


def _large_graphs() -> AbstractContextManager[object]:
    """Let a job be large: a checkpoint's training state is sent with the file that it is for."""
    return dask.config.set({"distributed.admin.large-graph-warning-threshold": "1 TiB"})
