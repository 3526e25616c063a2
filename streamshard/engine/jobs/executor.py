"""Runs a stream of jobs on workers that have tools of their own: on threads, or on a cluster.

A job is a function of a worker's tools, and a toolkit describes the tools. Both are data (partials
of functions of modules, frozen dataclasses), so they can be sent to any process. So are results.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from streamshard.model import SourceFile


class Tools(Protocol):
    """The objects that one worker needs for its jobs, and does not share."""

    def settle(self) -> None:
        """Refuse what the last job read if a file changed meanwhile; called after each job."""

    def close(self) -> None:
        """Close open files."""


T = TypeVar("T", bound=Tools)
T_co = TypeVar("T_co", bound=Tools, covariant=True)
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Host:
    """What tools get from the process in which they are used."""

    progress: Callable[[int], None]
    """Counts bytes that are processed; may sleep, to keep to a rate."""
    stop: threading.Event
    """Set when the worker's current job is not wanted any more."""
    workers: int
    """Count of the process's workers for this run."""


class Toolkit(ABC, Generic[T_co]):
    """Describes the tools of a worker."""

    __slots__ = ()
    sources: Sequence[SourceFile]
    """The files that the plan was made for."""

    def prove(self) -> str:
        """Show, in another process, that it sees what the plan was made for.

        Called once in each process, before it gets tools. Returns a text that `accept` checks.
        """
        # Not at the top: threads of one process have nothing to prove.
        from streamshard.engine.jobs.proofs import require_seen, some_files

        require_seen(some_files(self.sources))
        return ""

    def accept(self, evidence: str) -> None:
        """Check what `prove` returned, in the process that leads the run."""

    @abstractmethod
    def make(self, host: Host) -> T_co:
        """Make the tools."""


@dataclass(frozen=True, slots=True)
class ReadingTools(Toolkit[T_co]):
    """Describes tools that only read, by what makes them."""

    sources: Sequence[SourceFile]
    maker: Callable[[Host], T_co]

    def make(self, host: Host) -> T_co:
        return self.maker(host)


Job = Callable[[T], R]


class Executor(Protocol):
    @property
    def shares_memory(self) -> bool:
        """Whether workers are threads of this process, and so may use its open files."""

    @property
    def workers(self) -> int | None:
        """Workers of each process; None if a run may choose."""

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
        """Run all jobs; yields the number of each and its result, as they come or in order.

        Only a few jobs and results are in memory. The first error ends the iteration: jobs that
        have begun are stopped, the others are skipped.

        `jobs`: none among them waits until all jobs before it are done; it has no number.
        `progress`: counts the bytes that jobs process.
        `needed_bytes`: memory that each process needs for its workers.
        """


def carry_out(job: Job[T, R], tools: T) -> R:
    result = job(tools)
    tools.settle()
    return result


class Threads:
    shares_memory = True
    workers = None

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
        host = Host(progress, threading.Event(), workers)
        local = threading.local()
        thread_tools: list[T] = []

        def work(job: Job[T, R]) -> R:
            if not hasattr(local, "tools"):
                local.tools = toolkit.make(host)
                thread_tools.append(local.tools)
            return carry_out(job, local.tools)

        pool = ThreadPoolExecutor(workers, thread_name_prefix="streamshard")
        pending: dict[Future[R], int] = {}
        count = 0
        try:
            for job in jobs:
                most = 2 * workers if job is not None else 0
                while len(pending) > most:
                    yield from _taken(pending, is_ordered=is_ordered)
                if job is not None:
                    pending[pool.submit(work, job)] = count
                    count += 1
            while pending:
                yield from _taken(pending, is_ordered=is_ordered)
        finally:
            host.stop.set()
            pool.shutdown(cancel_futures=True)
            for tools in thread_tools:
                tools.close()


def _taken(pending: dict[Future[R], int], *, is_ordered: bool) -> Iterator[tuple[int, R]]:
    """Wait for results, at least for one, and take them out of `pending`."""
    first = next(iter(pending))
    done = {first} if is_ordered else wait(pending, return_when=FIRST_COMPLETED).done
    for future in sorted(done, key=pending.__getitem__):
        result = future.result()
        yield pending.pop(future), result


_THREADS: Executor = Threads()
_EXECUTOR: ContextVar[Executor] = ContextVar("executor")


def current_executor() -> Executor:
    """Return what runs the jobs of this context: by default threads."""
    return _EXECUTOR.get(_THREADS)


@contextmanager
def runs_on(chosen: Executor) -> Iterator[None]:
    """Let another executor run the jobs of all verbs that are called in this context."""
    before = _EXECUTOR.set(chosen)
    try:
        yield
    finally:
        _EXECUTOR.reset(before)


def run_ordered(
    jobs: Iterable[Job[T, R]],
    toolkit: Toolkit[T],
    *,
    workers: int,
    progress: Callable[[int], None],
    needed_bytes: int = 0,
) -> Iterator[R]:
    """Yield the result of every job in order; see `Executor.run`."""
    results = current_executor().run(
        jobs,
        toolkit,
        workers=workers,
        progress=progress,
        is_ordered=True,
        needed_bytes=needed_bytes,
    )
    with closing(results):
        for _, result in results:
            yield result
