"""Any order of saves, runs and mishaps, and what must hold after each: no save is ever lost.

A job saves, and two machines run `compact` every night: each with a clock of its own, which may be
wrong by days. The runs are real ones, in processes of their own, and things happen in the midst of
them: the disk is full from some call on, the process is killed, the other machine's run begins, the
job finishes a save, someone unmounts the archives or moves the run directory. Now and then
someone brings a tag back, or removes one for good, and now and then a bit of an archive flips.

Every save that was completed, which is one that `latest` has named, is whole next to the others or
in the trash, to the byte; or it was in the trash for its whole grace time, by the clock of the
machine that removed it, and its archive was whole then and is, unless a bit of it flipped since.
Beyond that no run ends with a traceback, and the newest saves are never moved.
"""

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final, Self

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import streamshard
from tests.compact.runs import TRASH, damage, save
from tests.faults.compact_ground import is_as_listed
from tests.faults.compact_scenarios import JOB
from tests.faults.scenarios import Tree, tree
from tests.faults.server import NOTHING_MEANWHILE, Ended, Meanwhile, Server
from tests.faults.shim import NO_KIND, NOTHING, Action, Arming, Kind, Option, Side
from tests.faults.table import FAULTS

GRACE: Final = timedelta(days=2)
KEPT: Final = 2
"""Newest saves that every night keeps."""
MOST_STEPS: Final = 12
"""Saves of one history."""
_MOST_MOVES: Final = 1
"""Of the run directory: after one, earlier archives are of another place, and little is done."""
_HOUR: Final = 3600.0
_QUICK: Final = timedelta(hours=1)
"""What a history takes in truth, at most."""
_USUAL_CALLS: Final = 1000
"""Calls of a run of which nothing is known."""
_REMOVED: Final = {"purged", "dropping", "weights only"}
"""What receipts say of a tag that is gone for good."""
_FULL: Final = next(fault for fault in FAULTS if fault.name == "target enospc from there on")
_MOVES: Final = Kind.MAKE | Kind.DROP | Kind.SYNC | Kind.WRITE


@dataclass(frozen=True, slots=True)
class Saved:
    """What a job saves in a step, made before."""

    place: Path
    """A run directory with that tag alone."""
    tag: str
    content: Tree

    @classmethod
    def make(cls, root: Path, step: int) -> Self:
        """Make what a step saves."""
        root.mkdir()
        place = save(root, step, JOB)
        return cls(root, place.name, tree(place))


@dataclass(frozen=True, slots=True)
class Cron:
    """A machine that runs `compact` every night."""

    ahead_hours: float
    options: tuple[str, ...]


class Histories(RuleBasedStateMachine):
    """One run directory, one directory of archives, and what happens to them."""

    def __init__(self, server: Server, saves: Sequence[Saved], place: Path) -> None:
        super().__init__()
        self._server = server
        self._saves = saves
        self._root = Path(mkdtemp(dir=place))
        self._archive = self._root / "archive"
        self._away = self._root / "away"
        """What is at the place of the archives while they are mounted, or they while not."""
        self._archive.mkdir()
        self._away.mkdir()
        self._moves = 0
        self._hours = 0.0
        """How much later it is than in truth."""
        self._step = 0
        self._is_saving = False
        self._calls = _USUAL_CALLS
        self._completed: dict[str, Saved] = {}
        self._removed: set[str] = set()
        self._lost: set[str] = set()
        """Of the removed ones those whose archive was damaged after that."""
        self._trashed: dict[str, float] = {}
        """Tag → the hour in which it was first seen in the trash, since it was last elsewhere."""
        self._run.mkdir()

    def teardown(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self._root)

    @property
    def _run(self) -> Path:
        return self._root / f"run{self._moves}"

    @initialize(
        skew=st.sampled_from([0.0, 1.0, -1.0, 30.0, -30.0, 100.0, -100.0]), late=st.booleans()
    )
    def begin(self, skew: float, late: bool) -> None:
        """Set the clocks, and save the first steps."""
        grace = f"{GRACE // timedelta(hours=1)}h"
        usual = ("--keep-last", str(KEPT), "--workers", "1", "--grace", grace)
        first = ("--delete", *(("--weights-only-older-than", "1h") if late else ()))
        self._crons = [Cron(0.0, (*usual, *first)), Cron(skew, (*usual, "--delete"))]
        for _ in range(4):
            self._save()
        self._hours += 3

    # A job ---------------------------------------------------------------------------------------

    @precondition(lambda self: self._step < MOST_STEPS and not self._is_saving)
    @rule()
    def save(self) -> None:
        """Save a step."""
        self._save()

    def _save(self) -> None:
        self._begin_save()
        for source, target in self._rest_of_save():
            source.rename(target)
        self._complete_save()

    @precondition(lambda self: self._step < MOST_STEPS and not self._is_saving)
    @rule()
    def begin_save(self) -> None:
        """Begin to save a step: not all of its files are there."""
        self._begin_save()

    @precondition(lambda self: self._is_saving)
    @rule()
    def finish_save(self) -> None:
        """Write the rest, and `latest`."""
        for source, target in self._rest_of_save():
            source.rename(target)
        self._complete_save()

    def _begin_save(self) -> None:
        self._is_saving = True
        new = self._saves[self._step]
        self._step += 1
        staged = self._root / "staged"
        shutil.rmtree(staged, ignore_errors=True)
        shutil.copytree(new.place, staged)
        now = time.time() + self._hours * _HOUR
        for path in [staged, *staged.rglob("*")]:
            os.utime(path, (now, now))
        target = self._run / new.tag
        target.mkdir()
        first, *_ = sorted((staged / new.tag).iterdir())
        first.rename(target / first.name)
        os.utime(target, (now, now))

    def _rest_of_save(self) -> list[tuple[Path, Path]]:
        """List what is renamed to finish a save, in order."""
        staged, tag = self._root / "staged", self._saves[self._step - 1].tag
        files = [(path, self._run / tag / path.name) for path in (staged / tag).iterdir()]
        return [*files, *((staged / n, self._run / n) for n in ("zero_to_fp32.py", "latest"))]

    def _complete_save(self) -> None:
        new = self._saves[self._step - 1]
        self._is_saving = False
        self._completed[new.tag] = new
        now = time.time() + self._hours * _HOUR
        os.utime(self._run / new.tag, (now, now))

    # Time, and people ----------------------------------------------------------------------------

    @rule(hours=st.sampled_from([1, 5, 24, 60]))
    def wait(self, hours: int) -> None:
        """Let some time pass."""
        self._hours += hours

    @rule()
    def mount(self) -> None:
        """Unmount the archives, or mount them; what was written meanwhile is below them."""
        for one, other in self._mounting():
            one.rename(other)

    def _mounting(self) -> list[tuple[Path, Path]]:
        other = self._root / "other"
        return [(self._archive, other), (self._away, self._archive), (other, self._away)]

    @precondition(lambda self: self._moves < _MOST_MOVES)
    @rule(is_copy=st.booleans())
    def move_run(self, is_copy: bool) -> None:
        """Move the run directory: rename it, or copy it to another disk."""
        new = self._root / f"run{self._moves + 1}"
        if is_copy:
            shutil.copytree(self._run, new)
            shutil.rmtree(self._run)
        else:
            self._run.rename(new)
        self._moves += 1

    @precondition(lambda self: self._trash())
    @rule(which=st.integers(0, 9), cron=st.integers(0, 1))
    def undelete(self, which: int, cron: int) -> None:
        """Bring a tag back by hand."""
        tags = sorted(self._trash())
        self._compact(self._crons[cron], ("--undelete", tags[which % len(tags)]))

    @precondition(lambda self: self._trash())
    @rule(which=st.integers(0, 9), cron=st.integers(0, 1))
    def purge(self, which: int, cron: int) -> None:
        """Remove a tag for good by hand, if its grace time is over."""
        tags, grace = sorted(self._trash()), f"{GRACE // timedelta(hours=1)}h"
        options = ("--purge", tags[which % len(tags)], "--grace", grace)
        self._compact(self._crons[cron], options)

    @precondition(lambda self: self._archive_files())
    @rule(which=st.integers(0, 999))
    def flip_a_bit(self, which: int) -> None:
        """Flip a bit of an archive, and of those that share the file."""
        files = self._archive_files()
        damage(files[which % len(files)])
        self._lost = {tag for tag in self._removed if not self._archives_of(tag)}

    def _archive_files(self) -> list[Path]:
        return sorted(path for path in self._archive.glob("[!.]*.zarr/**/*") if path.is_file())

    # Runs of `compact` --------------------------------------------------------------------------

    @rule(cron=st.integers(0, 1), days=st.integers(1, 3))
    def compact(self, cron: int, days: int) -> None:
        """Run `compact` some days later."""
        self._hours += days * 24
        self._compact(self._crons[cron])

    @rule(days=st.integers(1, 3))
    def compact_for_days(self, days: int) -> None:
        """Run on both machines, for some days."""
        for _ in range(days):
            for cron in self._crons:
                self._hours += 12
                self._compact(cron)

    @rule(cron=st.integers(0, 1), share=st.floats(0, 1), is_full=st.booleans())
    def compact_and_fail(self, cron: int, share: float, is_full: bool) -> None:
        """Run until the disk is full, or the process is killed."""
        at = int(share * self._calls)
        killed = Arming(at, Action.KILL_BEFORE, 0, _MOVES, Side.TARGET, NO_KIND)
        self._compact(self._crons[cron], arming=_FULL.at(at) if is_full else killed)

    @rule(cron=st.integers(0, 1), share=st.floats(0, 1))
    def compact_twice_at_once(self, cron: int, share: float) -> None:
        """Run on the other machine in the midst of a run."""
        other = self._crons[1 - cron]
        meanwhile = Meanwhile(
            second=self._arguments(other.options), second_ahead_seconds=self._ahead(other)
        )
        self._compact(self._crons[cron], arming=_stop(share, self._calls), meanwhile=meanwhile)

    @precondition(lambda self: self._is_saving)
    @rule(cron=st.integers(0, 1), share=st.floats(0, 1))
    def save_meanwhile(self, cron: int, share: float) -> None:
        """Finish a save in the midst of a run."""
        renames = self._rest_of_save()
        ended = self._disturbed(cron, share, renames)
        if ended.fired is None:
            for one, other in renames:
                one.rename(other)
        self._complete_save()

    @rule(cron=st.integers(0, 1), share=st.floats(0, 1))
    def mount_meanwhile(self, cron: int, share: float) -> None:
        """Mount or unmount the archives in the midst of a run."""
        self._disturbed(cron, share, self._mounting())

    @precondition(lambda self: self._moves < _MOST_MOVES)
    @rule(cron=st.integers(0, 1), share=st.floats(0, 1))
    def move_run_meanwhile(self, cron: int, share: float) -> None:
        """Move the run directory in the midst of a run."""
        renames = [(self._run, self._root / f"run{self._moves + 1}")]
        if self._disturbed(cron, share, renames).fired is not None:
            self._moves += 1

    def _disturbed(self, cron: int, share: float, renames: Sequence[tuple[Path, Path]]) -> Ended:
        meanwhile = Meanwhile(renames=renames)
        arming = _stop(share, self._calls)
        return self._compact(self._crons[cron], arming=arming, meanwhile=meanwhile, looks=False)

    def _compact(
        self,
        cron: Cron,
        options: Sequence[str] | None = None,
        *,
        arming: Arming = NOTHING,
        meanwhile: Meanwhile = NOTHING_MEANWHILE,
        looks: bool = True,
    ) -> Ended:
        ended = self._server.run(
            self._arguments(cron.options if options is None else options),
            source=self._saves[0].place,
            target=self._root,
            arming=arming,
            options=Option.HURRY,
            meanwhile=meanwhile,
            ahead_seconds=self._ahead(cron),
        )
        said = ended.err + (ended.second.err if ended.second else "")
        assert "Traceback" not in said, said
        self._calls = max(ended.count, 1)
        if looks:
            self._look_for_removed()
        return ended

    def _arguments(self, options: Sequence[str]) -> list[object]:
        return ["compact", self._run, self._archive, *options]

    def _ahead(self, cron: Cron) -> float:
        return (self._hours + cron.ahead_hours) * _HOUR

    # What must hold ------------------------------------------------------------------------------

    def _trash(self) -> set[str]:
        return {path.name for path in (self._run / TRASH).glob("global_step*")}

    def _look_for_removed(self) -> None:
        """Prove for each save that was removed for good that it might be."""
        for tag in self._completed.keys() - self._removed:
            if self._is_whole(tag):
                continue
            receipt, store = self._archived(tag)
            trashed, purged = (datetime.fromisoformat(receipt[k]) for k in ("trashed", "purged"))
            assert purged - trashed > GRACE, f"{tag} was removed after {purged - trashed}"
            in_trash = timedelta(hours=self._hours - self._trashed.get(tag, self._hours))
            apart = timedelta(hours=abs(self._crons[1].ahead_hours - self._crons[0].ahead_hours))
            assert in_trash + apart + _QUICK > GRACE, f"{tag} was removed after {in_trash}"
            if not store.name.endswith(".weights.zarr"):
                saved = self._completed[tag].place
                assert streamshard.verify(store, against=saved).is_good
            self._removed.add(tag)
        trash = self._trash()
        self._trashed = {tag: self._trashed.get(tag, self._hours) for tag in trash}

    def _is_whole(self, tag: str) -> bool:
        content = self._completed[tag].content
        places = (self._run / tag, self._run / TRASH / tag)
        return any(place.is_dir() and tree(place) == content for place in places)

    def _archived(self, tag: str) -> tuple[Mapping[str, Any], Path]:
        """Return what tells of a removal, and the archive: each may be on the disk below."""
        disks = (self._archive, self._away)
        paths = [disk / f"{tag}.receipt.json" for disk in disks]
        told = [json.loads(path.read_text()) for path in paths if path.exists()]
        removals = [receipt for receipt in told if receipt["state"] in _REMOVED]
        stores = self._archives_of(tag)
        assert removals, f"{tag} is gone, and no receipt says that it was removed"
        assert stores, f"{tag}: neither it nor its archive is whole"
        if stores[0].name.endswith(".weights.zarr"):
            assert any(receipt["state"] == "weights only" for receipt in removals), tag
        return removals[0], stores[0]

    def _archives_of(self, tag: str) -> list[Path]:
        """List the whole archives of a tag, full ones first."""
        names, disks = (f"{tag}.zarr", f"{tag}.weights.zarr"), (self._archive, self._away)
        return [disk / name for name in names for disk in disks if is_as_listed(disk / name)]

    @invariant()
    def nothing_is_lost(self) -> None:
        """Look at every save that was ever completed."""
        self._look_for_removed()
        for tag in self._completed:
            if tag not in self._removed:
                assert self._is_whole(tag), f"{tag} is not whole"
            elif tag not in self._lost:
                self._archived(tag)

    @invariant()
    def a_job_may_resume(self) -> None:
        """Look at the newest saves, the last of which `latest` names."""
        newest = list(self._completed)[-KEPT:]
        assert (self._run / "latest").read_text() == newest[-1]
        for tag in newest:
            assert tree(self._run / tag) == self._completed[tag].content


def _stop(share: float, calls: int) -> Arming:
    return Arming(int(share * calls), Action.STOP, 0, _MOVES, Side.TARGET, NO_KIND)
