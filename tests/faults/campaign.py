"""Chooses cases, and has several benches try them at once."""

import os
import queue
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Final

from tests.faults.bench import Bench, Case, Undisturbed, Verdict
from tests.faults.scenarios import SCENARIOS, Scenario, make_sources
from tests.faults.server import Kill, Server
from tests.faults.table import FAULTS

SIGNALS: Final = {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}
"""Signal → how a run ends then."""


class Benches:
    """Benches that try cases side by side."""

    def __init__(self, benches: Sequence[Bench]) -> None:
        self._count = len(benches)
        self._first = benches[0]
        self._free: queue.Queue[Bench] = queue.Queue()
        for bench in benches:
            self._free.put(bench)

    def undisturbed(self, scenario: Scenario) -> Undisturbed:
        """Run a scenario to its end; nothing else may be tried meanwhile."""
        return self._first.undisturbed(scenario)

    def judge(self, tries: Iterable[Callable[[Bench], Verdict]]) -> Iterator[Verdict]:
        """Yield the verdicts, in order."""

        def judge_one(one: Callable[[Bench], Verdict]) -> Verdict:
            bench = self._free.get()
            try:
                return one(bench)
            finally:
                self._free.put(bench)

        with ThreadPoolExecutor(self._count) as pool:
            yield from pool.map(judge_one, tries)


@contextmanager
def benches(library: Path, place: Path, count: int | None = None) -> Iterator[Benches]:
    """Make the sources and some benches; by default one per processor, of at most four."""
    count = count or min(4, len(os.sched_getaffinity(0)))
    sources = make_sources(place / "sources")
    with ExitStack() as stack:
        yield Benches(
            [
                Bench(stack.enter_context(Server(library)), sources, place / str(number))
                for number in range(count)
            ]
        )


def rotated(scenario: Scenario, undisturbed: Undisturbed) -> list[Case]:
    """Choose one fault for every call: in turn, of those that may happen at calls of its kind."""
    turns: Counter[tuple[int, int]] = Counter()
    cases = []
    for call in undisturbed.calls:
        fitting = [fault for fault in FAULTS if fault.fits(call)]
        turn = turns[call.side, call.kind]
        turns[call.side, call.kind] += 1
        cases.append(Case(scenario, fitting[turn % len(fitting)], call.number))
    return cases


def every(scenario: Scenario, undisturbed: Undisturbed) -> list[Case]:
    """List every fault at every call that it may happen at."""
    calls = undisturbed.calls
    return [Case(scenario, f, call.number) for call in calls for f in FAULTS if f.fits(call)]


def kills(undisturbed: dict[str, Undisturbed], count: int) -> Iterator[tuple[Scenario, Kill, int]]:
    """Choose a scenario, a signal and an instant of its run, the same ones each time."""
    chance = Random(1)
    signals = list(SIGNALS.items())
    for turn in range(count):
        scenario = SCENARIOS[turn // len(signals) % len(SCENARIOS)]
        number, code = signals[turn % len(signals)]
        seconds = chance.uniform(0, 1.1) * undisturbed[scenario.name].seconds
        yield scenario, Kill(number, seconds), code
