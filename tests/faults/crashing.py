"""A run that was recorded, and the states in which a power failure may have left its disk."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Protocol

from tests.faults.crash_disk import CrashDisk
from tests.faults.crash_model import History, State
from tests.faults.nights import Night
from tests.faults.scenarios import Scenario
from tests.faults.shim import Option


@dataclass(frozen=True, slots=True)
class Crashing:
    """What was recorded on a bench, which is to try nothing else meanwhile."""

    disk: CrashDisk
    history: History
    judge: Callable[[State], list[str]]
    """Looks at what is on the disk, runs the same command, and says what is wrong."""

    def states(self, most: int | None = None, seed: int = 0) -> list[State]:
        """Choose states: all within the bound, or so many of them by chance."""
        found = list(self.history.states(seed))
        if most is None or len(found) <= most:
            return found
        return Random(seed).sample(found, most)

    def wrong(self, states: list[State]) -> Iterator[str]:
        """Try states, and describe each that is not right."""
        for state in states:
            self.disk.make(state)
            problems = self.judge(state)
            if not self.disk.is_intact:
                problems = [*problems, "a file was written into that should only be read"]
            if problems:
                yield "\n    ".join((state.text, *problems))


@dataclass(frozen=True, slots=True)
class Crashed:
    """One of the states, from which another run is to begin."""

    disk: CrashDisk
    state: State

    def make(self) -> None:
        """Make the disk what it is then."""
        self.disk.make(self.state)


@dataclass(frozen=True, slots=True)
class CrashReport:
    """What came of a scenario's states."""

    name: str
    calls: int
    """Calls that changed something."""
    possible: int
    """States within the bound."""
    tried: int
    twice: int
    """States that were tried after a second power failure, in the run after the first one."""
    wrong: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        """Spell the counts, and what is wrong."""
        text = f"{self.name}: {self.calls} changes, {self.possible} states, {self.tried} tried"
        text = f"{text} and {self.twice} after a second failure, {len(self.wrong)} wrong"
        return "\nWRONG ".join((f"{text}; {self.seconds:.0f} s", *self.wrong))


class Crashes(Protocol):
    """What records a run."""

    def crash(self, scenario: Scenario | Night, after: Crashed | None = None) -> Crashing:
        """Record a run; see `Bench.crash`."""


def try_crashes(
    bench: Crashes, scenario: Scenario | Night, most: int | None, *, again: int = 0, seed: int = 0
) -> CrashReport:
    """Have the power fail in a run, and judge what is left and what running again makes of it.

    Parameters
    ----------
    most
        States to try; None for all within the bound.
    again
        States in which the next run is recorded too, and the power fails in that: in so many
        states for each.
    """
    began = time.monotonic()
    first = bench.crash(scenario)
    possible = first.states(seed=seed)
    states = first.states(most, seed)
    wrong = list(first.wrong(states))
    twice = 0
    if isinstance(scenario, Scenario) and Option.LOCKLESS in scenario.system:
        again = 0  # a lock that is being taken over then holds, and the message says what to remove
    for turn, state in enumerate(Random(seed).sample(possible, min(again, len(possible)))):
        second = bench.crash(scenario, Crashed(first.disk, state))
        some = second.states(again, seed + turn)
        wrong += [f"{state.text}; then {text}" for text in second.wrong(some)]
        twice += len(some)
    return CrashReport(
        name=scenario.name,
        calls=len(first.history.changes),
        possible=len(possible),
        tried=len(states),
        twice=twice,
        wrong=tuple(wrong),
        seconds=time.monotonic() - began,
    )
