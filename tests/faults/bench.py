"""Tries cases on runs that make a target, and judges what they leave and say."""

import os
import re
import shutil
from pathlib import Path
from typing import Final

from streamshard.formats.deepspeed.names import OWN_PREFIX
from tests.faults.ground import Ground, Verdict, has_noted, in_short
from tests.faults.scenarios import OUT, SOURCES, Scenario, Tree, empty, make_old_target, times, tree
from tests.faults.server import Ended, Kill, Meanwhile, Second, Server
from tests.faults.shim import NO_KIND, Action, Arming, Kind, Side
from tests.faults.table import Fault

_EXISTS: Final = 4
"""Exit code of a run whose target is there, or is being made."""
_ONE_OF_TWO: Final = {(0, _EXISTS), (_EXISTS, 0)}
"""Exit codes of two runs at once."""
_LONGEST_SECONDS: Final = 60
"""What is tried again is tried for no longer."""
_NEEDED: Final = Kind.WRITE | Kind.SYNC
"""Calls that a run cannot do without: if one failed for good, it did not do its work."""


class Targets(Ground[Scenario]):
    """Tries scenarios."""

    def __init__(self, server: Server, sources: Path, place: Path) -> None:
        super().__init__(server, sources, place / "target")
        self._place.mkdir(parents=True)
        self._out, self._partial, self._replaced = (
            self._place / f"{OUT}{suffix}" for suffix in ("", ".partial", ".replaced")
        )
        self._old_place = place / "old"
        make_old_target(sources, self._old_place)
        self._old = tree(self._old_place)
        self._before = {name: (tree(sources / name), times(sources / name)) for name in SOURCES}

    def _prepare(self, command: Scenario) -> None:
        empty(self._place)
        if command.replaces:
            shutil.copytree(self._old_place, self._out)
        if command.is_empty:
            self._out.mkdir()

    def try_kill(self, scenario: Scenario, kill: Kill, code: int) -> Verdict:
        """Send a signal to a run at an instant; look at what is left, and run again.

        Parameters
        ----------
        code
            Exit code that is right where the run had not come to its end before.
        """
        self.undisturbed(scenario)
        self._prepare(scenario)
        ended = self._run(scenario, kill=kill, with_calls=True)
        has_begun = has_noted(ended.calls)
        problems = self._after_signal(code, ended, has_begun=has_begun)
        problems += self._left(scenario, ended, has_begun=has_begun)
        told = f"signal {kill.number} after {kill.after_seconds * 1e3:.1f} ms"
        told = f"{told}, in which it made {ended.count} calls"
        return self._verdict(told, scenario, ended, problems, has_fired=ended.was_killed)

    def try_second(self, scenario: Scenario, at: int, *, is_killed: bool) -> Verdict:
        """Run a command while a run of it is stopped at a call, which then goes on or is killed."""
        has_begun = at >= self.undisturbed(scenario).has_begun
        self._prepare(scenario)
        stop = Arming(at, Action.STOP, 0, ~NO_KIND, Side.SOURCE | Side.TARGET, NO_KIND)
        same = scenario.arguments(self._source, self._place)
        ended = self._run(scenario, stop, meanwhile=Meanwhile(second=same, kills=is_killed))
        problems = self._after_two(scenario, ended, has_begun=has_begun)
        problems += self._left(scenario, ended, has_begun=has_begun)
        told = f"second run while the first was at {ended.fired or 'no call'}"
        return self._verdict(told, scenario, ended, problems, has_fired=ended.second is not None)

    def _seen(self) -> Tree:
        return tree(self._out)

    def _usable(self) -> Tree:
        """Look at the target, except files with names that say that they are streamshard's own."""
        found = self._seen()
        return {name: kept for name, kept in found.items() if not name.startswith(OWN_PREFIX)}

    def _names(self) -> set[str]:
        return {path.name for path in self._place.iterdir()}

    def _unfinished(self, command: Scenario) -> str:
        return "" if self._names() == {OUT} else f"{command.name} left {self._names()}"

    def _after_fault(self, command: Scenario, fault: Fault, ended: Ended) -> list[str]:
        problems = []
        right = {*fault.codes} if ended.fired else {0}
        if not fault.is_death and not ended.failed & _NEEDED:
            right.add(0)
        if ended.code not in right:
            told = f"exit code {ended.code}, not of {sorted(right)}"
            problems.append(f"{told}: {in_short(ended.err)}")
        is_located = any(str(root) in ended.err for root in (self._source, self._place))
        if "Traceback" in ended.err:
            problems.append(f"a traceback: {in_short(ended.err)}")
        elif ended.code > 0 and not fault.is_death and not is_located:
            problems.append(f"no path in the message: {ended.err!r}")
        left = self._names() - {OUT}
        # What could not be removed is there, such as a lock that nobody holds.
        is_excused = ended.failed & Kind.DROP and all(n.startswith(OWN_PREFIX) for n in left)
        if ended.code == 0 and left and not is_excused:
            problems.append(f"said to be done, and left {sorted(left)}")
        if ended.slept > _LONGEST_SECONDS:
            problems.append(f"would have waited {ended.slept:.0f} s")
        return problems + self._left(command, ended, has_begun=has_noted(ended.calls))

    def _after_signal(self, code: int, ended: Ended, *, has_begun: bool) -> list[str]:
        """Judge how a run ended that was sent a signal, after which this exit code is right."""
        # Before it has looked at any file it is still the interpreter that takes the signal.
        if not ended.count:
            return []
        # At its very end it may be done.
        if ended.code not in ({0, code} if ended.was_killed else {0}):
            return [f"exit code {ended.code}, not {code}: {in_short(ended.err)}"]
        told = sum("to go on" in line for line in ended.err.splitlines())
        is_kept = self._partial.is_dir()
        if ended.code > 0 and (told > is_kept or (has_begun and told != is_kept)):
            return [f"not one line that tells how to go on: {ended.err!r}"]
        return []

    def _after_two(self, scenario: Scenario, ended: Ended, *, has_begun: bool) -> list[str]:
        """Judge two runs at once: one made the target, and the other was refused."""
        second = ended.second or Second(_EXISTS, f"process {ended.process}")
        problems = []
        codes = ended.code, second.code
        right = {(-9, 0), (-9, _EXISTS)} if ended.code == -9 else _ONE_OF_TWO
        if codes not in right or (0 in codes and not self._is_whole(scenario)):
            problems.append(f"exit codes {codes}: {ended.err}{second.err}")
        if "Traceback" in ended.err + second.err:
            problems.append(f"a traceback: {ended.err}{second.err}")
        # Either there was a target when it came, or it was told who is making one; except for the
        # moment in which the first has locked it and not yet said so.
        is_told = bool({str(ended.process), "exists"} & set(re.findall(r"\w+", second.err)))
        if second.code == _EXISTS and has_begun and not is_told:
            problems.append(f"does not say who holds the target: {second.err!r}")
        return problems

    def _left(self, scenario: Scenario, ended: Ended, *, has_begun: bool) -> list[str]:
        """Judge the state of all, and whether a run that did not end kept what it had written."""
        problems = self._state(scenario)
        if ended.code == 0 and not self._is_whole(scenario):
            return [*problems, "said to be done, and the target is not there"]
        is_there = self._usable() == self.undisturbed(scenario).tree
        if has_begun and not is_there and not self._partial.is_dir():
            problems.append(f"what was written was thrown away: {ended.err.strip()!r}")
        return problems

    def _state(self, scenario: Scenario) -> list[str]:
        """Judge the source and the target; the latter is whole, or not there, or as it was."""
        problems = self._changes(scenario, "the source was changed")
        right = [self.undisturbed(scenario).tree, *([self._old] if scenario.replaces else [])]
        right += [{}] if scenario.is_empty else []
        if os.path.lexists(self._out) and self._usable() not in right:
            problems.append(f"the target is neither whole nor absent: {self._differing(scenario)}")
        return problems

    def _after_crash(self, command: Scenario) -> list[str]:
        problems = self._state(command)
        # The old target is whole somewhere until the new one is in its place.
        is_there = self._usable() == self.undisturbed(command).tree
        if command.replaces and not is_there and self._old not in (
            self._seen(), tree(self._replaced)
        ):  # fmt: skip
            problems.append("neither the old nor the new is whole")
        return problems

    def _after_rerun(self, command: Scenario, again: Ended, *, was_whole: bool) -> list[str]:
        if was_whole and again.code == _EXISTS and not command.replaces:
            return [] if self._is_whole(command) else ["run again, it changed a whole target"]
        if again.code != 0:
            return [f"run again, it ended with {again.code}: {in_short(again.err)}"]
        problems = self._changes(command, "run again, it changed the source")
        if not self._is_whole(command):
            problems.append(f"run again, it made something else: {self._differing(command)}")
        if self._names() != {OUT}:
            problems.append(f"run again, it left {sorted(self._names())}")
        return problems

    def _changes(self, scenario: Scenario, problem: str) -> list[str]:
        source = self._source / scenario.source
        now = tree(source), times(source)
        return [problem] if now != self._before[scenario.source] else []
