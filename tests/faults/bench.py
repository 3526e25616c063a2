"""Tries a case, and judges what is left: the source, the target, what was said, the rerun."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.faults.losses import lose
from tests.faults.scenarios import OUT, SOURCES, Scenario, Tree, empty, make_old_target, times, tree
from tests.faults.server import Ended, Kill, Second, Server
from tests.faults.shim import NO_KIND, Action, Arming, Call, Kind, Option, Side
from tests.faults.table import Fault

_EXISTS: Final = 4
_ONE_OF_TWO: Final = {(0, _EXISTS), (_EXISTS, 0)}
"""Exit codes of two runs at once."""
_LONGEST_SECONDS: Final = 60
"""What is tried again is tried for no longer."""
_ORDER_DIFFERS: Final = 25
"""Calls of two threads may change places by so many."""
_NEEDED: Final = Kind.WRITE | Kind.SYNC
"""Calls that a run cannot do without: if one failed for good, it did not do its work."""


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
        """Count of the calls after which some of the target is written, whatever the threads do."""
        first = next(c for c in self.calls if c.kind & Kind.WRITE and f"{OUT}.partial/" in c.path)
        return first.number + _ORDER_DIFFERS


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


class Bench:
    """A server and a directory of its own for targets; what is read is shared."""

    def __init__(self, server: Server, sources: Path, place: Path) -> None:
        self._server = server
        self._sources = sources
        self._target = place / "target"
        self._target.mkdir(parents=True)
        self._old = place / "old"
        make_old_target(sources, self._old)
        self._old_tree = tree(self._old)
        self._before = {name: (tree(sources / name), times(sources / name)) for name in SOURCES}
        self._undisturbed: dict[str, Undisturbed] = {}

    def undisturbed(self, scenario: Scenario) -> Undisturbed:
        """Run a scenario to its end, once."""
        if scenario.name not in self._undisturbed:
            self._server.warm_up(*self._prepare(scenario))
            ended = self._server.run(
                self._prepare(scenario),
                source=self._sources,
                target=self._target,
                options=scenario.system,
                with_calls=True,
            )
            if ended.code != 0 or self._names() != {OUT}:
                raise RuntimeError(f"{scenario.name}: {self._names()} {ended.code} {ended.err}")
            whole = tree(self._out)
            found = Undisturbed(ended.calls, whole, ended.seconds, ended.written)
            self._undisturbed[scenario.name] = found
        return self._undisturbed[scenario.name]

    def try_fault(self, scenario: Scenario, fault: Fault, at: int) -> Verdict:
        """Have a fault happen, and look at what is left and at what running again makes of it.

        Parameters
        ----------
        at
            Number of the call; or of one before it, if that one is not of the fault's kinds.
        """
        undisturbed = self.undisturbed(scenario)
        whole = undisturbed.tree
        arguments = self._prepare(scenario)
        before = [self._target, *self._target.rglob("*")] if fault.loss else []
        ended = self._server.run(
            arguments,
            source=self._sources,
            target=self._target,
            arming=fault.at(at),
            options=scenario.system | Option.HURRY,
            with_calls=fault.loss is not None,
        )
        told = f"{scenario.name}: {fault.name} at {ended.fired or 'no call'}"
        if fault.loss is not None:
            lost = lose(fault.loss, ended.calls, self._target, before)
            told = f"{told}; lost {[Path(path).name for path in lost]}"
        problems = [*self._judge_state(scenario, whole), *self._judge_end(fault, ended)]
        was_whole = tree(self._out) == whole
        if ended.fired is not None and not fault.loss and not was_whole:
            problems += self._judge_partial(ended, ended.fired.number >= undisturbed.has_begun)
        again = self._run_again(scenario)
        problems += self._judge_rerun(again, scenario, whole, was_whole=was_whole)
        return Verdict(
            told=told,
            code=ended.code,
            has_fired=ended.fired is not None,
            was_whole=was_whole,
            written_again=again.written,
            problems=tuple(problems),
        )

    def try_kill(self, scenario: Scenario, kill: Kill, code: int) -> Verdict:
        """Send a signal to a run at an instant; look at what is left, and run again.

        Parameters
        ----------
        code
            Exit code that is right where the run had not come to its end before.
        """
        whole = self.undisturbed(scenario).tree
        ended = self._server.run(
            self._prepare(scenario),
            source=self._sources,
            target=self._target,
            options=scenario.system,
            kill=kill,
        )
        problems = self._judge_state(scenario, whole)
        # Before it has looked at any file it is still the interpreter that takes the signal, and
        # at the very end the run may be done.
        if ended.count and ended.code not in ({0, code} if ended.was_killed else {0}):
            problems.append(f"exit code {ended.code}, not {code}: {ended.err}")
        elif ended.count and ended.code > 0 and len(ended.err.strip().splitlines()) != 1:
            problems.append(f"not one line that tells how to go on: {ended.err!r}")
        was_whole = tree(self._out) == whole
        again = self._run_again(scenario)
        problems += self._judge_rerun(again, scenario, whole, was_whole=was_whole)
        told = f"{scenario.name}: signal {kill.number} after {kill.after_seconds * 1e3:.1f} ms"
        return Verdict(
            told=f"{told}: exit code {ended.code}",
            code=ended.code,
            has_fired=ended.was_killed,
            was_whole=was_whole,
            written_again=again.written,
            problems=tuple(problems),
        )

    def try_second(self, scenario: Scenario, at: int, *, is_killed: bool) -> Verdict:
        """Run a command while a run of it is stopped at a call, which then goes on or is killed."""
        undisturbed = self.undisturbed(scenario)
        whole = undisturbed.tree
        stop = Arming(at, Action.STOP, 0, ~NO_KIND, Side.SOURCE | Side.TARGET, NO_KIND)
        ended = self._server.run(
            self._prepare(scenario),
            source=self._sources,
            target=self._target,
            arming=stop,
            options=scenario.system,
            second_when_stopped=True,
            killed_when_stopped=is_killed,
        )
        second = ended.second or Second(_EXISTS, f"process {ended.process}")
        problems = self._judge_state(scenario, whole)
        was_whole = tree(self._out) == whole
        right = {(-9, 0), (-9, _EXISTS)} if is_killed and ended.second else _ONE_OF_TWO
        if (ended.code, second.code) not in right or was_whole != (0 in (ended.code, second.code)):
            problems.append(f"exit codes {ended.code} and {second.code}: {ended.err}{second.err}")
        if "Traceback" in ended.err + second.err:
            problems.append(f"a traceback: {ended.err}{second.err}")
        # Either there was a target when it came, or it was told who is making one; but for the
        # moment in which the first has locked it and not yet said so.
        is_told = bool({str(ended.process), "exists"} & _words(second.err))
        if second.code == _EXISTS and at >= undisturbed.has_begun and not is_told:
            problems.append(f"does not say who holds the target: {second.err!r}")
        again = self._run_again(scenario)
        problems += self._judge_rerun(again, scenario, whole, was_whole=was_whole)
        return Verdict(
            told=f"{scenario.name}: second run while the first was at {ended.fired or 'no call'}",
            code=ended.code,
            has_fired=ended.second is not None,
            was_whole=was_whole,
            written_again=again.written,
            problems=tuple(problems),
        )

    @property
    def _out(self) -> Path:
        return self._target / OUT

    def _names(self) -> set[str]:
        return {path.name for path in self._target.iterdir()}

    def _prepare(self, scenario: Scenario) -> list[str]:
        """Make the place for a target as it is before the first run; returns the command line."""
        empty(self._target)
        if scenario.replaces:
            shutil.copytree(self._old, self._out)
        return scenario.arguments(self._sources, self._target)

    def _judge_state(self, scenario: Scenario, whole: Tree) -> list[str]:
        problems = []
        if self._has_changed_source(scenario):
            problems.append("the source is not what it was")
        if self._out.exists() and tree(self._out) not in (whole, self._old_tree):
            problems.append(
                f"the target is neither whole nor absent: {_differing(self._out, whole)}"
            )
        return problems

    def _has_changed_source(self, scenario: Scenario) -> bool:
        source = self._sources / scenario.source
        return (tree(source), times(source)) != self._before[scenario.source]

    def _judge_end(self, fault: Fault, ended: Ended) -> list[str]:
        """Judge how a run ended and what it said."""
        problems = []
        if ended.fired is None:
            right = {0}
        else:
            right = {*fault.codes}
            if not fault.is_death and not ended.failed & _NEEDED:
                right.add(0)
        if ended.code not in right:
            problems.append(
                f"exit code {ended.code}, not of {sorted(right)}: {ended.err.strip()!r}"
            )
        if "Traceback" in ended.err:
            problems.append(f"a traceback: {ended.err}")
        elif ended.code > 0 and not fault.is_death and not self._names_a_path(ended):
            problems.append(f"no path in the message: {ended.err!r}")
        if ended.code == 0 and self._names() != {OUT}:
            problems.append(f"said to be done, and left {sorted(self._names())}")
        return problems

    def _names_a_path(self, ended: Ended) -> bool:
        return any(str(root) in ended.err for root in (self._sources, self._target))

    def _judge_partial(self, ended: Ended, has_begun: bool) -> list[str]:
        """A run that failed keeps what it had written, and does not wait for ever."""
        problems = []
        partial = self._target / f"{OUT}.partial"
        if ended.code == 0:
            problems.append("said to be done, and the target is not there")
        elif has_begun and not partial.is_dir():
            problems.append(f"what was written was thrown away: {ended.err.strip()!r}")
        if ended.slept > _LONGEST_SECONDS:
            problems.append(f"would have waited {ended.slept:.0f} s")
        return problems

    def _run_again(self, scenario: Scenario) -> Ended:
        return self._server.run(
            scenario.arguments(self._sources, self._target),
            source=self._sources,
            target=self._target,
            options=scenario.system | Option.HURRY,
        )

    def _judge_rerun(
        self, again: Ended, scenario: Scenario, whole: Tree, *, was_whole: bool
    ) -> list[str]:
        if was_whole and again.code == _EXISTS and not scenario.replaces:
            return [] if tree(self._out) == whole else ["run again, it changed a whole target"]
        if again.code != 0:
            return [f"run again, it ended with {again.code}: {again.err.strip()!r}"]
        problems = []
        if tree(self._out) != whole:
            problems.append(f"run again, it made something else: {_differing(self._out, whole)}")
        if self._names() != {OUT}:
            problems.append(f"run again, it left {sorted(self._names())}")
        if self._has_changed_source(scenario):
            problems.append("run again, it changed the source")
        return problems


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def _differing(root: Path, whole: Tree) -> list[str]:
    found = tree(root)
    both = found.keys() | whole.keys()
    return sorted(name for name in both if found.get(name) != whole.get(name))
