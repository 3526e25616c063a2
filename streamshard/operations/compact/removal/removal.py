"""Removes a tag whose archive is proved: first into the trash, after the grace time for good."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from streamshard.engine.run import resident_memory
from streamshard.errors import CorruptFileError, Option, SourceError, StreamshardError
from streamshard.formats.deepspeed import names
from streamshard.operations.compact.archive import omissions
from streamshard.operations.compact.archive.proof import (
    Checks,
    Means,
    Proved,
    intact,
    prove,
    same_archive,
    same_objects,
)
from streamshard.operations.compact.archive.receipts import (
    ARCHIVED,
    DROPPING,
    PURGED,
    TRASHED,
    WEIGHTS_ONLY,
    ArchivedTag,
    Receipt,
    age_at,
    show_moment,
)
from streamshard.operations.compact.checkpoint_family import open_unit
from streamshard.operations.compact.removal.originals import accounted_for, ranks_agree, unchanged
from streamshard.operations.compact.removal.padding import padding_alike
from streamshard.operations.compact.removal.rebuild import rebuilt_equal
from streamshard.operations.compact.removal.trash import Trash, trash_of
from streamshard.operations.compact.run_directory import Identity
from streamshard.operations.source.source import Source, open_source
from streamshard.operations.transfer.target import is_there
from streamshard.sizes import show_duration


@dataclass(frozen=True, slots=True)
class Remover:
    """Removes tags of a run directory."""

    run_dir: Path
    here: Identity
    """Identity of the run directory when the run began."""
    directory: Path
    """Directory of the archives."""
    means: Means
    now: datetime

    @property
    def trash(self) -> Trash:
        """The trash of the run directory."""
        return trash_of(self.run_dir)

    def place(self, tag: str) -> ArchivedTag:
        """Return the place of a tag's archive."""
        return ArchivedTag(self.directory, tag)

    def remove(
        self, tag: str, still_free: Callable[[], str], proved: Proved | None = None
    ) -> Receipt:
        """Move a tag into the trash if its archive holds all of it.

        Parameters
        ----------
        still_free
            Looks at the run directory again; raises an error if something protects the tag now.
        proved
            The proof of this run, which has just archived the tag: both sides have to be unchanged
            since. Without it everything is proved anew.
        """
        place, checks = self.place(tag), Checks(proved.checks if proved else ())
        receipt = self._receipt(tag)
        if receipt.state not in (ARCHIVED, TRASHED):
            raise SourceError(f"{place.receipt}: says '{receipt.state}' of a tag that is here")
        if tag in self.trash.going():
            message = "another save of that name is not wholly removed yet"
            raise SourceError(f"{self.trash.rest_of(tag)}: {message}")
        try:
            etags = receipt.etags if proved else place.etags()  # before the archive is read
            self._look(tag, receipt, checks, still_free, proved)
            # The receipt must say when the tag was moved before the tag is in the trash.
            receipt = replace(receipt, sums_sha256=place.sums_sha256(), etags=etags)
            at = show_moment(max(self.now, datetime.now(UTC)))  # the run may have begun long ago
            trashed = replace(receipt, checks=tuple(checks.done), trashed=at)
            place.write_receipt(replace(trashed, state=TRASHED))
            self.trash.take(tag)
        except StreamshardError:
            place.write_receipt(
                replace(receipt, state=ARCHIVED, trashed="", checks=tuple(checks.done))
            )
            raise
        return trashed

    def _look(
        self,
        tag: str,
        receipt: Receipt,
        checks: Checks,
        still_free: Callable[[], str],
        proved: Proved | None,
    ) -> None:
        root, place = self.run_dir / tag, self.place(tag)
        means = None if proved else self.means
        checks.hold("same_run_directory", lambda: self._same_directory(receipt))
        checks.hold("source_as_recorded", lambda: unchanged(receipt, root, means))
        resident_memory.restart_peak()
        opened = open_unit(self.run_dir, tag)
        checks.hold("source_accounted_for", lambda: accounted_for(opened, root))
        checks.hold("ranks_agree", lambda: ranks_agree(opened))
        checks.hold("padding_alike", lambda: padding_alike(opened))
        if proved is not None:
            checks.hold("archive_unchanged", lambda: proved.still(place))
        else:
            self._prove(opened, receipt, checks)
        checks.hold("source_unchanged", lambda: unchanged(receipt, root, None))
        checks.hold("not_protected", still_free)
        checks.hold("still_same_run_directory", lambda: self._same_directory(receipt))

    def _prove(self, opened: Source, receipt: Receipt, checks: Checks) -> None:
        """Compare a tag with its archive and with the files that are rebuilt from it."""
        candidates, place = omissions.may_follow(opened.checkpoint), self.place(receipt.tag)
        derived = [c.number for c in candidates if c.pair.name in receipt.derived]
        # Files beside a tag stay, and those of a framework's checkpoint go with it.
        tag_only = opened.path != self.run_dir / receipt.tag
        prove(omissions.narrowed(opened, derived), place, self.means, checks, tag_only=tag_only)
        # What the store's reader gives is written into files, and every bit of these is the tag's:
        # so the archive's tensors are the tag's, and weights that it leaves out follow from them.
        checks.hold(
            "rebuilt_equal", lambda: rebuilt_equal(opened, place, self.means, tag_only=tag_only)
        )

    def _same_directory(self, receipt: Receipt) -> str:
        now = Identity.of(self.run_dir)
        if now != self.here or not now.is_in(receipt.run_dir, receipt.device, receipt.inode):
            message = f"{self.run_dir}: is another directory, or on another device, than the one"
            raise CorruptFileError(f"{message} whose tag was archived")
        return ""

    def _receipt(self, tag: str) -> Receipt:
        place = self.place(tag)
        receipt = place.read_receipt()
        if receipt is None:
            message = f"{place.receipt}: not there, so nothing tells what was archived of {tag}"
            raise SourceError(f"{message}; is {self.directory} mounted?")
        if receipt.tag != tag:
            raise CorruptFileError(f"{place.receipt}: is the receipt of {receipt.tag}")
        return receipt

    def waits(self, tag: str, grace: timedelta) -> str:
        """Say since when a tag has been in the trash; empty if its grace time is over."""
        receipt = self._receipt(tag)
        try:
            if age_at(self.now, receipt.trashed) > grace:
                return ""
            since = datetime.fromisoformat(receipt.trashed).astimezone(UTC)
        except (ValueError, OverflowError) as error:
            message = f"{self.place(tag).receipt}: does not say since when {tag} is in the trash"
            raise CorruptFileError(message) from error
        return f"since {since:%Y-%m-%d %H:%M} UTC, {Option('grace')} is {show_duration(grace)}"

    def purge(self, tag: str, unwanted: Callable[[], str] | None = None) -> None:
        """Remove a tag in the trash for good, if its archive is still as it was.

        Parameters
        ----------
        unwanted
            Looks at the run directory again; raises an error if something would protect the tag
            now. It is not called for a tag that is partly removed; None if the user named the tag.
        """
        place, checks = self.place(tag), Checks()
        is_going = tag in self.trash.going()
        if not is_going:
            self.trash.require(tag)
        receipt = self._receipt(tag)
        checks.hold("same_run_directory", lambda: self._same_directory(receipt))
        if not is_going:
            root = self.trash.place_of(tag)
            checks.hold("trash_as_recorded", lambda: unchanged(receipt, root, None))
        elif receipt.state != PURGED:
            message = f"{place.receipt}: is of another save than what is left of one in"
            message = f"{message} {self.trash.rest_of(tag)}; put back the archive of that, or"
            raise CorruptFileError(f"{message} remove it yourself")
        checks.hold("same_archive", lambda: same_archive(receipt, place))
        if not is_going:
            checks.hold("same_objects", lambda: same_objects(receipt, place))
        checks.hold("archive_bytes", lambda: intact(place, self.means))
        checks.hold("archive_opens", lambda: open_source(place.store).checkpoint.tag)
        if unwanted is not None and not is_going:
            checks.hold("not_protected", unwanted)
        done = (*receipt.checks, *checks.done)
        # Before the tag is removed: after an interruption, no later run would record it.
        place.write_receipt(
            replace(receipt, state=PURGED, purged=show_moment(self.now), checks=done)
        )
        self.trash.condemn(tag)
        self.trash.empty(tag, receipt.below_tag())

    def bring_back(self, tag: str) -> None:
        """Move a tag out of the trash to its former place; continue an interrupted run."""
        receipt = self.place(tag).read_receipt()
        is_ours = receipt is not None and receipt.tag == tag
        if not is_ours or receipt is None or not self.is_back(receipt):
            self.trash.bring_back(tag)
        else:
            unchanged(receipt, self.run_dir / tag, None)
        gone = (DROPPING, WEIGHTS_ONLY)  # such a receipt is of another save of that name
        if is_ours and receipt is not None and receipt.state not in gone:
            self.note_back(receipt)

    def is_back(self, receipt: Receipt) -> bool:
        """Tell whether a tag is in its place although its receipt says that it is in the trash."""
        tag = receipt.tag
        is_here = names.is_tag(tag) and is_there(self.run_dir / tag)
        return receipt.state == TRASHED and is_here and tag not in self.trash.tags()

    def note_back(self, receipt: Receipt) -> Receipt:
        """Record in the receipt that a tag is in its place again; return the receipt."""
        back = replace(receipt, state=ARCHIVED, trashed="")
        self.place(receipt.tag).write_receipt(back)
        return back
