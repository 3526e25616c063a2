"""Any order of saves, archives, deletions and mishaps, against a few lines that say what must be.

Every step that a job saved is at any moment whole beside the others, whole in the trash, or in an
archive that gives it back; unless somebody damaged that archive after the trash was emptied, or
wanted nothing but the weights of what is long gone.
"""

import os
import shutil
import tempfile
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import streamshard as api
from streamshard.engine.journals.journal import Journal, Written
from streamshard.io import changes
from streamshard.operations.compact import weights_only
from streamshard.operations.compact.receipts import WEIGHTS_ONLY, ArchivedTag
from tests.compact.runs import bits, receipt_of, save, tag_of
from tests.job import Job

KEPT = 2
JOB = Job(groups=((("embed.weight", (11, 4)),),), frozen=(("old", (3,)),), tied={})


class CutOffError(BaseException):
    """Raised where a run is cut off; no error that anybody expects."""


class Nights(RuleBasedStateMachine):
    """Nights of one run directory."""

    def __init__(self) -> None:
        super().__init__()
        shared = Path("/dev/shm")  # thousands of syncs take their time on a disk
        place = shared if os.access(shared, os.W_OK) else None
        self.root = Path(tempfile.mkdtemp(dir=place))
        self.run, self.archive = self.root / "run", self.root / "archive"
        self.now = datetime.now(UTC)
        self.step = 0
        self.saved: dict[str, dict[str, bytes]] = {}
        self.damaged: set[str] = set()
        self.purged: set[str] = set()

    def teardown(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self.root)

    @initialize()
    def begin(self) -> None:
        """Save the first steps."""
        for _ in range(3):
            self.save()

    @rule()
    def save(self) -> None:
        """Save the next step."""
        self.step += 1
        place = save(self.run, self.step, JOB)
        self.saved[place.name] = bits(place)

    @rule(days=st.integers(1, 9))
    def wait(self, days: int) -> None:
        """Let some days pass."""
        self.now += timedelta(days=days)

    @rule(
        delete=st.booleans(),
        most=st.none() | st.integers(0, 2),
        days=st.none() | st.integers(0, 5),
    )
    def night(self, delete: bool, most: int | None, days: int | None) -> None:
        """Run as every night."""
        before = self._trash()
        found = api.compact(
            self.run,
            self.archive,
            keep_last=KEPT,
            delete=delete,
            max_delete=most,
            weights_only_older_than=None if days is None else timedelta(days=days),
            now=self.now,
        )
        self._take_note(before)
        told = {tag.tag: tag for tag in found.tags}
        assert bool(found.problems) <= bool(self.damaged)
        for tag in self._live()[-KEPT:]:
            assert told[tag].action == "kept"
        removed = [t for t in found.tags if t.action in ("deleted", "weights only")]
        assert most is None or len(removed) <= most
        if days is None:
            assert "weights only" not in {tag.action for tag in found.tags}

    @rule(delete=st.booleans(), spans=st.integers(0, 9))
    def night_that_is_cut_off(self, delete: bool, spans: int) -> None:
        """Run, and be cut off after some spans of the archives, or some of their files."""
        left, note, take = spans, Journal.note, changes.link_or_copy

        def count() -> None:
            nonlocal left
            if left == 0:
                raise CutOffError
            left -= 1

        def note_or_not(self: Journal, path: str, offset: int, written: Written) -> None:
            count()
            note(self, path, offset, written)

        def take_or_not(known: Path, path: Path) -> None:
            count()
            take(known, path)

        before = self._trash()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Journal, "note", note_or_not)
            patch.setattr(weights_only, "link_or_copy", take_or_not)
            with suppress(CutOffError):
                api.compact(
                    self.run,
                    self.archive,
                    keep_last=KEPT,
                    delete=delete,
                    weights_only_older_than=timedelta(days=3),
                    now=self.now,
                    workers=1,
                )
        self._take_note(before)

    @precondition(lambda self: self._trash())
    @rule(data=st.data())
    def bring_back(self, data: st.DataObject) -> None:
        """Bring a tag back."""
        tag = data.draw(st.sampled_from(sorted(self._trash())))
        found = api.compact(self.run, self.archive, undelete=[tag])
        assert found.exit_code == 0
        assert tag in self._live()

    @precondition(lambda self: self._trash())
    @rule(data=st.data(), days=st.integers(0, 5))
    def purge(self, data: st.DataObject, days: int) -> None:
        """Empty the trash of a tag; not before its time, and not if its archive is damaged."""
        tag = data.draw(st.sampled_from(sorted(self._trash())))
        grace, trashed = timedelta(days=days), receipt_of(self.archive, tag)["trashed"]
        is_over = self.now - datetime.fromisoformat(trashed) > grace
        found = api.compact(self.run, self.archive, grace=grace, purge=[tag], now=self.now)
        assert (found.exit_code == 0) == (is_over and tag not in self.damaged)
        if found.exit_code == 0:
            self.purged.add(tag)

    @precondition(lambda self: self._archives())
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """Flip a bit of an archive, and of those that share the file."""
        tag = data.draw(st.sampled_from(sorted(self._archives())))
        store = self._archives()[tag]
        victim = data.draw(st.sampled_from(sorted(p for p in store.rglob("*") if p.is_file())))
        content = victim.read_bytes()
        inode = victim.stat().st_ino
        victim.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        for other, place in self._archives().items():
            if any(path.stat().st_ino == inode for path in place.rglob("*")):
                # A bit that is flipped twice is as it was.
                good = api.verify(place).is_good
                self.damaged = self.damaged - {other} if good else self.damaged | {other}

    @precondition(lambda self: self._archives())
    @rule()
    def unmount(self) -> None:
        """Run while the archives are away."""
        away = self.root / "away"
        self.archive.rename(away)
        before = self._live() + sorted(self._trash())
        with suppress(api.StreamshardError):  # if there is anything in the trash
            api.compact(self.run, self.archive, keep_last=9999, delete=True, now=self.now)
        assert self._live() + sorted(self._trash()) == before
        shutil.rmtree(self.archive, ignore_errors=True)
        away.rename(self.archive)

    def _live(self) -> list[str]:
        found = [p.name for p in self.run.iterdir() if p.is_dir() and p.name[0] != "."]
        return sorted(found, key=lambda tag: int(tag.removeprefix("global_step")))

    def _trash(self) -> set[str]:
        place = self.run / ".streamshard.trash"
        return {p.name for p in place.glob("global_step*")} if place.exists() else set()

    def _archives(self) -> dict[str, Path]:
        """Tag → its archive, full or of the weights alone, as the receipt says."""
        found = {}
        for path in self.archive.glob("*.receipt.json"):
            place = ArchivedTag(self.archive, path.name.removesuffix(".receipt.json"))
            receipt = place.read_receipt()
            assert receipt is not None
            assert receipt.state != WEIGHTS_ONLY or place.tag in self.purged
            if place.named_by(receipt).store.is_dir():
                found[place.tag] = place.named_by(receipt).store
        return found

    def _take_note(self, trash: set[str]) -> None:
        """Note what was removed for good, which only what was in the trash may be."""
        gone = {*self.saved} - {*self._live()} - self._trash() - self.purged
        assert gone <= trash - self.damaged
        self.purged |= gone

    @invariant()
    def nothing_is_lost(self) -> None:
        """Look at every step that was ever saved."""
        for tag, content in self.saved.items():
            if tag in self.purged:
                assert tag in self.damaged or api.verify(self._archives()[tag]).is_good
                continue
            places = [self.run / tag, self.run / ".streamshard.trash" / tag]
            (place,) = [place for place in places if place.is_dir()]
            assert bits(place) == content

    @invariant()
    def the_newest_are_there(self) -> None:
        """Look at what a job would resume from."""
        steps = range(max(1, self.step - KEPT + 1), self.step + 1)
        assert {tag_of(step) for step in steps} <= {*self._live()}


def test_any_order_of_nights() -> None:
    run_state_machine_as_test(
        Nights, settings=settings(max_examples=12, stateful_step_count=14, deadline=None)
    )
