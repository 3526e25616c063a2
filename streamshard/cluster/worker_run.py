"""The part of a run that is carried out in a process of a cluster.

Each thread of the process has tools of its own, which it keeps from one task to the next. The
first task of a run finds out whether the process may take part in it at all.
"""

import pickle
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from distributed import Worker, get_worker

from streamshard.cluster.build import Build
from streamshard.engine.jobs.executor import Host, Toolkit, Tools
from streamshard.engine.run import resident_memory
from streamshard.errors import MemoryLimitError, UsageError
from streamshard.io.retry import FROM_OUTSIDE, ignored
from streamshard.io.throttle import Throttle

_IDLE_SECONDS: Final = 60.0
"""How long tools are kept that are not used."""
_POLL_SECONDS: Final = 0.2
_MOST_OF_LIMIT: Final = 0.8
"""Part of a worker's memory limit at which Dask stops to give it tasks."""
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What each process has to know of a run, besides the toolkit."""

    token: str
    leader: str
    """Who leads it: one run after the other."""
    workers: int
    """Threads of each process that may work at a time."""
    needed_bytes: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a task returns."""

    result: Any
    process: str
    """Identifies the process."""
    worker: str
    """Its address."""
    evidence: str
    """What the toolkit's `prove` returned there."""
    nbytes: int = 0
    """Bytes that were processed."""
    seconds: float = 0.0


class UnknownRunError(Exception):
    """This process does not know the run, or has put its tools away meanwhile."""


def prove(build: tuple[str, str, str, int], spec_blob: bytes, toolkit: bytes) -> Outcome:
    """Find out whether this process may take part in a run, and prepare for it.

    `build`: the fields of the `Build` of who leads the run. All else is read once that is the same.
    """
    worker = get_worker()
    differences = list(Build.here().differences(Build(*build)))
    if differences:
        raise UsageError(f"worker {worker.address}: {'; '.join(differences)}")
    spec: RunSpec = pickle.loads(spec_blob)  # noqa: S301
    with _LOCK:
        run = _RUNS.get(spec.token)
        if run is None:
            _close_idle(lambda other: other.spec.leader == spec.leader)
            run = _begun(spec, toolkit, worker)
            _RUNS[spec.token] = run
            threading.Thread(target=_watch, args=(run,), daemon=True).start()
        run.used_at = time.monotonic()
    return Outcome(None, _process(), worker.address, run.evidence)


def perform(token: str, job: bytes, bytes_per_second: float | None) -> Outcome:
    """Carry out a job with the tools of this thread.

    `bytes_per_second`: the share of this process in the run's limit.
    """
    worker = get_worker()
    with _LOCK:
        run = _RUNS.get(token)
        if run is None:
            raise UnknownRunError(token)
        run.active += 1
    try:
        with run.gate:
            began = time.monotonic()
            tools = run.tools(worker)
            tools.unwanted.begin(worker)
            run.throttle.limit(bytes_per_second)
            tools.nbytes = 0
            result = pickle.loads(job)(tools.own)  # noqa: S301
            seconds = time.monotonic() - began
            return Outcome(result, _process(), worker.address, run.evidence, tools.nbytes, seconds)
    except Exception as error:
        error.add_note(f"on worker {worker.address}")
        raise
    finally:
        with _LOCK:
            run.active -= 1
            run.used_at = time.monotonic()


class _Unwanted(threading.Event):
    """Is set as soon as the scheduler does not want the current task any more.

    It takes tasks back when a run ends, is interrupted, or when the process that leads it is gone,
    and when another worker was faster. Nothing needs to be sent for that to this process.
    """

    def __init__(self) -> None:
        super().__init__()
        self._worker: Worker | None = None
        self._key: Any = None

    def begin(self, worker: Worker) -> None:
        """Begin the task that this thread carries out."""
        self._worker, self._key = worker, worker.get_current_task()

    def is_set(self) -> bool:
        if super().is_set() or self._worker is None:
            return super().is_set()
        task = self._worker.state.tasks.get(self._key)
        return task is None or task.state == "cancelled"

    def wait(self, timeout: float | None = None) -> bool:
        end = None if timeout is None else time.monotonic() + timeout
        while not self.is_set():
            left = _POLL_SECONDS if end is None else min(_POLL_SECONDS, end - time.monotonic())
            if left <= 0:
                return False
            super().wait(left)
        return True


class _ThreadTools:
    """The tools of one thread, and what they have processed."""

    def __init__(self, toolkit: Toolkit[Tools], throttle: Throttle, workers: int) -> None:
        self.unwanted = _Unwanted()
        self.nbytes = 0
        self._throttle = throttle
        self.own = toolkit.make(Host(self._count, self.unwanted, workers))

    def _count(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self._throttle.advance(nbytes)


@dataclass(slots=True)
class _ProcessRun:
    """A run in this process."""

    spec: RunSpec
    toolkit: Toolkit[Tools]
    evidence: str
    throttle: Throttle
    gate: threading.Semaphore
    active: int = 0
    """Tasks that are under way; changed while `_LOCK` is held."""
    used_at: float = 0.0
    made: dict[int, _ThreadTools] = field(default_factory=dict)
    """The tools of each thread."""

    def tools(self, worker: Worker) -> _ThreadTools:
        """Return the tools of this thread."""
        thread = threading.get_ident()
        if thread not in self.made:
            workers = min(self.spec.workers, worker.state.nthreads)
            self.made[thread] = _ThreadTools(self.toolkit, self.throttle, workers)
        return self.made[thread]

    def close(self) -> None:
        """Close all tools."""
        for tools in self.made.values():
            tools.own.close()
        self.made.clear()


_LOCK = threading.RLock()
_RUNS: dict[str, _ProcessRun] = {}
"""Token → run."""


@cache
def _process() -> str:
    return secrets.token_hex(8)


def _begun(spec: RunSpec, toolkit: bytes, worker: Worker) -> _ProcessRun:
    _require_memory(spec, worker)
    loaded: Toolkit[Tools] = pickle.loads(toolkit)  # noqa: S301
    try:
        evidence = loaded.prove()
    except Exception as error:
        error.add_note(f"on worker {worker.address}")
        raise
    gate = threading.Semaphore(spec.workers)
    return _ProcessRun(spec, loaded, evidence, Throttle(_ignore, None), gate)


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


def _close_idle(is_over: Callable[[_ProcessRun], bool]) -> None:
    """Put the tools of runs away that are over; call it while `_LOCK` is held."""
    for token, run in list(_RUNS.items()):
        if not run.active and is_over(run):
            del _RUNS[token]
            with ignored(FROM_OUTSIDE):
                run.close()


def _watch(run: _ProcessRun) -> None:
    """Put a run's tools away when nothing was done with them for a while.

    Nobody says that a run is over: who leads it may have been killed. If it goes on after all, the
    process shows once more that it sees the same files.
    """
    pause = threading.Event()
    while run.spec.token in _RUNS:
        pause.wait(1.0)
        with _LOCK:
            _close_idle(lambda one: time.monotonic() > one.used_at + _IDLE_SECONDS)
