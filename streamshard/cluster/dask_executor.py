"""Runs jobs on the workers of a Dask cluster.

Dask gives jobs to workers, gives those of a lost worker to another one, and keeps results until
they are fetched. What is decided here: how many jobs are under way, and which workers may have
them.
"""

import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

import dask.config

from streamshard.cluster.calls import (
    CallFuture,
    DaskClient,
    DaskFuture,
    begin,
    cancel,
    readable_error,
    serialized,
    workers_died,
)
from streamshard.cluster.membership import POLL_SECONDS, Membership, most_threads
from streamshard.cluster.worker_run import Outcome, RunSpec, UnknownRunError, perform
from streamshard.engine.jobs.executor import Job, R, T, Toolkit, rate_limit
from streamshard.io.throttle import without_throttle

_MOST_LOSSES: Final = 3
"""How often a job is submitted again because all workers that might have it are gone."""
_LARGE_GRAPHS: Final = {"distributed.admin.large-graph-warning-threshold": "1 TiB"}
"""A job may be large: a checkpoint's training state is sent with the file that it is for."""


@dataclass(slots=True)
class WorkerRate:
    """The work of one process of a cluster."""

    nbytes: int = 0
    """Bytes that were processed."""
    seconds: float = 0.0
    """Time that its threads worked, in total."""
    jobs: int = 0
    """Parts of files."""

    def add(self, nbytes: int, seconds: float) -> None:
        self.nbytes += nbytes
        self.seconds += seconds
        self.jobs += 1


@dataclass(frozen=True, slots=True)
class _Submitted:
    """A job that is under way."""

    blob: bytes
    workers: frozenset[str]
    """One of these carries it out."""
    future: DaskFuture
    call: CallFuture
    """Fetches the result."""
    losses: int


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
        token = f"streamshard-{secrets.token_hex(8)}"
        spec = RunSpec(token, self._name, workers, needed_bytes)
        run = _ClusterRun(self._client, toolkit, spec, self._worker_rate)
        try:
            for number, outcome in run.outcomes(jobs, is_ordered=is_ordered):
                rate = self.rates.setdefault(outcome.worker, WorkerRate())
                rate.add(outcome.nbytes, outcome.seconds)
                with without_throttle():
                    progress(outcome.nbytes)
                yield number, outcome.result
        finally:
            run.close()


class _ClusterRun:
    """One run on a cluster. All of it happens in the thread that takes the results."""

    def __init__(
        self, client: DaskClient, toolkit: Toolkit[Any], spec: RunSpec, worker_rate: int | None
    ) -> None:
        self._client = client
        self._spec = spec
        self._members = Membership(client, toolkit, spec)
        self._worker_rate = worker_rate
        self._jobs: dict[int, _Submitted] = {}
        """Number → job that is under way, or whose result was not taken."""

    def outcomes(
        self, jobs: Iterable[Job[Any, Any] | None], *, is_ordered: bool
    ) -> Iterator[tuple[int, Outcome]]:
        """Yield the number and the outcome of each job."""
        self._members.update()
        number = 0
        for job in jobs:
            while not self._has_room(is_barrier=job is None):
                yield from self._wait(is_ordered=is_ordered)
            if job is not None:
                self._submit(number, serialized(job))
                number += 1
        while self._jobs:
            yield from self._wait(is_ordered=is_ordered)

    def _has_room(self, *, is_barrier: bool) -> bool:
        """Tell whether another job may be begun now."""
        if is_barrier:
            return not self._jobs
        threads = self._members.usable_workers().values()
        return len(self._jobs) < sum(min(count, self._spec.workers) + 1 for count in threads)

    def _submit(self, number: int, blob: bytes, losses: int = 0) -> None:
        """Give a job to one of the workers that may have jobs."""
        workers = frozenset(self._members.usable_workers())
        arguments = perform, self._spec.token, blob, self._share()
        key = f"{self._spec.token}-{number}-{losses}"
        with dask.config.set(_LARGE_GRAPHS):
            future = self._client.submit(*arguments, key=key, workers=sorted(workers))
        call = begin(self._client, self._client.gather(future, asynchronous=True))
        self._jobs[number] = _Submitted(blob, workers, future, call, losses)

    def _share(self) -> float | None:
        """Return how many bytes a second each worker may process now, whoever there is."""
        total = rate_limit()
        if total is None:
            return self._worker_rate
        return min(total / max(1, len(self._members.addresses)), self._worker_rate or total)

    def _wait(self, *, is_ordered: bool) -> Iterator[tuple[int, Outcome]]:
        """Wait a little; yields the numbers and the outcomes of jobs that are done."""
        due = dict(islice(self._jobs.items(), 1 if is_ordered else None))
        calls = [*(job.call for job in due.values()), *self._members.proofs.values()]
        if calls:
            wait(calls, POLL_SECONDS, FIRST_COMPLETED)
        else:  # no worker may have jobs
            time.sleep(POLL_SECONDS)
        for number, job in due.items():
            if job.call.done() and (outcome := self._take_outcome(number, job)):
                yield number, outcome
        if self._members.update():
            self._submit_lost_jobs()

    def _take_outcome(self, number: int, job: _Submitted) -> Outcome | None:
        """Take the outcome of a job; None if its worker must show again that it may take part."""
        try:
            outcome: Outcome = job.call.result()
        except UnknownRunError as error:
            self._members.ask_again(str(error))
            self._jobs[number] = replace(job, workers=frozenset(), call=Future())
            return None
        except Exception as error:
            raise readable_error(error) from error.__cause__
        del self._jobs[number]
        return outcome

    def _submit_lost_jobs(self) -> None:
        """Submit jobs again that only workers might have which are gone, or silent, or paused."""
        usable = self._members.usable_workers()
        lost = [
            (number, job)
            for number, job in self._jobs.items()
            if usable and not job.call.done() and not job.workers & usable.keys()
        ]
        for number, job in lost:
            if job.losses == _MOST_LOSSES:
                raise workers_died(f"job {number}")
            cancel(self._client, [job.future])
            self._submit(number, job.blob, job.losses + 1)

    def close(self) -> None:
        """Take back all that is under way."""
        self._members.close()
        cancel(self._client, (job.future for job in self._jobs.values()))
        self._jobs.clear()
