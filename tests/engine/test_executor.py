"""Jobs on threads: results as they come or in order, few at a time, tools closed."""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest

from streamshard.engine.jobs.executor import Host, Job, Threads, Toolkit, run_ordered
from streamshard.engine.run.phases import Count


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


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_order_whoever_is_first(workers: int) -> None:
    benches = Benches()
    later = threading.Event()

    def work(number: int, bench: Bench) -> int:
        assert bench.thread == threading.get_ident()
        if workers > 1 and number == 0:
            assert later.wait(30)
        if number == 1:
            later.set()
        return number

    jobs = [partial(work, number) for number in range(20)]
    assert list(ordered(jobs, benches, workers)) == list(range(20))
    assert 1 <= len(benches.made) <= workers
    assert all(bench.closed for bench in benches.made)


def test_results_come_as_they_are_ready() -> None:
    second = threading.Event()

    def first(_: Bench) -> str:
        assert second.wait(30)
        return "first"

    found = run([first, lambda _: "second"], Benches(), workers=2)
    assert next(found) == (1, "second")
    second.set()
    assert list(found) == [(0, "first")]


def test_none_among_the_jobs_waits_for_those_before() -> None:
    taken: list[int] = []

    def work(number: int, _: Bench) -> int:
        assert number < 5 or sorted(taken) == list(range(5))
        return number

    jobs = [partial(work, number) for number in range(6)]
    for number, result in run([*jobs[:5], None, jobs[5]], Benches(), workers=3):
        assert number == result
        taken.append(number)
    assert sorted(taken) == list(range(6))
    assert taken[-1] == 5


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


def test_a_count_that_many_add_to() -> None:
    passed_on: list[int] = []
    count = Count(passed_on.append)

    def work(number: int, bench: Bench) -> int:
        bench.host.progress(number)
        return number

    jobs = (partial(work, number) for number in range(1000))
    list(run_ordered(jobs, Benches(), workers=4, progress=count.add))
    assert count.value == sum(range(1000))
    assert sum(passed_on) > 0
