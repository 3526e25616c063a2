"""The part of a run that is carried out in a process of a cluster.

A plugin of Dask's worker has the tools of each thread, which are kept from one job to the next. It
is added once the process has shown that it may take part in the run.
"""

import asyncio
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Self

from distributed import Reschedule, Worker, WorkerPlugin, get_worker

from streamshard.engine.jobs.executor import Host, Toolkit, Tools, carry_out
from streamshard.engine.run import resident_memory
from streamshard.errors import MemoryLimitError, UsageError
from streamshard.io.entries import files_below, read_all
from streamshard.io.retry import FROM_OUTSIDE, StoppedError, ignored
from streamshard.io.throttle import Throttle
from streamshard.io.writable import BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Build:
    """The program of one process."""

    version: str
    code: str
    """Digest of the package's modules: a version number may stand for more than one state."""
    python: str
    page_bytes: int
    """The size of the pages that no two machines may write to."""

    @classmethod
    def here(cls) -> Self:
        """Describe this process."""
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        return cls(_version(), _digest(), python, BLOCK_BYTES)

    def differences(self, wanted: "Build") -> Iterator[str]:
        """Describe how this build differs from the one that leads a run."""
        if self.version != wanted.version:
            yield f"has streamshard {self.version}, and {wanted.version} leads the run"
        elif self.code != wanted.code:
            yield f"has another streamshard {self.version} than the process that leads the run"
        if self.python != wanted.python:
            yield f"has Python {self.python}, and Python {wanted.python} leads the run"
        if self.page_bytes != wanted.page_bytes:
            yield (
                f"has memory pages of {self.page_bytes} bytes, and a machine with pages of "
                f"{wanted.page_bytes} bytes leads the run"
            )


def _version() -> str:
    try:
        return version("streamshard")
    except PackageNotFoundError:  # run from its sources
        return "(not installed)"


@cache
def _digest() -> str:
    root = Path(__file__).parent.parent
    digest = blake2b(digest_size=8)
    for path in sorted(path for path in files_below(root) if path.suffix == ".py"):
        content = read_all(path)
        digest.update(b"%b %d\n" % (path.relative_to(root).as_posix().encode(), len(content)))
        digest.update(content)
    return digest.hexdigest()


_IDLE_SECONDS: Final = 60.0
"""How long tools are kept that are not used."""
_POLL_SECONDS: Final = 1.0
_STOP_SECONDS: Final = 10.0
"""How long a process that ends waits for a job; one that hangs keeps its tools."""
_MOST_OF_LIMIT: Final = 0.8
"""Part of a worker's memory limit at which Dask stops to give it tasks."""
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What each process has to know of a run, apart from the toolkit."""

    token: str
    """Name of the plugin."""
    leader: str
    """Who leads it: one run after the other."""
    workers: int
    """Threads of each process that may work at a time."""
    needed_bytes: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a job returns."""

    result: Any
    worker: str
    """Address of the worker that did it."""
    nbytes: int
    """Bytes that were processed."""
    seconds: float


class UnknownRunError(Exception):
    """The worker of this address does not know the run, or has put its tools away meanwhile."""


async def prove(
    build: tuple[str, str, str, int], spec_blob: bytes, toolkit: bytes, dask_worker: Worker
) -> str:
    """Show that this process may take part in a run, and prepare for it; returns the evidence.

    `build`: the fields of the `Build` of who leads the run. All else is read once that is the same.
    """
    here = await asyncio.to_thread(Build.here)
    differences = list(here.differences(Build(*build)))
    if differences:
        raise UsageError(f"worker {dask_worker.address}: {'; '.join(differences)}")
    spec: RunSpec = pickle.loads(spec_blob)  # noqa: S301
    known = dask_worker.plugins.get(spec.token)
    if isinstance(known, WorkerRun):
        return known.evidence
    for name, other in list(dask_worker.plugins.items()):
        if isinstance(other, WorkerRun) and other.leader == spec.leader and other.is_idle():
            await dask_worker.plugin_remove(name)
    _require_memory(spec, dask_worker)
    loaded: Toolkit[Tools] = await asyncio.to_thread(pickle.loads, toolkit)
    evidence = await asyncio.to_thread(loaded.prove)
    await dask_worker.plugin_add(WorkerRun(spec, loaded, evidence), name=spec.token)
    return evidence


def perform(token: str, job: bytes, bytes_per_second: float | None) -> Outcome:
    """Carry out a job with the tools of this thread.

    `bytes_per_second`: limit of this process.
    """
    worker = get_worker()
    run = worker.plugins.get(token)
    if not isinstance(run, WorkerRun):
        raise UnknownRunError(worker.address)
    try:
        with run.tools(worker) as tools:
            run.throttle.limit(bytes_per_second)
            began = time.monotonic()
            result = carry_out(pickle.loads(job), tools.own)  # noqa: S301
            return Outcome(result, worker.address, tools.nbytes, time.monotonic() - began)
    except StoppedError:  # not wanted when it was stopped; if it is wanted now, it is done again
        raise Reschedule from None
    except Exception as error:
        error.add_note(f"on worker {worker.address}")
        raise


class _ThreadTools:
    """The tools of one thread, and what they have processed."""

    def __init__(self, toolkit: Toolkit[Tools], throttle: Throttle, workers: int) -> None:
        self.stop = threading.Event()
        self.nbytes = 0
        self._throttle = throttle
        self.own = toolkit.make(Host(self._count, self.stop, workers))

    def _count(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self._throttle.advance(nbytes)


class WorkerRun(WorkerPlugin):
    """A run in this process."""

    def __init__(self, spec: RunSpec, toolkit: Toolkit[Tools], evidence: str) -> None:
        self.leader = spec.leader
        self.evidence = evidence
        self._spec = spec
        self._toolkit = toolkit
        self.throttle = Throttle(_ignore, None)
        self._gate = threading.Semaphore(spec.workers)
        self._tools: dict[int, _ThreadTools] = {}
        """The tools of each thread."""
        self._stops: dict[Any, threading.Event] = {}
        """Key of a task that is under way → what stops it."""
        self._over = threading.Event()
        self._used_at = time.monotonic()

    def setup(self, worker: Worker) -> None:
        """Watch for the time when nothing is done any more."""
        self._end_when_idle(worker)

    async def teardown(self, worker: Worker) -> None:
        """Stop all jobs, and close all tools."""
        self._over.set()
        for stop in list(self._stops.values()):
            stop.set()
        await asyncio.to_thread(self._close)

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:  # noqa: ANN401
        """Stop a task as soon as the scheduler does not want it any more.

        It takes tasks back when a run ends, is interrupted, or when the process that leads it is
        gone. Nothing needs to be sent for that to this process.
        """
        stop = self._stops.get(key)
        if stop is not None and start == "executing" and finish == "released":
            stop.set()

    def is_idle(self) -> bool:
        """Tell whether no job is under way."""
        return not self._stops

    @contextmanager
    def tools(self, worker: Worker) -> Iterator[_ThreadTools]:
        """Lend this thread its tools, for the task that it carries out."""
        with self._gate:
            if self._over.is_set():
                raise UnknownRunError(worker.address)
            tools = self._tools_of_thread(worker)
            tools.nbytes = 0
            tools.stop.clear()
            key = worker.get_current_task()
            self._stops[key] = tools.stop
            task = worker.state.tasks.get(key)
            if self._over.is_set() or task is None or task.state != "executing":
                tools.stop.set()  # it was taken back before there was what stops it
            try:
                yield tools
            finally:
                self._used_at = time.monotonic()
                del self._stops[key]

    def _tools_of_thread(self, worker: Worker) -> _ThreadTools:
        thread = threading.get_ident()
        if thread not in self._tools:
            workers = min(self._spec.workers, worker.state.nthreads)
            self._tools[thread] = _ThreadTools(self._toolkit, self.throttle, workers)
        return self._tools[thread]

    def _close(self) -> None:
        """Close all tools, once the jobs that use them have stopped."""
        threads = self._spec.workers
        if all(self._gate.acquire(timeout=_STOP_SECONDS) for _ in range(threads)):
            for tools in self._tools.values():
                with ignored(FROM_OUTSIDE):
                    tools.own.close()
            self._tools.clear()
            self._gate.release(threads)

    def _end_when_idle(self, worker: Worker) -> None:
        """End the run here when nothing was done for a while.

        Nobody says that a run is over: who leads it may have been killed. If it goes on after all,
        the process shows once more that it sees the same files.
        """
        if self._over.is_set():
            return
        if self._stops or time.monotonic() < self._used_at + _IDLE_SECONDS:
            worker.loop.call_later(_POLL_SECONDS, self._end_when_idle, worker)
        else:
            worker.loop.add_callback(worker.plugin_remove, self._spec.token)


def _require_memory(spec: RunSpec, worker: Worker) -> None:
    """Refuse a process that has less memory than the run takes, also by Dask's own limit."""
    most = resident_memory.available_bytes()
    limit = worker.memory_manager.memory_limit
    if limit:
        most = min(most, int(limit * _MOST_OF_LIMIT))
    taken = resident_memory.resident_bytes()
    if taken + spec.needed_bytes > most:
        message = (
            f"worker {worker.address}: may use {most // _MIB} MiB and has taken {taken // _MIB}; "
            f"this run needs {-(-spec.needed_bytes // _MIB)} MiB more in each process"
        )
        raise MemoryLimitError(
            f"{message}. Give the workers more memory or fewer threads, or the run a lower limit"
        )


def _ignore(nbytes: int) -> None:
    pass
