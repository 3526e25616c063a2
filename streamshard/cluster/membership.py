"""The workers of a cluster: who is there, who answers, and who may take part in a run.

A worker gets a job once its process has shown that it runs the same program and sees the same
files as the process that leads the run.
"""

import time
from collections.abc import Set
from concurrent.futures import CancelledError
from dataclasses import astuple
from typing import Any, Final

from streamshard.cluster.calls import (
    CallFuture,
    DaskClient,
    begin,
    readable_error,
    serialized,
    workers_of,
)
from streamshard.cluster.worker_run import Build, RunSpec, prove
from streamshard.engine.jobs.executor import Toolkit
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


def most_threads(client: DaskClient) -> int:
    """Return the threads of the largest worker; waits until there is one."""
    end = time.monotonic() + _NO_WORKERS_SECONDS
    while not (found := workers_of(client)):
        if time.monotonic() > end:
            raise _no_workers(client)
        time.sleep(POLL_SECONDS)
    return max(int(one["nthreads"]) for one in found.values())


def _no_workers(client: DaskClient) -> ClusterError:
    """Return the error for a cluster that stays without workers."""
    what = f"the cluster has had no workers for {_NO_WORKERS_SECONDS:.0f} seconds"
    return ClusterError(f"{client.scheduler.address}: {what}")
