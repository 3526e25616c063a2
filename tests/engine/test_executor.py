"""Jobs on threads: results as they come or in order, few at a time, tools closed."""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest

from streamshard.engine.jobs.executor import Host, Job, Threads, Toolkit, run_ordered


class Bench:
    """Tools that know whose they are and whether they are closed."""

    def __init__(self, host: Host) -> None:
        self.thread = threading.get_ident()
        self.host = host
        self.closed = False

    def settle(self) -> None:
        """Read nothing."""

    def close(self) -> None:
        self.closed = True


@dataclass
class Benches(Toolkit[Bench]):
    """Makes benches, and remembers them."""

    made: list[Bench] = field(default_factory=list)

    def prove(self) -> str:
        raise AssertionError("threads see what their process sees")

    def accept(self, evidence: str) -> None:
        raise AssertionError("nothing was shown")

    def make(self, host: Host) -> Bench:
        self.made.append(Bench(host))
        return self.made[-1]


def ordered(jobs: Iterable[Job[Bench, int]], benches: Benches, workers: int = 2) -> Iterator[int]:
    return run_ordered(iter(jobs), benches, workers=workers, progress=lambda nbytes: None)


run = partial(Threads().run, progress=lambda nbytes: None)


def test_few_jobs_are_taken_before_results_are_asked_for() -> None:
    taken: list[int] = []

    def work(number: int, _: Bench) -> int:
        return number

    def jobs() -> Iterator[Job[Bench, int]]:
        for number in range(100):
            taken.append(number)
            yield partial(work, number)

    results = ordered(jobs(), Benches())
    assert next(results) == 0
    assert len(taken) <= 6
    assert list(results) == list(range(1, 100))


def test_the_first_error_ends_it_stops_others_and_closes_the_tools() -> None:
    benches = Benches()
    begun = threading.Event()

    def long(bench: Bench) -> int:
        begun.set()
        assert bench.host.stop.wait(30)
        return 1

    def fail(_: Bench) -> int:
        assert begun.wait(30)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        list(run([long, fail], benches, workers=2))
    assert len(benches.made) == 2
    assert all(bench.closed for bench in benches.made)
