"""Runs jobs on the workers of a Dask cluster.

Dask gives jobs to workers, gives those of a lost worker to another one, and keeps results until
they are fetched. What is decided here: how many jobs are under way, and which workers may have
them. A worker gets a job once its process has shown that it runs the same program and sees the same
files as the process that leads the run.
"""

import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Set
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import astuple, dataclass, replace
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
    workers_of,
)
from streamshard.cluster.worker_run import Build, Outcome, RunSpec, UnknownRunError, perform, prove
from streamshard.engine.jobs.executor import Job, R, T, Toolkit
from streamshard.errors import ClusterError, MemoryLimitError, StreamshardError

POLL_SECONDS: Final = 0.5
_PROOF_SECONDS: Final = 60.0
"""How long a run waits at first for workers to show what they see."""
_SILENT_SECONDS: Final = 15.0
"""A worker that the scheduler has not heard of for so long gets nothing to do."""
_NO_WORKERS_SECONDS: Final = 300.0
"""How long a run waits while no worker may have jobs: a queue or an autoscaler may bring some."""
_PROVING_BYTES: Final = 256 << 20
"""Toolkits that are on their way to workers at a time."""
_MOST_LOSSES: Final = 3
"""How often a job is submitted again because all workers that might have it are gone."""
_LARGE_GRAPHS: Final = {"distributed.admin.large-graph-warning-threshold": "1 TiB"}
"""A job may be large: a checkpoint's training state is sent with the file that it is for."""


class Membership:
    """Who takes part in one run.

    `toolkit`: what a process proves that it can use.
    """

    def __init__(self, client: DaskClient, toolkit: Toolkit[Any], spec: RunSpec) -> None:
        self._client = client
        self._toolkit = toolkit
        self._shown = astuple(Build.here()), serialized(spec), serialized(toolkit)
        """What a process compares with its own."""
        self._workers: dict[str, dict[str, Any]] = {}
        """Address → what the scheduler says of the worker."""
        self._proved: set[str] = set()
        """Addresses whose process may take part."""
        self.proofs: dict[str, CallFuture] = {}
        """Address → call that asks a worker to show what it sees."""
        self._polled_at = 0.0
        self._polls = 0
        """Polls that found workers."""
        self._unusable_polls = 0
        """Polls, one after the other, that found no worker that may have jobs."""
        self._has_begun = False

    @property
    def addresses(self) -> Set[str]:
        """Addresses of all workers that are there."""
        return self._workers.keys()

    def usable_workers(self) -> dict[str, int]:
        """Return the addresses and threads of the workers that may have jobs now."""
        usable = self._proved & self._answering() if self._has_begun else ()
        return {address: self._workers[address]["nthreads"] for address in usable}

    def update(self) -> bool:
        """Take note of proofs, and now and then of workers; returns whether it did the latter.

        A run begins when all workers that are there have shown what they see, or are too slow.
        """
        for address in [address for address, call in self.proofs.items() if call.done()]:
            self._take_proof(address, self.proofs.pop(address))
        is_due = time.monotonic() > self._polled_at + POLL_SECONDS
        if is_due:
            self._poll()
        answering = self._answering()
        is_late = self._polls * POLL_SECONDS > _PROOF_SECONDS
        if is_late or answering <= self._proved:
            self._has_begun |= bool(answering & self._proved)
        if self._workers and is_late and not self._has_begun:
            raise self._unusable(_PROOF_SECONDS)
        return is_due

    def ask_again(self, worker: str) -> None:
        """Let a worker show once more that it may take part."""
        self._proved.discard(worker)

    def close(self) -> None:
        """Wait for no proof any more."""
        for call in self.proofs.values():
            call.cancel()

    def _poll(self) -> None:
        """Take note of what the scheduler says of its workers; new ones begin their proof."""
        self._workers = workers_of(self._client)
        self._proved &= self.addresses
        for address in self.proofs.keys() - self.addresses:
            self.proofs.pop(address).cancel()
        most = max(1, _PROVING_BYTES // len(self._shown[2]))
        for address in sorted(self.addresses - self._proved - self.proofs.keys()):
            if len(self.proofs) < most:
                options = {"workers": [address], "asynchronous": True}
                call = self._client.run(prove, *self._shown, **options)
                self.proofs[address] = begin(self._client, call)
        self._unusable_polls = 0 if self.usable_workers() else self._unusable_polls + 1
        if self._unusable_polls * POLL_SECONDS > _NO_WORKERS_SECONDS:
            raise self._unusable(_NO_WORKERS_SECONDS)
        self._polls += bool(self._workers)
        self._polled_at = time.monotonic()

    def _take_proof(self, address: str, call: CallFuture) -> None:
        """Check what a worker has shown, before it gets any job."""
        try:
            self._toolkit.accept(call.result()[address])
        except (OSError, CancelledError):
            return  # it was lost, or is asked once more
        except StreamshardError as error:
            if address not in str(error):
                error.add_note(f"on worker {address}")
            raise
        except Exception as error:
            raise readable_error(error, f"worker {address}") from error.__cause__
        self._proved.add(address)

    def _answering(self) -> set[str]:
        """Return the addresses of workers that the scheduler hears of, and gives jobs to."""
        heard = max((one["last_seen"] for one in self._workers.values()), default=0.0)
        return {
            address
            for address, one in self._workers.items()
            if one["last_seen"] > heard - _SILENT_SECONDS and one["status"] == "running"
        }

    def _unusable(self, seconds: float) -> StreamshardError:
        """Return the error for a cluster that stays without workers that may have jobs."""
        if not self._workers:
            return _no_workers(self._client)
        address, one = min(self._workers.items())
        if one["status"] == "paused":
            return MemoryLimitError(f"worker {address}: is paused by Dask, as its memory is full")
        message = f"worker {address}: has not answered for {seconds:.0f} seconds"
        return ClusterError(f"{message}; is it busy, does it die, or does its file system hang?")


def _most_threads(client: DaskClient) -> int:
    """Return the threads of the largest worker; waits until there is one."""
    end = time.monotonic() + _NO_WORKERS_SECONDS
    while not (workers := workers_of(client)):
        if time.monotonic() > end:
            raise _no_workers(client)
        time.sleep(POLL_SECONDS)
    return max(int(one["nthreads"]) for one in workers.values())


def _no_workers(client: DaskClient) -> ClusterError:
    """Return the error for a cluster that stays without workers."""
    what = f"the cluster has had no workers for {_NO_WORKERS_SECONDS:.0f} seconds"
    return ClusterError(f"{client.scheduler.address}: {what}")


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
        return _most_threads(self._client)

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
        arguments = perform, self._spec.token, blob, self._worker_rate
        key = f"{self._spec.token}-{number}-{losses}"
        with dask.config.set(_LARGE_GRAPHS):
            future = self._client.submit(*arguments, key=key, workers=sorted(workers))
        call = begin(self._client, self._client.gather(future, asynchronous=True))
        self._jobs[number] = _Submitted(blob, workers, future, call, losses)

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
