"""Jobs on several workers: results in order, few at a time, tools closed."""

import threading
from collections.abc import Callable, Iterator

import pytest

from streamshard.engine.scan.pool import Count, run_ordered


class Bench:
    """Tools that know whose they are and whether they are closed."""

    made: list["Bench"]

    def __init__(self, made: list["Bench"]) -> None:
        self.thread = threading.get_ident()
        self.closed = False
        made.append(self)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_order_whoever_is_first(workers: int) -> None:
    made: list[Bench] = []
    later = threading.Event()

    def job(number: int) -> Callable[[Bench], int]:
        def work(bench: Bench) -> int:
            assert bench.thread == threading.get_ident()
            if workers > 1 and number == 0:
                assert later.wait(30)
            if number == 1:
                later.set()
            return number

        return work

    found = list(run_ordered(map(job, range(20)), lambda: Bench(made), workers))
    assert found == list(range(20))
    assert 1 <= len(made) <= workers
    assert all(bench.closed for bench in made)


def test_few_jobs_are_taken_before_results_are_asked_for() -> None:
    taken = 0

    def job(number: int) -> Callable[[Bench], int]:
        return lambda _: number

    def jobs() -> Iterator[Callable[[Bench], int]]:
        nonlocal taken
        for number in range(100):
            taken += 1
            yield job(number)

    results = run_ordered(jobs(), lambda: Bench([]), 2)
    assert next(results) == 0
    assert taken <= 5
    assert list(results) == list(range(1, 100))


def test_the_first_error_ends_it_and_closes_the_tools() -> None:
    made: list[Bench] = []

    def fail(_: Bench) -> int:
        raise ValueError("broken")

    jobs: list[Callable[[Bench], int]] = [lambda _: 1, fail, lambda _: 3]
    with pytest.raises(ValueError, match="broken"):
        list(run_ordered(jobs, lambda: Bench(made), 2))
    assert made
    assert all(bench.closed for bench in made)


def test_a_count_that_many_add_to() -> None:
    passed_on = 0

    def then(number: int) -> None:
        nonlocal passed_on
        passed_on += number

    count = Count(then)

    def job(number: int) -> Callable[[Bench], None]:
        return lambda _: count.add(number)

    list(run_ordered(map(job, range(1000)), lambda: Bench([]), 4))
    assert count.value == sum(range(1000))
    assert passed_on > 0
