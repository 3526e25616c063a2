"""Runs a stream of jobs on a few workers, each with its own tools; results come in order."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar


class Tools(Protocol):
    """The objects that one worker needs for its jobs, and does not share."""

    def close(self) -> None:
        """Close open files."""


class Count:
    """A count that several workers add to; each addition is also passed to a callback."""

    def __init__(self, then: Callable[[int], None]) -> None:
        self.value = 0
        self._lock = threading.Lock()
        self._then = then

    def add(self, number: int) -> None:
        """Add to the count."""
        with self._lock:
            self.value += number
        self._then(number)


T = TypeVar("T", bound=Tools)
R = TypeVar("R")


def run_ordered(
    jobs: Iterable[Callable[[T], R]], make_tools: Callable[[], T], workers: int
) -> Iterator[R]:
    """Yield the result of every job in order; only a few jobs and results are in memory.

    The first error ends the iteration: jobs that have begun are finished, the others are skipped.
    """
    local = threading.local()
    made: list[T] = []

    def work(job: Callable[[T], R]) -> R:
        if not hasattr(local, "tools"):
            local.tools = make_tools()
            made.append(local.tools)
        return job(local.tools)

    pool = ThreadPoolExecutor(workers, thread_name_prefix="streamshard")
    pending: deque[Future[R]] = deque()
    try:
        for job in jobs:
            pending.append(pool.submit(work, job))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        for tools in made:
            tools.close()
