"""The workers of a cluster: who is there, who answers, and who may take part in a run.

A worker gets a job once its process has shown that it runs the same program and sees the same
files as the process that leads the run.
"""

import pkgutil
import time
from collections.abc import Set
from dataclasses import astuple, dataclass
from itertools import count
from typing import Any, Final

from distributed import KilledWorker

from streamshard.cluster.build import Build
from streamshard.cluster.calls import (
    POLL_SECONDS,
    CallFuture,
    Calls,
    DaskClient,
    Event,
    asked,
    is_cancelled,
)
from streamshard.cluster.worker_run import Outcome, prove
from streamshard.engine.jobs.executor import Toolkit
from streamshard.errors import ClusterError, MemoryLimitError, StreamshardError, UsageError

_PROOF_SECONDS: Final = 60.0
"""How long a run waits at first for workers that do not answer; they get nothing to do then."""
_SILENT_SECONDS: Final = 15.0
"""A worker that the scheduler has not heard of for so long gets nothing to do."""
_NO_WORKERS_SECONDS: Final = 300.0
"""How long a run waits while there are no workers: a queue or an autoscaler may bring some."""
_PROVING_BYTES: Final = 256 << 20
"""Toolkits that are on their way to workers at a time."""
_MOST_DEATHS: Final = 3
"""How many workers may die before one has proved that it may take part."""


@dataclass(slots=True)
class _Member:
    """A worker that is there."""

    threads: int
    is_paused: bool
    """Whether Dask gives it nothing to do, because its memory is full."""
    last_seen: float
    """When the scheduler heard of it, by the scheduler's clock."""
    heard_at: float
    """When that changed, by the clock here."""


class Membership:
    """Who takes part in one run.

    `calls`: what reaches the workers.
    `toolkit`: what a process proves that it can use, and its bytes.
    """

    def __init__(self, calls: Calls, toolkit: tuple[Toolkit[Any], bytes], spec: bytes) -> None:
        self._calls = calls
        self._toolkit, self._kit = toolkit
        self._spec = spec
        self._build = astuple(Build.here())
        self._deaths = count(1)
        self._members: dict[str, _Member] = {}
        self._proving: dict[str, CallFuture] = {}
        self._proved: set[str] = set()
        """Addresses whose process may take part."""
        self._accepted: set[str] = set()
        """Processes whose evidence was seen here."""
        self._began = self._seen_workers = time.monotonic()

    @property
    def addresses(self) -> Set[str]:
        """Addresses of all workers that are there."""
        return self._members.keys()

    def may_begin(self) -> bool:
        """Tell whether all workers that are there have shown what they see, or are too slow."""
        is_late = time.monotonic() > self._began + _PROOF_SECONDS
        if is_late and not self._proved and self._members:
            address, one = next(iter(self._members.items()))
            if one.is_paused:
                message = f"worker {address}: is paused by Dask, as its memory is full"
                raise MemoryLimitError(message)
            message = f"worker {address}: has not answered for {_PROOF_SECONDS:.0f} seconds"
            raise ClusterError(f"{message}; is it busy, or does its file system hang?")
        return bool(self._proved) and (is_late or self._alive() <= self._proved)

    def fit(self) -> set[str]:
        """Return the addresses of the workers that may have jobs now."""
        return self._proved & self._alive()

    def threads_of(self, address: str) -> int:
        """Return how many threads a worker has."""
        return self._members[address].threads

    def accept(self, outcome: Outcome) -> None:
        """Check what a process has shown, before anything that it did counts."""
        if outcome.process in self._accepted:
            return
        try:
            self._toolkit.accept(outcome.evidence)
        except StreamshardError as error:
            error.add_note(f"on worker {outcome.worker}")
            raise
        self._accepted.add(outcome.process)

    def take_poll(self, found: Any) -> None:  # noqa: ANN401
        """Take note of what the scheduler says of its workers; new ones begin their proof."""
        self._members = self._heard(found["workers"])
        now = time.monotonic()
        if self._members:
            self._seen_workers = now
        elif now > self._seen_workers + _NO_WORKERS_SECONDS:
            raise _no_workers(found["address"])
        self._proved &= self.addresses
        for address in self._proving.keys() - self.addresses:
            self._calls.take_back([self._proving.pop(address)])
        most = max(1, _PROVING_BYTES // len(self._kit))
        for address in sorted(self.addresses - self._proved - self._proving.keys()):
            if len(self._proving) < most:
                # Dask ends a worker that cannot import a call's function, without a word. So the
                # first call only imports it, by a function that Python itself has.
                name = f"{prove.__module__}:{prove.__qualname__}"
                self._begin(address, pkgutil.resolve_name, name)

    def take_proof(self, event: Event) -> None:
        """Take note of what a worker has shown."""
        address, found = event.subject, event.found
        if self._proving.get(address) is not event.future:
            return
        del self._proving[address]
        if found is prove:
            self._begin(address, prove, self._build, self._spec, self._kit)
        elif isinstance(found, Outcome):
            self.accept(found)
            self._proved.add(address)
        elif not (isinstance(found, KilledWorker) or is_cancelled(found)):
            raise readable_error(found, f"worker {address}")
        elif not self._proved and (deaths := next(self._deaths)) > _MOST_DEATHS:
            message = f"{deaths} workers died before they had proved that they may take part"
            raise ClusterError(f"{message} ({found})")

    def begin_anew(self) -> None:
        """Let each worker show once more that it may take part."""
        self._proved.clear()

    def close(self) -> None:
        """Take all proofs back that are under way."""
        self._calls.take_back(self._proving.values())
        self._proving.clear()

    def _alive(self) -> set[str]:
        """Return the addresses of workers that are heard of."""
        late = time.monotonic() - _SILENT_SECONDS
        members = self._members.items()
        return {address for address, one in members if one.heard_at > late and not one.is_paused}

    def _heard(self, workers: Any) -> dict[str, _Member]:  # noqa: ANN401
        now = time.monotonic()
        members = {}
        for address, worker in workers.items():
            known, last_seen = self._members.get(address), worker["last_seen"]
            is_new = known is None or known.last_seen != last_seen
            heard_at = now if known is None or is_new else known.heard_at
            is_paused = worker["status"] == "paused"
            members[address] = _Member(worker["nthreads"], is_paused, last_seen, heard_at)
        return members

    def _begin(self, address: str, function: Any, *arguments: object) -> None:  # noqa: ANN401
        future = self._calls.begin(address, function, *arguments, workers=[address], priority=1)
        self._proving[address] = future


def most_threads(client: DaskClient) -> int:
    """Return the threads of the largest worker; waits until there is one."""
    end = time.monotonic() + _NO_WORKERS_SECONDS
    while not (found := asked(client, client.scheduler.ncores)):
        if time.monotonic() > end:
            raise _no_workers(client.scheduler.address)
        time.sleep(POLL_SECONDS)
    return int(max(found.values()))


def readable_error(error: BaseException, worker: str = "a worker") -> BaseException:
    """Return the error to raise for one that a worker or the scheduler met."""
    if isinstance(error, (ImportError, AttributeError)) and "streamshard" in str(error):
        return UsageError(f"{worker}: has no streamshard, or another version of it ({error})")
    if isinstance(error, RuntimeError) and "deserialization" in str(error):
        message = "the scheduler has no streamshard, or another version of it, or of Dask"
        return UsageError(f"{message} ({error.__cause__ or error})")
    return error


def _no_workers(address: str) -> ClusterError:
    """Return the error for a cluster that stays without workers."""
    return ClusterError(
        f"{address}: the cluster has had no workers for {_NO_WORKERS_SECONDS:.0f} seconds"
    )
