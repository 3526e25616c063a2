"""Tries cases: runs a command, lets something happen to it, has the rest judged, runs again."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from streamshard.formats.deepspeed.names import OWN_PREFIX
from streamshard.source.unfinished import JOURNAL
from tests.faults.compact_scenarios import AnyScenario
from tests.faults.crash_model import History
from tests.faults.crashing import CrashDisk, Crashed, Crashing
from tests.faults.scenarios import OUT, Tree
from tests.faults.server import Ended, Server
from tests.faults.shim import NO_OPTION, NOTHING, Arming, Call, Kind, Option
from tests.faults.table import Fault

C = TypeVar("C", bound=AnyScenario)
_ORDER_DIFFERS: Final = 25
"""Calls of two threads may change places by so many."""
_FRAMES: Final = 3


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """A scenario's run to which nothing happened."""

    calls: tuple[Call, ...]
    tree: Tree
    seconds: float
    written: int
    """Bytes that went into files."""

    @property
    def has_begun(self) -> int:
        """Count of the calls after which the journal has a part, whatever the threads do."""
        return _notes(self.calls)[0].number + _ORDER_DIFFERS


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a case."""

    told: str
    """The case, and the call at which it happened."""
    code: int
    has_fired: bool
    was_whole: bool
    """Whether the target was there after the fault."""
    written_again: int
    """Bytes that running again wrote into files."""
    problems: tuple[str, ...]

    def __str__(self) -> str:
        return "\n    ".join((self.told, *self.problems))


def has_noted(calls: Sequence[Call]) -> bool:
    """Tell whether a run had noted a part: a second note shows that it returned from the first."""
    return sum(call.is_done for call in _notes(calls)) > 1


def _notes(calls: Sequence[Call]) -> list[Call]:
    """Select the writes to the journal that come after a write to a file of the target."""
    partial, journal = f"{OUT}.partial/", f"{OUT}.partial/{JOURNAL}"
    writes = [call for call in calls if call.kind & Kind.WRITE and partial in call.path]
    own = f"{partial}{OWN_PREFIX}"
    return [
        call for call in dropwhile(lambda call: own in call.path, writes) if journal in call.path
    ]


class Ground(ABC, Generic[C]):
    """A server, and a place of its own for what commands of one kind change.

    Parameters
    ----------
    source
        What is read; it is shared.
    stays
        Name of a directory in the place whose files keep their inodes in a power failure.
    """

    def __init__(self, server: Server, source: Path, place: Path, stays: str = "") -> None:
        self._server, self._source, self._place, self._stays = server, source, place, stays
        self._undisturbed: dict[str, Undisturbed] = {}

    @abstractmethod
    def _prepare(self, command: C) -> None:
        """Make the place as it is before the first run."""

    @abstractmethod
    def _seen(self) -> Tree:
        """Look at what a command makes."""

    @abstractmethod
    def _unfinished(self, command: C) -> str:
        """Say what an undisturbed run did not do, or left behind."""

    @abstractmethod
    def _after_fault(self, command: C, fault: Fault, ended: Ended) -> list[str]:
        """Judge how a run ended to which something happened, and what it left."""

    @abstractmethod
    def _after_crash(self, command: C) -> list[str]:
        """Judge what a power failure has left."""

    @abstractmethod
    def _after_rerun(self, command: C, again: Ended, *, was_whole: bool) -> list[str]:
        """Judge the same command, run again with nothing in its way."""

    def undisturbed(self, command: C) -> Undisturbed:
        """Run a command to its end, once."""
        if command.name not in self._undisturbed:
            self._prepare(command)
            self._server.warm_up(*command.arguments(self._source, self._place))
            self._prepare(command)
            ended = self._run(command, with_calls=True)
            found = Undisturbed(ended.calls, self._seen(), ended.seconds, ended.written)
            if ended.code != 0 or self._unfinished(command):
                told = f"{ended.code}, {ended.err}, {self._unfinished(command)}"
                raise RuntimeError(f"{command.name}: {told}")
            self._undisturbed[command.name] = found
        return self._undisturbed[command.name]

    def try_fault(self, command: C, fault: Fault, at: int) -> Verdict:
        """Have a fault happen, and look at what is left and at what running again makes of it.

        Parameters
        ----------
        at
            Number of the call; or of one before it, if that one is not of the fault's kinds.
        """
        self.undisturbed(command)
        self._prepare(command)
        ended = self._run(command, fault.at(at), Option.HURRY, with_calls=True)
        problems = self._after_fault(command, fault, ended)
        told = f"{fault.name} at {ended.fired or 'no call'}"
        return self._verdict(told, command, ended, problems, has_fired=ended.fired is not None)

    def crash(self, command: C, after: Crashed | None = None) -> Crashing:
        """Record all that a run changes; nothing else may be tried before all its states are.

        Parameters
        ----------
        after
            Where the run begins; by default where a first run does.
        """
        self.undisturbed(command)
        if after is None:
            self._prepare(command)
        else:
            after.make()
        keep = self._place.with_name(f"{self._place.name}.keep")
        disk = CrashDisk(self._place, keep, stays=self._stays)
        ended = self._run(command, option=Option.HURRY, with_calls=True, with_content=True)
        history = History(self._place, disk.start, disk.inodes, ended.calls)

        def judge(*, is_at_end: bool) -> list[str]:
            was_whole = self._is_whole(command)
            problems = self._after_crash(command)
            if ended.code == 0 and is_at_end and not was_whole:
                problems.append(f"said to be done, and is not: {self._differing(command)}")
            again = self._run(command, option=Option.HURRY)
            return problems + self._after_rerun(command, again, was_whole=was_whole)

        return Crashing(disk, history, lambda state: judge(is_at_end=state.is_at_end))

    def _verdict(
        self, told: str, command: C, ended: Ended, problems: list[str], *, has_fired: bool
    ) -> Verdict:
        """Run again, and put together what was wrong before and after that."""
        was_whole = self._is_whole(command)
        again = self._run(command, option=Option.HURRY)
        rerun = self._after_rerun(command, again, was_whole=was_whole)
        return Verdict(
            told=f"{command.name}: {told}, exit code {ended.code}",
            code=ended.code,
            has_fired=has_fired,
            was_whole=was_whole,
            written_again=again.written,
            problems=(*problems, *rerun),
        )

    def _is_whole(self, command: C) -> bool:
        return self._seen() == self.undisturbed(command).tree

    def _differing(self, command: C) -> list[str]:
        now, whole = self._seen(), self.undisturbed(command).tree
        return sorted(p for p in now.keys() | whole.keys() if now.get(p) != whole.get(p))

    def _run(
        self,
        command: C,
        arming: Arming = NOTHING,
        option: Option = NO_OPTION,
        **more: Any,  # noqa: ANN401
    ) -> Ended:
        return self._server.run(
            command.arguments(self._source, self._place),
            source=self._source,
            target=self._place,
            arming=arming,
            options=command.system | option,
            **more,
        )


def in_short(text: str) -> str:
    """Leave of a traceback where in the package it ended, and with what."""
    lines = text.strip().splitlines()
    if not any(line.startswith("Traceback") for line in lines):
        return repr(text.strip())
    frames = [line.strip() for line in lines if "/streamshard/" in line]
    return " | ".join((*frames[-_FRAMES:], lines[-1]))
