"""Judges what a run has left: the source, the target, what was said, and what a rerun makes."""

import os
import re
from pathlib import Path
from typing import Final

from tests.faults.scenarios import OUT, SOURCES, Scenario, Tree, times, tree
from tests.faults.server import Ended, Second
from tests.faults.shim import Kind
from tests.faults.table import Fault

EXISTS: Final = 4
"""Exit code of a run whose target is there, or is being made."""
_OWN: Final = ".streamshard."
_ONE_OF_TWO: Final = {(0, EXISTS), (EXISTS, 0)}
"""Exit codes of two runs at once."""
_LONGEST_SECONDS: Final = 60
"""What is tried again is tried for no longer."""
_FRAMES: Final = 3
_NEEDED: Final = Kind.WRITE | Kind.SYNC
"""Calls that a run cannot do without: if one failed for good, it did not do its work."""


class Judge:
    """Knows how things were; everything it returns is a list of what is wrong."""

    def __init__(self, sources: Path, target: Path, old: Tree) -> None:
        self._sources = sources
        self._target = target
        self._out = target / OUT
        self._partial = target / f"{OUT}.partial"
        self._replaced = target / f"{OUT}.replaced"
        self._old = old
        self._before = {name: (tree(sources / name), times(sources / name)) for name in SOURCES}

    def names(self) -> set[str]:
        """List what lies where the target is made."""
        return {path.name for path in self._target.iterdir()}

    def is_whole(self, whole: Tree) -> bool:
        """Tell whether the target is what an undisturbed run makes."""
        return tree(self._out) == whole

    def is_there(self, whole: Tree) -> bool:
        """Tell whether the target may be used; a file of our own may still be in it."""
        return self._found() == whole

    def _found(self) -> Tree:
        """Look at the target, but for files with names that say that they are streamshard's own."""
        return {name: kept for name, kept in tree(self._out).items() if not name.startswith(_OWN)}

    def state(self, scenario: Scenario, whole: Tree) -> list[str]:
        """Judge the source and the target; the latter is whole, or not there, or as it was."""
        problems = self._source(scenario, "the source was changed")
        right = [whole, *([self._old] if scenario.replaces else [])]
        right += [{}] if scenario.is_empty else []
        if os.path.lexists(self._out) and self._found() not in right:
            problems.append(f"the target is neither whole nor absent: {self._differing(whole)}")
        return problems

    def replaced(self, whole: Tree) -> list[str]:
        """Judge whether the old target is whole somewhere until the new one is in its place."""
        if self.is_there(whole) or tree(self._out) == self._old:
            return []
        return [] if tree(self._replaced) == self._old else ["neither the old nor the new is whole"]

    def fault(self, fault: Fault, ended: Ended) -> list[str]:
        """Judge how a run ended to which something happened, and what it said."""
        problems = []
        right = {*fault.codes} if ended.fired else {0}
        if not fault.is_death and not ended.failed & _NEEDED:
            right.add(0)
        if ended.code not in right:
            told = f"exit code {ended.code}, not of {sorted(right)}"
            problems.append(f"{told}: {in_short(ended.err)}")
        if "Traceback" in ended.err:
            problems.append(f"a traceback: {in_short(ended.err)}")
        elif ended.code > 0 and not fault.is_death and not self._is_located(ended.err):
            problems.append(f"no path in the message: {ended.err!r}")
        if ended.code == 0 and self.names() != {OUT}:
            left = self.names() - {OUT}
            # What could not be removed is there, such as a lock that nobody holds.
            if not ended.failed & Kind.DROP or not all(name.startswith(_OWN) for name in left):
                problems.append(f"said to be done, and left {sorted(left)}")
        if ended.slept > _LONGEST_SECONDS:
            problems.append(f"would have waited {ended.slept:.0f} s")
        return problems

    def signal(self, code: int, ended: Ended, *, has_begun: bool) -> list[str]:
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

    def done(self, ended: Ended, whole: Tree) -> list[str]:
        """Judge a run to which nothing has happened."""
        problems = [] if ended.code == 0 else [f"exit code {ended.code}: {in_short(ended.err)}"]
        if not self.is_whole(whole):
            problems.append(f"the target is not whole: {self._differing(whole)}")
        return problems

    def kept(self, ended: Ended, whole: Tree, *, has_begun: bool) -> list[str]:
        """Judge whether a run that did not come to its end kept what it had written."""
        if ended.code == 0 and not self.is_whole(whole):
            return ["said to be done, and the target is not there"]
        if has_begun and not self.is_there(whole) and not self._partial.is_dir():
            return [f"what was written was thrown away: {ended.err.strip()!r}"]
        return []

    def two(self, ended: Ended, second: Second, whole: Tree, *, has_begun: bool) -> list[str]:
        """Judge two runs at once: one made the target, and the other was refused."""
        problems = []
        codes = ended.code, second.code
        right = {(-9, 0), (-9, EXISTS)} if ended.code == -9 else _ONE_OF_TWO
        if codes not in right or (0 in codes and not self.is_whole(whole)):
            problems.append(f"exit codes {codes}: {ended.err}{second.err}")
        if "Traceback" in ended.err + second.err:
            problems.append(f"a traceback: {ended.err}{second.err}")
        # Either there was a target when it came, or it was told who is making one; but for the
        # moment in which the first has locked it and not yet said so.
        is_told = bool({str(ended.process), "exists"} & set(re.findall(r"\w+", second.err)))
        if second.code == EXISTS and has_begun and not is_told:
            problems.append(f"does not say who holds the target: {second.err!r}")
        return problems

    def rerun(self, again: Ended, scenario: Scenario, whole: Tree, *, was_whole: bool) -> list[str]:
        """Judge the same command, run again with nothing in its way."""
        if was_whole and again.code == EXISTS and not scenario.replaces:
            return [] if self.is_whole(whole) else ["run again, it changed a whole target"]
        if again.code != 0:
            return [f"run again, it ended with {again.code}: {in_short(again.err)}"]
        problems = self._source(scenario, "run again, it changed the source")
        if not self.is_whole(whole):
            problems.append(f"run again, it made something else: {self._differing(whole)}")
        if self.names() != {OUT}:
            problems.append(f"run again, it left {sorted(self.names())}")
        return problems

    def _source(self, scenario: Scenario, problem: str) -> list[str]:
        source = self._sources / scenario.source
        now = tree(source), times(source)
        return [problem] if now != self._before[scenario.source] else []

    def _is_located(self, text: str) -> bool:
        return any(str(root) in text for root in (self._sources, self._target))

    def _differing(self, whole: Tree) -> list[str]:
        found = tree(self._out)
        return sorted(n for n in found.keys() | whole.keys() if found.get(n) != whole.get(n))


def in_short(text: str) -> str:
    """Leave of a traceback where in the package it ended, and with what."""
    lines = text.strip().splitlines()
    if not any(line.startswith("Traceback") for line in lines):
        return repr(text.strip())
    frames = [line.strip() for line in lines if "/streamshard/" in line]
    return " | ".join((*frames[-_FRAMES:], lines[-1]))
