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
from typing import Any, Final, TypeVar

from tests.faults.bench import Targets
from tests.faults.compact_ground import CompactGround
from tests.faults.compact_scenarios import AnyScenario, CompactScenario, make_setups
from tests.faults.crashing import Crashing, CrashReport, try_crashes
from tests.faults.ground import Ground, Undisturbed, Verdict
from tests.faults.scenarios import Scenario, make_sources
from tests.faults.server import Kill, Server
from tests.faults.shim import Side
from tests.faults.table import FAULTS, Fault

SIGNALS: Final = {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}
"""Signal → how a run ends then."""

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Bench:
    """A server, and places of its own for targets and for runs of `compact`."""

    targets: Targets
    compact: CompactGround

    @classmethod
    def make(cls, server: Server, sources: Path, setups: Path, place: Path) -> "Bench":
        """Make the places; what is read is shared."""
        return cls(
            Targets(server, sources, place), CompactGround(server, setups, place / "compact")
        )

    def of(self, command: AnyScenario) -> Ground[Any]:
        """Return where a command is tried."""
        return self.compact if isinstance(command, CompactScenario) else self.targets


Case = Callable[[Bench], Verdict]
"""Something to try on a bench."""


class Benches:
    """Benches that try cases side by side."""

    def __init__(self, benches: Sequence[Bench]) -> None:
        self._count = len(benches)
        self._first = benches[0]
        self._free: queue.Queue[Bench] = queue.Queue()
        for bench in benches:
            self._free.put(bench)

    def undisturbed(self, scenario: AnyScenario) -> Undisturbed:
        """Run a scenario to its end; nothing else may be tried meanwhile."""
        return self._first.of(scenario).undisturbed(scenario)

    def crashes(
        self, scenarios: Sequence[AnyScenario], most: int | None, *, again: int = 0
    ) -> Iterator[CrashReport]:
        """Have the power fail in each scenario, and yield what came of it; see `try_crashes`."""
        return self._on_each(
            scenarios,
            lambda scenario, bench: try_crashes(bench.of(scenario), scenario, most, again=again),
        )

    @contextmanager
    def recorded(self, scenario: AnyScenario) -> Iterator[Crashing]:
        """Record a run on a bench that tries nothing else meanwhile."""
        bench = self._free.get()
        try:
            yield bench.of(scenario).crash(scenario)
        finally:
            self._free.put(bench)

    def judge(self, cases: Iterable[Case]) -> Iterator[Verdict]:
        """Yield the verdicts, in order."""
        return self._on_each(cases, lambda case, bench: case(bench))

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
                Bench.make(stack.enter_context(Server(library)), sources, setups, place / str(n))
                for n in range(count)
            ]
        )


def fault_at(scenario: AnyScenario, fault: Fault, at: int) -> Case:
    """Have a fault happen at a call; see `Ground.try_fault`."""
    return lambda bench: bench.of(scenario).try_fault(scenario, fault, at)


def second_at(scenario: Scenario, at: int, *, is_killed: bool) -> Case:
    """Have a second run come at a call of a first; see `Targets.try_second`."""
    return lambda bench: bench.targets.try_second(scenario, at, is_killed=is_killed)


def killed(scenario: Scenario, kill: Kill, code: int) -> Case:
    """Send a signal at an instant; see `Targets.try_kill`."""
    return lambda bench: bench.targets.try_kill(scenario, kill, code)


def rotated(scenario: AnyScenario, undisturbed: Undisturbed, step: int) -> list[Case]:
    """Choose a fault for each `step`th of its own calls: in turn, of those that fit its kind."""
    turns: Counter[tuple[int, int]] = Counter()
    cases = []
    for call in [call for call in undisturbed.calls if call.side & scenario.own][::step]:
        fitting = [fault for fault in FAULTS if fault.fits(call)]
        turn = turns[call.side, call.kind]
        turns[call.side, call.kind] += 1
        cases.append(fault_at(scenario, fitting[turn % len(fitting)], call.number))
    return cases


def every(scenario: AnyScenario, undisturbed: Undisturbed, name: str) -> list[Case]:
    """List every fault with that in its name at every call that it may happen at."""
    faults = [fault for fault in FAULTS if name in fault.name]
    return [
        fault_at(scenario, fault, call.number)
        for call in undisturbed.calls
        for fault in faults
        if fault.fits(call)
    ]


def second_runs(scenario: Scenario, undisturbed: Undisturbed) -> list[Case]:
    """List second runs at every call on the target; every other time the first is killed."""
    numbers = [call.number for call in undisturbed.calls if call.side & Side.TARGET]
    return [second_at(scenario, n, is_killed=bool(turn % 2)) for turn, n in enumerate(numbers)]


def chosen_kills(
    scenarios: Sequence[Scenario], undisturbed: Mapping[str, Undisturbed], count: int
) -> Iterator[Case]:
    """Choose scenarios, signals and instants of their runs, the same ones each time."""
    chance = Random(1)
    signals = list(SIGNALS.items())
    for turn in range(count):
        scenario = scenarios[turn // len(signals) % len(scenarios)]
        number, code = signals[turn % len(signals)]
        seconds = chance.uniform(0, 1.1) * undisturbed[scenario.name].seconds
        yield killed(scenario, Kill(number, seconds), code)
