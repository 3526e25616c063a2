"""Tries cases: runs a scenario, lets something happen to it, has the rest judged, runs again."""

import shutil
from pathlib import Path

from tests.faults.crash_disk import CrashDisk
from tests.faults.crash_model import History
from tests.faults.crashing import Crashed, Crashing
from tests.faults.judge import EXISTS, Judge
from tests.faults.losses import Loss, lose
from tests.faults.nights import Night
from tests.faults.scenarios import OUT, Scenario, empty, make_old_target, tree
from tests.faults.server import Ended, Kill, Second, Server
from tests.faults.shim import NO_KIND, NO_OPTION, NOTHING, Action, Arming, Option, Side
from tests.faults.table import Fault
from tests.faults.verdict import Undisturbed, Verdict, has_noted
from tests.faults.yard import Yard


class Bench:
    """A server and a directory of its own for targets; what is read is shared."""

    def __init__(self, server: Server, sources: Path, setups: Path, place: Path) -> None:
        self._server = server
        self._yard = Yard(server, setups, place / "yard")
        self._sources = sources
        self._target = place / "target"
        self._target.mkdir(parents=True)
        self._old = place / "old"
        make_old_target(sources, self._old)
        self._judge = Judge(sources, self._target, tree(self._old))
        self._undisturbed: dict[str, Undisturbed] = {}
        self._keep = place / "keep"

    def undisturbed(self, scenario: Scenario | Night) -> Undisturbed:
        """Run a scenario to its end, once."""
        if isinstance(scenario, Night):
            return self._yard.undisturbed(scenario)
        if scenario.name not in self._undisturbed:
            self._prepare(scenario)
            self._server.warm_up(*scenario.arguments(self._sources, self._target))
            self._prepare(scenario)
            ended = self._run(scenario, with_calls=True)
            if ended.code != 0 or self._judge.names() != {OUT}:
                raise RuntimeError(f"{scenario.name}: {ended.code}, {ended.err}")
            whole = tree(self._target / OUT)
            found = Undisturbed(ended.calls, whole, ended.seconds, ended.written)
            self._undisturbed[scenario.name] = found
        return self._undisturbed[scenario.name]

    def try_fault(self, scenario: Scenario | Night, fault: Fault, at: int) -> Verdict:
        """Have a fault happen, and look at what is left and at what running again makes of it.

        Parameters
        ----------
        at
            Number of the call; or of one before it, if that one is not of the fault's kinds.
        """
        if isinstance(scenario, Night):
            return self._yard.try_fault(scenario, fault, at)
        undisturbed = self.undisturbed(scenario)
        self._prepare(scenario)
        before = [self._target, *self._target.rglob("*")] if fault.loss else []
        ended = self._run(scenario, fault.at(at), Option.HURRY, with_calls=fault.loss is not None)
        told = f"{scenario.name}: {fault.name} at {ended.fired or 'no call'}"
        if fault.loss is not None:
            lost = lose(fault.loss, ended.calls, self._target, before)
            told = f"{told}; lost {[Path(path).name for path in lost]}"
        has_begun = ended.fired is not None and ended.fired.number >= undisturbed.has_begun
        return self._verdict(
            told,
            scenario,
            ended,
            self._judge.fault(fault, ended),
            has_fired=ended.fired is not None,
            has_begun=has_begun and fault.loss is None,
        )

    def try_kill(self, scenario: Scenario, kill: Kill, code: int) -> Verdict:
        """Send a signal to a run at an instant; look at what is left, and run again.

        Parameters
        ----------
        code
            Exit code that is right where the run had not come to its end before.
        """
        self._prepare(scenario)
        ended = self._run(scenario, kill=kill, with_calls=True)
        has_begun = has_noted(ended.calls)
        told = f"{scenario.name}: signal {kill.number} after {kill.after_seconds * 1e3:.1f} ms"
        return self._verdict(
            f"{told}, in which it made {ended.count} calls",
            scenario,
            ended,
            self._judge.signal(code, ended, has_begun=has_begun),
            has_fired=ended.was_killed,
            has_begun=has_begun,
        )

    def try_second(self, scenario: Scenario, at: int, *, is_killed: bool) -> Verdict:
        """Run a command while a run of it is stopped at a call, which then goes on or is killed."""
        undisturbed = self.undisturbed(scenario)
        self._prepare(scenario)
        stop = Arming(at, Action.STOP, 0, ~NO_KIND, Side.SOURCE | Side.TARGET, NO_KIND)
        ended = self._run(scenario, stop, second_when_stopped=True, killed_when_stopped=is_killed)
        second = ended.second or Second(EXISTS, f"process {ended.process}")
        has_begun = at >= undisturbed.has_begun
        return self._verdict(
            f"{scenario.name}: second run while the first was at {ended.fired or 'no call'}",
            scenario,
            ended,
            self._judge.two(ended, second, undisturbed.tree, has_begun=has_begun),
            has_fired=ended.second is not None,
            has_begun=has_begun,
        )

    def try_loss(self, scenario: Scenario | Night, loss: Loss) -> list[str]:
        """Cut the power after a run has said that it is done; returns what is not as it was."""
        if isinstance(scenario, Night):
            return self._yard.try_loss(scenario, loss)
        whole = self.undisturbed(scenario).tree
        self._prepare(scenario)
        before = [self._target, *self._target.rglob("*")]
        ended = self._run(scenario, with_calls=True)
        lost = lose(loss, ended.calls, self._target, before)
        return self._judge.done(ended, whole) + [f"lost {path}" for path in lost]

    def crash(self, scenario: Scenario | Night, after: Crashed | None = None) -> Crashing:
        """Record all that a run changes; nothing else may be tried before all its states are.

        Parameters
        ----------
        after
            Where the run begins; by default where a first run does.
        """
        if isinstance(scenario, Night):
            return self._yard.crash(scenario, after)
        undisturbed = self.undisturbed(scenario)
        if after is None:
            self._prepare(scenario)
        else:
            after.make()
        disk = CrashDisk(self._target, self._keep)
        ended = self._run(scenario, option=Option.HURRY, with_content=True)
        history = History(self._target, disk.start, disk.inodes, ended.calls)
        is_done = ended.code == 0
        return Crashing(
            disk,
            history,
            lambda state: self._try_state(
                scenario, undisturbed, is_done=is_done and state.is_at_end
            ),
        )

    def _try_state(
        self, scenario: Scenario, undisturbed: Undisturbed, *, is_done: bool
    ) -> list[str]:
        """Judge what a power failure has left, and what running again makes of it."""
        whole, judge = undisturbed.tree, self._judge
        was_whole = judge.is_whole(whole)
        problems = judge.state(scenario, whole)
        if scenario.replaces:
            problems += judge.replaced(whole)
        if is_done and not was_whole:
            problems.append("said to be done, and the target is not whole")
        again = self._run(scenario, option=Option.HURRY)
        return problems + judge.rerun(again, scenario, whole, was_whole=was_whole)

    def _prepare(self, scenario: Scenario) -> None:
        """Make the place for a target as it is before the first run."""
        empty(self._target)
        if scenario.replaces:
            shutil.copytree(self._old, self._target / OUT)
        if scenario.is_empty:
            (self._target / OUT).mkdir()

    def _run(
        self,
        scenario: Scenario,
        arming: Arming = NOTHING,
        option: Option = NO_OPTION,
        *,
        kill: Kill | None = None,
        second_when_stopped: bool = False,
        killed_when_stopped: bool = False,
        with_calls: bool = False,
        with_content: bool = False,
    ) -> Ended:
        return self._server.run(
            scenario.arguments(self._sources, self._target),
            source=self._sources,
            target=self._target,
            arming=arming,
            options=scenario.system | option,
            kill=kill,
            second_when_stopped=second_when_stopped,
            killed_when_stopped=killed_when_stopped,
            with_calls=with_calls or with_content,
            with_content=with_content,
        )

    def _verdict(
        self,
        told: str,
        scenario: Scenario,
        ended: Ended,
        problems: list[str],
        *,
        has_fired: bool,
        has_begun: bool,
    ) -> Verdict:
        """Judge what is left, and run again."""
        whole = self.undisturbed(scenario).tree
        was_whole = self._judge.is_whole(whole)
        state = self._judge.state(scenario, whole)
        kept = self._judge.kept(ended, whole, has_begun=has_begun)
        again = self._run(scenario, option=Option.HURRY)
        rerun = self._judge.rerun(again, scenario, whole, was_whole=was_whole)
        return Verdict(
            told=f"{told}, exit code {ended.code}",
            code=ended.code,
            has_fired=has_fired,
            was_whole=was_whole,
            written_again=again.written,
            problems=(*state, *problems, *kept, *rerun),
        )
