"""Chooses cases, and has several benches try them at once."""

import os
import queue
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final, Protocol, TypeVar

from tests.faults.bench import Bench
from tests.faults.crashing import Crashing, CrashReport, try_crashes
from tests.faults.losses import Loss
from tests.faults.nights import Night, make_setups
from tests.faults.scenarios import Scenario, make_sources
from tests.faults.server import Kill, Server
from tests.faults.shim import Side
from tests.faults.table import FAULTS, Fault
from tests.faults.verdict import Undisturbed, Verdict

SIGNALS: Final = {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}
"""Signal → how a run ends then."""

T = TypeVar("T")
R = TypeVar("R")


class Try(Protocol):
    """Something to try on a bench."""

    def on(self, bench: Bench) -> Verdict:
        """Try it."""


@dataclass(frozen=True, slots=True)
class Case:
    """A fault at a call of a scenario."""

    scenario: Scenario | Night
    fault: Fault
    at: int
    """Number of the call; or of one before it, if that one is not of the fault's kinds."""

    def on(self, bench: Bench) -> Verdict:
        """Try it."""
        return bench.try_fault(self.scenario, self.fault, self.at)


@dataclass(frozen=True, slots=True)
class Killing:
    """A signal to a scenario's run."""

    scenario: Scenario
    kill: Kill
    code: int
    """How the run is to end."""

    def on(self, bench: Bench) -> Verdict:
        """Try it."""
        return bench.try_kill(self.scenario, self.kill, self.code)


@dataclass(frozen=True, slots=True)
class SecondRun:
    """A second run of a scenario while the first is stopped at a call."""

    scenario: Scenario
    at: int
    is_killed: bool
    """Whether the first is killed after that."""

    def on(self, bench: Bench) -> Verdict:
        """Try it."""
        return bench.try_second(self.scenario, self.at, is_killed=self.is_killed)


class Benches:
    """Benches that try cases side by side."""

    def __init__(self, benches: Sequence[Bench]) -> None:
        self._count = len(benches)
        self._first = benches[0]
        self._free: queue.Queue[Bench] = queue.Queue()
        for bench in benches:
            self._free.put(bench)

    def undisturbed(self, scenario: Scenario | Night) -> Undisturbed:
        """Run a scenario to its end; nothing else may be tried meanwhile."""
        return self._first.undisturbed(scenario)

    def lost_when_done(self, scenario: Scenario | Night, loss: Loss) -> list[str]:
        """List what is lost if the power is cut after a run has ended."""
        return self._first.try_loss(scenario, loss)

    def crashes(
        self, scenarios: Sequence[Scenario | Night], most: int | None, *, again: int = 0
    ) -> Iterator[CrashReport]:
        """Have the power fail in each scenario, and yield what came of it; see `try_crashes`."""
        return self._on_each(
            scenarios, lambda scenario, bench: try_crashes(bench, scenario, most, again=again)
        )

    @contextmanager
    def recorded(self, scenario: Scenario | Night) -> Iterator[Crashing]:
        """Record a run on a bench that tries nothing else meanwhile."""
        bench = self._free.get()
        try:
            yield bench.crash(scenario)
        finally:
            self._free.put(bench)

    def judge(self, tries: Iterable[Try]) -> Iterator[Verdict]:
        """Yield the verdicts, in order."""
        return self._on_each(tries, lambda one, bench: one.on(bench))

    def _on_each(self, items: Iterable[T], do: Callable[[T, Bench], R]) -> Iterator[R]:
        """Do something with each item on any bench, and yield the results in order."""

        def do_one(item: T) -> R:
            bench = self._free.get()
            try:
                return do(item, bench)
            finally:
                self._free.put(bench)

        with ThreadPoolExecutor(self._count) as pool:
            yield from pool.map(do_one, items)


@contextmanager
def quick_place() -> Iterator[Path]:
    """Make a directory in memory, if there is such a file system; thousands of runs sync there."""
    memory = Path("/dev/shm")
    where = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="streamshard-faults-", dir=where) as place:
        Path(place).chmod(0o755)  # some cases run as a user of no rights
        yield Path(place)


@contextmanager
def benches(library: Path, place: Path, count: int | None = None) -> Iterator[Benches]:
    """Make the sources and some benches; by default one more than processors, to keep them busy."""
    count = count or min(4, len(os.sched_getaffinity(0)) + 1)
    sources, setups = make_sources(place / "sources"), make_setups(place / "setups")
    with ExitStack() as stack:
        yield Benches(
            [
                Bench(stack.enter_context(Server(library)), sources, setups, place / str(number))
                for number in range(count)
            ]
        )


def rotated(scenario: Scenario | Night, undisturbed: Undisturbed, step: int) -> list[Case]:
    """Choose a fault for each `step`th of its own calls: in turn, of those that fit its kind."""
    turns: Counter[tuple[int, int]] = Counter()
    cases = []
    for call in [call for call in undisturbed.calls if call.side & scenario.own][::step]:
        fitting = [fault for fault in FAULTS if fault.fits(call)]
        turn = turns[call.side, call.kind]
        turns[call.side, call.kind] += 1
        cases.append(Case(scenario, fitting[turn % len(fitting)], call.number))
    return cases


def every(scenario: Scenario | Night, undisturbed: Undisturbed) -> list[Case]:
    """List every fault at every call that it may happen at."""
    calls = undisturbed.calls
    return [Case(scenario, f, call.number) for call in calls for f in FAULTS if f.fits(call)]


def second_runs(scenario: Scenario, undisturbed: Undisturbed) -> list[SecondRun]:
    """List second runs at every call on the target; every other time the first is killed."""
    numbers = [call.number for call in undisturbed.calls if call.side & Side.TARGET]
    return [SecondRun(scenario, number, bool(turn % 2)) for turn, number in enumerate(numbers)]


def chosen_kills(
    scenarios: Sequence[Scenario], undisturbed: Mapping[str, Undisturbed], count: int
) -> Iterator[Killing]:
    """Choose scenarios, signals and instants of their runs, the same ones each time."""
    chance = Random(1)
    signals = list(SIGNALS.items())
    for turn in range(count):
        scenario = scenarios[turn // len(signals) % len(scenarios)]
        number, code = signals[turn % len(signals)]
        seconds = chance.uniform(0, 1.1) * undisturbed[scenario.name].seconds
        yield Killing(scenario, Kill(number, seconds), code)
