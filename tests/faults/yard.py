"""Tries cases on runs of `compact`, and judges what they leave.

Whatever happens, the original is whole where it was or in the trash, or its archive is: with every
file that the list of its checksums names, each as the list says.
"""

import json
from hashlib import sha256
from pathlib import Path
from typing import Final

from tests.compact.runs import TRASH
from tests.faults.crash_disk import CrashDisk
from tests.faults.crash_model import History
from tests.faults.crashing import Crashed, Crashing
from tests.faults.judge import in_short
from tests.faults.losses import Loss, lose
from tests.faults.nights import ARCHIVE, RUN, Night, prepare
from tests.faults.scenarios import Tree, tree
from tests.faults.server import Ended, Server
from tests.faults.shim import NO_OPTION, NOTHING, Arming, Kind, Option
from tests.faults.table import Fault
from tests.faults.verdict import Undisturbed, Verdict

_FAILED: Final = {3, 4, 6}
"""Exit codes of a run that was not let do its work: it cannot read, cannot write, cannot prove."""
_DONE_BEFORE: Final = 2
_OWN: Final = ".streamshard."
_LOCK: Final = ".streamshard.lock"
_OF_WEIGHTS: Final = ".weights"
_TORN: Final = "torn"


class Yard:
    """A server and a place of its own for a run directory and its archives."""

    def __init__(self, server: Server, setups: Path, place: Path) -> None:
        self._server = server
        self._setups = setups
        self._place = place
        self._wanted: dict[str, Tree] = {}
        self._undisturbed: dict[str, Undisturbed] = {}
        self._keep = place.with_name(f"{place.name}.keep")

    def undisturbed(self, night: Night) -> Undisturbed:
        """Run a night to its end, once."""
        if night.name not in self._undisturbed:
            for with_calls in (False, True):
                prepare(self._setups / night.setup, self._place)
                if not with_calls:
                    self._server.warm_up(*night.arguments(self._place))
                    continue
                ended = self._run(night, with_calls=True)
            whole = self._seen()
            found = Undisturbed(ended.calls, whole, ended.seconds, ended.written)
            if ended.code != 0 or self._state(night) != night.ends_as or self._leftovers():
                raise RuntimeError(f"{night.name}: {ended.code}, {ended.err}, {self._leftovers()}")
            self._undisturbed[night.name] = found
        return self._undisturbed[night.name]

    def try_fault(self, night: Night, fault: Fault, at: int) -> Verdict:
        """Have a fault happen, and look at what is left and at what the next night makes of it."""
        whole = self.undisturbed(night).tree
        prepare(self._setups / night.setup, self._place)
        before = [self._place, *self._place.rglob("*")] if fault.loss else []
        ended = self._run(night, fault.at(at), Option.HURRY, with_calls=fault.loss is not None)
        told = f"{night.name}: {fault.name} at {ended.fired or 'no call'}"
        if fault.loss is not None:
            lost = lose(fault.loss, ended.calls, self._place, before)
            told = f"{told}; lost {[Path(path).name for path in lost]}"
        is_done = not self._differing(whole)
        problems = [*self._unsafe(night), *self._ended(fault, ended, is_done=is_done)]
        again = self._run(night, option=Option.HURRY)
        problems += self._again(night, again, whole)
        return Verdict(
            told=f"{told}, exit code {ended.code}",
            code=ended.code,
            has_fired=ended.fired is not None,
            was_whole=is_done,
            written_again=again.written,
            problems=tuple(problems),
        )

    def try_loss(self, night: Night, loss: Loss) -> list[str]:
        """Cut the power after a run has said that it is done; returns what is not as it was."""
        whole = self.undisturbed(night).tree
        prepare(self._setups / night.setup, self._place)
        before = [self._place, *self._place.rglob("*")]
        ended = self._run(night, with_calls=True)
        lost = lose(loss, ended.calls, self._place, before)
        wrong = [f"lost {path}" for path in lost if _LOCK not in path]
        return [*wrong, *self._differing(whole), *self._unsafe(night)]

    def crash(self, night: Night, after: Crashed | None = None) -> Crashing:
        """Record all that a night changes; see `Bench.crash`."""
        whole = self.undisturbed(night).tree
        if after is None:
            prepare(self._setups / night.setup, self._place)
        else:
            after.make()
        disk = CrashDisk(self._place, self._keep, stays=RUN)
        ended = self._run(night, option=Option.HURRY, with_content=True)
        history = History(self._place, disk.start, disk.inodes, ended.calls)
        is_done = ended.code == 0
        return Crashing(
            disk,
            history,
            lambda state: self._try_state(night, whole, is_done=is_done and state.is_at_end),
        )

    def _try_state(self, night: Night, whole: Tree, *, is_done: bool) -> list[str]:
        """Judge what a power failure has left, and what the next night makes of it."""
        problems = [*self._unsafe(night), *self._promised()]
        if is_done and (differing := self._differing(whole)):
            problems.append(f"said to be done, and is not: {differing}")
        again = self._run(night, option=Option.HURRY)
        return problems + self._again(night, again, whole) + self._promised()

    def _promised(self) -> list[str]:
        """Say which receipts are torn, or tell of an archive that is not whole."""
        problems = []
        for receipt in (self._place / ARCHIVE).glob("[!.]*.receipt.json"):
            tag = receipt.name.removesuffix(".receipt.json")
            state = self._state_of(tag)
            if state == _TORN or (state != "begun" and self._archive_of(tag) is None):
                problems.append(
                    f"the receipt of {tag} says '{state}', and its archive is not whole"
                )
            full = receipt.with_name(f"{tag}.zarr")
            if state == "weights only" and full.exists() and not is_as_listed(full):
                problems.append(f"a part of the full archive of {tag} has its name")
        return problems

    def _run(
        self,
        night: Night,
        arming: Arming = NOTHING,
        option: Option = NO_OPTION,
        *,
        with_calls: bool = False,
        with_content: bool = False,
    ) -> Ended:
        return self._server.run(
            night.arguments(self._place),
            source=self._setups,
            target=self._place,
            arming=arming,
            options=option,
            with_calls=with_calls or with_content,
            with_content=with_content,
        )

    def _ended(self, fault: Fault, ended: Ended, *, is_done: bool) -> list[str]:
        """Judge how a run ended, and what it said."""
        right = {0} if fault.must_be_got_over or not ended.fired else {0, *_FAILED}
        if fault.is_death and ended.fired:
            right = {*fault.codes}
        problems = []
        if ended.code not in right:
            problems.append(f"exit code {ended.code}: {in_short(ended.err)}")
        if "Traceback" in ended.err:
            problems.append(f"a traceback: {in_short(ended.err)}")
        elif ended.code > 0 and not fault.is_death and str(self._place) not in ended.err:
            problems.append(f"no path in the message: {ended.err!r}")
        if ended.code == 0 and not is_done:
            problems.append("said to be done, and is not")
        if ended.code == 0 and self._leftovers() and not ended.failed & Kind.DROP:
            problems.append(f"said to be done, and left {self._leftovers()}")
        return problems

    def _again(self, night: Night, again: Ended, whole: Tree) -> list[str]:
        """Judge the next night, with nothing in its way."""
        problems = []
        if again.code != 0 and not (night.by_hand and again.code == _DONE_BEFORE):
            problems.append(f"run again, it ended with {again.code}: {in_short(again.err)}")
        if differing := self._differing(whole):
            problems.append(f"run again, it made something else: {differing}")
        if self._state(night) != night.ends_as:
            problems.append(f"run again, the receipt says '{self._state(night)}'")
        if left := self._leftovers():
            problems.append(f"run again, it left {left}")
        return problems + self._unsafe(night)

    def _unsafe(self, night: Night) -> list[str]:
        """Say what is not whole anywhere."""
        setup, run = self._setups / night.setup, self._place / RUN
        problems = []
        for original in _tags(setup):
            wanted = tree(original)
            places = [run / original.name, run / TRASH / original.name]
            if any(place.is_dir() and tree(place) == wanted for place in places):
                continue
            if original.name != night.tag or not night.original_goes:
                problems.append(f"{original.name} is not whole")
            elif self._archive_of(original.name) is None:
                problems.append(f"neither {original.name} nor its archive is whole")
        for receipt in (setup / ARCHIVE).glob("*.receipt.json"):
            tag = receipt.name.removesuffix(".receipt.json")
            if self._archive_of(tag) is None:
                problems.append(f"the archive of {tag}, which was whole, is not any more")
        if (run / "latest").read_bytes() != (setup / RUN / "latest").read_bytes():
            problems.append("'latest' is another")
        return problems

    def _archive_of(self, tag: str) -> Path | None:
        """Return the whole archive of a tag: the one that its receipt names."""
        name = f"{tag}{_OF_WEIGHTS if self._state_of(tag) == 'weights only' else ''}.zarr"
        store = self._place / ARCHIVE / name
        return store if is_as_listed(store) else None

    def _state(self, night: Night) -> str | None:
        return self._state_of(night.tag)

    def _state_of(self, tag: str) -> str | None:
        path = self._place / ARCHIVE / f"{tag}.receipt.json"
        try:
            state: str | None = json.loads(path.read_text())["state"] if path.exists() else None
        except ValueError:
            return _TORN
        return state

    def _seen(self) -> Tree:
        """Look at all but what tells when it was made, and what is left behind."""
        found = tree(self._place)
        return {
            path: kept
            for path, kept in found.items()
            if not path.endswith((".receipt.json", ".last_run.json", f"{_OF_WEIGHTS}.zarr.sha256"))
            and not _is_dated(path)
            and _LOCK not in path
        }

    def _differing(self, whole: Tree) -> list[str]:
        now = self._seen()
        return sorted(
            path for path in now.keys() | whole.keys() if now.get(path) != whole.get(path)
        )

    def _leftovers(self) -> list[str]:
        """List what is neither saved, nor archived, nor in the trash; but for locks of the dead."""
        known = (TRASH, ".streamshard.going", ".streamshard.last_run.json")
        return sorted(
            str(path.relative_to(self._place))
            for path in self._place.rglob("*")
            if (_OWN in path.name or ".partial" in path.name)
            and path.name not in known
            # Where nothing was left to write, nobody was there to remove it.
            and not (path.name.startswith(f"{_LOCK}.") and path.name.endswith(".zarr"))
        )


def is_as_listed(store: Path) -> bool:
    """Tell whether an archive has the files of its list of checksums, each as the list says."""
    sums = store.with_name(f"{store.name}.sha256")
    if not sums.exists() or not store.is_dir():
        return False
    listed = dict(line.split("  ")[::-1] for line in sums.read_text().splitlines())
    files = [path for path in store.rglob("*") if path.is_file() and _OWN not in path.name]
    found = {
        str(path.relative_to(store.parent)): sha256(path.read_bytes()).hexdigest() for path in files
    }
    return bool(listed) and found == listed


def _tags(setup: Path) -> list[Path]:
    """List the tags that are whole when a night begins."""
    run = setup / RUN
    return [path for path in (*run.iterdir(), *_below(run / TRASH)) if path.name.startswith("glo")]


def _below(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []


def _is_dated(path: str) -> bool:
    """Tell whether a file says when an archive of weights was made."""
    _, found, inside = path.partition(f"{_OF_WEIGHTS}.zarr/")
    return bool(found) and (inside.startswith("meta/") or inside == "zarr.json")
