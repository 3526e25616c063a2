"""Runs jobs on the workers of a Dask cluster.

Dask gives calls to workers, gives those of a lost worker to another one, and keeps results until
they are fetched. What is decided here: how many jobs are under way; that a job which takes much
longer than others is given to a second worker too; and when to give up.
"""

import io
import pickle
import secrets
import statistics
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Set
from dataclasses import dataclass, field
from pathlib import PosixPath
from typing import Any, Final

from distributed import KilledWorker

from streamshard.cluster.calls import (
    CallFuture,
    Calls,
    DaskClient,
    Event,
    asked,
    is_cancelled,
    lost,
)
from streamshard.cluster.membership import Membership, most_threads, readable_error
from streamshard.cluster.worker_rate import WorkerRate
from streamshard.cluster.worker_run import Outcome, RunSpec, UnknownRunError, perform
from streamshard.engine.jobs.executor import Job, R, T, Toolkit, rate_limit
from streamshard.errors import ClusterError
from streamshard.io.retry import StoppedError
from streamshard.io.throttle import without_throttle

_MOST_LOSSES: Final = 3
"""How often a job is tried again after Dask has given it up, because its workers died."""
_SLOW_SECONDS: Final = 15.0
_SLOW_FACTOR: Final = 4
"""A job is given to a second worker when it takes longer than these seconds, and longer than this
multiple of what jobs usually take."""


@dataclass(eq=False, slots=True)
class _Try:
    """A call for a job; one of the workers that it may go to carries it out."""

    future: CallFuture
    workers: frozenset[str]
    began: float


@dataclass(eq=False, slots=True)
class _Task:
    """A job that is under way."""

    number: int
    blob: bytes
    losses: int = 0
    tries: list[_Try] = field(default_factory=list)
    """More than one if a worker is slow."""


class _AbsolutePathPickler(pickle.Pickler):
    """Makes paths absolute: workers have other working directories."""

    def reducer_override(self, obj: object) -> Any:  # noqa: ANN401
        if type(obj) is PosixPath and not obj.is_absolute():
            return PosixPath, (str(obj.absolute()),)
        return NotImplemented


def _serialized(data: object) -> bytes:
    buffer = io.BytesIO()
    _AbsolutePathPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(data)
    return buffer.getvalue()


class DaskExecutor:
    """Runs jobs on a cluster; see `Executor`.

    `client`: what is connected to the cluster. It stays open.
    `worker_bytes_per_second`: limit of each worker; by default none.
    """

    shares_memory = False

    def __init__(self, client: DaskClient, *, worker_bytes_per_second: int | None = None) -> None:
        self._client = client
        self._worker_rate = worker_bytes_per_second
        self._name = secrets.token_hex(8)
        self.rates: dict[str, WorkerRate] = {}
        """Address of a worker → what it has done."""

    @property
    def workers(self) -> int:
        """Threads of the largest worker; waits until there is one."""
        return most_threads(self._client)

    def run(
        self,
        jobs: Iterable[Job[T, R] | None],
        toolkit: Toolkit[T],
        *,
        workers: int,
        progress: Callable[[int], None],
        is_ordered: bool = False,
        needed_bytes: int = 0,
    ) -> Generator[tuple[int, R], None, None]:
        """Run all jobs; see `Executor`."""
        spec = RunSpec(secrets.token_hex(8), self._name, workers, needed_bytes)
        run = _ClusterRun(self._client, toolkit, spec, self._worker_rate, self.rates)
        try:
            for number, outcome in run.outcomes(jobs, is_ordered=is_ordered):
                with without_throttle():
                    progress(outcome.nbytes)
                yield number, outcome.result
        finally:
            run.close()


class _ClusterRun:
    """One run on a cluster. All of it happens in the thread that takes the results."""

    def __init__(
        self,
        client: DaskClient,
        toolkit: Toolkit[Any],
        spec: RunSpec,
        worker_rate: int | None,
        rates: dict[str, WorkerRate],
    ) -> None:
        self._spec = spec
        self._calls = Calls(client, spec.token)
        kit = (toolkit, _serialized(toolkit))
        self._members = Membership(self._calls, kit, _serialized(spec))
        self._worker_rate = worker_rate
        self._rates = rates
        self._tasks: set[_Task] = set()
        self._usual: deque[float] = deque(maxlen=64)
        """Seconds that the last jobs took."""

    def outcomes(
        self, jobs: Iterable[Job[Any, Any] | None], *, is_ordered: bool
    ) -> Iterator[tuple[int, Outcome]]:
        """Yield the number and the outcome of each job."""
        while not self._members.may_begin():
            self._next()
        left = _numbered(jobs)
        ready: dict[int, Outcome] = {}
        due, waiting = 0, next(left, None)
        while waiting is not None or self._tasks:
            while waiting is not None and self._has_room(len(ready), is_barrier=waiting[2]):
                self._submit(_Task(waiting[0], waiting[1]))
                waiting = next(left, None)
            found = self._next()
            if found is not None:
                ready[found[0]] = found[1]
            if not is_ordered:
                yield from ready.items()
                ready.clear()
            while due in ready:
                yield due, ready.pop(due)
                due += 1

    def _has_room(self, held: int, *, is_barrier: bool) -> bool:
        """Tell whether another job may be begun now."""
        workers = self._members.fit()
        if is_barrier or not workers:
            return bool(workers) and not self._tasks
        most = self._spec.workers
        room = sum(min(self._members.threads_of(one), most) + 1 for one in workers)
        return len(self._tasks) + held < room

    def _submit(self, task: _Task, workers: Set[str] | None = None) -> None:
        """Give a job to one of these workers: by default of all that may have jobs."""
        fit = frozenset(self._members.fit() if workers is None else workers)
        arguments = (self._spec.token, task.blob, self._share())
        future = self._calls.begin(task, perform, *arguments, workers=fit)
        task.tries.append(_Try(future, fit, time.monotonic()))
        self._tasks.add(task)

    def _share(self) -> float | None:
        """Return how many bytes a second each worker may process now, whoever there is."""
        total = rate_limit()
        if total is None:
            return self._worker_rate
        return min(total / max(1, len(self._members.addresses)), self._worker_rate or total)

    def _next(self) -> tuple[int, Outcome] | None:
        """Wait for something to happen; returns the outcome of a job if it is that."""
        event = self._calls.next()
        if isinstance(event.subject, _Task):
            return self._take_try(event.subject, event)
        if event.subject is None:
            self._members.take_poll(event.found)
            self._replace_lost()
            self._help_slow_ones()
        else:
            self._members.take_proof(event)
        return None

    def _take_try(self, task: _Task, event: Event) -> tuple[int, Outcome] | None:
        one = next((one for one in task.tries if one.future is event.future), None)
        if one is None:
            return None  # another try was faster, or this one was taken back
        task.tries.remove(one)
        found = event.found
        if not isinstance(found, Outcome):
            self._require_bearable(found)
            if not task.tries:
                self._try_again(task, found)
            return None
        self._members.accept(found)
        self._calls.take_back(other.future for other in task.tries)
        task.tries.clear()  # what comes of them does not count any more
        self._tasks.discard(task)
        self._usual.append(found.seconds)
        self._rates.setdefault(found.worker, WorkerRate()).add(found.nbytes, found.seconds)
        return task.number, found

    def _require_bearable(self, error: BaseException) -> None:
        """Raise any error but the loss of a worker, or of what it held."""
        if isinstance(error, (KilledWorker, StoppedError)):
            return
        if isinstance(error, UnknownRunError):
            self._members.begin_anew()
        elif not is_cancelled(error):
            raise readable_error(error)
        elif self._calls.client.status != "running":
            raise lost("the connection to the cluster's scheduler is lost") from error

    def _try_again(self, task: _Task, error: BaseException) -> None:
        """Give a job once more whose worker was lost."""
        task.losses += 1
        if task.losses > _MOST_LOSSES:
            message = "all workers that were given one of the jobs died, or stopped it"
            raise ClusterError(f"{message}. Did they run out of memory? ({error})") from error
        if self._members.fit():
            self._submit(task)  # else the next poll that finds a worker does

    def _replace_lost(self) -> None:
        """Give jobs to others that only workers had which are not there any more."""
        for task in self._tasks:
            gone = [one for one in task.tries if not one.workers & self._members.addresses]
            for one in gone:
                task.tries.remove(one)
                self._calls.take_back([one.future])
            if not task.tries and self._members.fit():
                self._submit(task)

    def _help_slow_ones(self) -> None:
        """Give jobs that take too long, or whose worker is silent, to a second worker."""
        usual = statistics.median(self._usual) if self._usual else 0.0
        late = time.monotonic() - max(_SLOW_SECONDS, _SLOW_FACTOR * usual)
        slow = [task for task in self._tasks if task.tries and task.tries[-1].began < late]
        fit = self._members.fit()
        if not slow or not fit:
            return
        client = self._calls.client
        running: dict[str, list[str]] = asked(client, client.scheduler.processing)
        where = {key: worker for worker, keys in running.items() for key in keys}
        for task in slow:
            others = fit - {where.get(one.future.key, "") for one in task.tries}
            if others:
                self._submit(task, others)

    def close(self) -> None:
        """Take back all that is under way."""
        self._calls.close()
        self._members.close()
        self._calls.take_back(one.future for task in self._tasks for one in task.tries)
        self._tasks.clear()


def _numbered(jobs: Iterable[Job[Any, Any] | None]) -> Iterator[tuple[int, bytes, bool]]:
    """Yield the number of each job, the job as bytes, and whether it waits for those before it."""
    number, is_barrier = 0, False
    for job in jobs:
        if job is None:
            is_barrier = True
            continue
        yield number, _serialized(job), is_barrier
        number, is_barrier = number + 1, False
