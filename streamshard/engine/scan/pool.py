"""A few workers, each with tools of its own, over a stream of jobs; results come in order."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar


class Tools(Protocol):
    """What a worker needs for its jobs and shares with nobody."""

    def close(self) -> None:
        """Let go of what is open."""


class Count:
    """A count that several workers add to, and pass on."""

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
    """Yield the result of every job, in order, holding no more than a few jobs and results.

    The first error ends it: jobs that have begun are finished, the rest is left.
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
