"""Drops the optimizer states of archives whose originals were removed for good long ago.

An archive of only the weights is made beside the full archive, under another name, and proved. Then
the receipt names it, and then the full archive is removed. So at any moment the archive that the
receipt names is complete, with the list of its checksums beside it.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from streamshard.errors import (
    CorruptFileError,
    IntegrityError,
    StreamshardError,
    TargetExistsError,
)
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.names import step_of
from streamshard.formats.zarr.documents import ROOT_DOCUMENT
from streamshard.io.changes import remove, remove_file, rename, sync_path
from streamshard.io.entries import lexists
from streamshard.io.files import source_errors, target_errors
from streamshard.io.object_path import is_object
from streamshard.operations.compact import compact_report
from streamshard.operations.compact.archive.proof import (
    Checks,
    Means,
    content_equal,
    intact,
    prove,
    same_archive,
)
from streamshard.operations.compact.archive.receipts import (
    DROPPING,
    PURGED,
    WEIGHTS_ONLY,
    ArchivedTag,
    Check,
    Receipt,
    age_at,
    show_moment,
)
from streamshard.operations.compact.archive.weights_only import Remainder, states_of
from streamshard.operations.compact.compact_report import CompactedTag
from streamshard.operations.compact.removal.trash import trash_of
from streamshard.operations.compact.run_directory import Identity
from streamshard.operations.transfer.target import is_there, partial_of
from streamshard.sizes import show_bytes

_WHY: Final = "by compact, which was to keep only the weights after a time"


@dataclass(frozen=True, slots=True)
class Dropper:
    """Replaces full archives by archives of only the weights."""

    run_dir: Path
    here: Identity
    """Identity of the run directory when the run began."""
    directory: Path
    """Directory of the archives."""
    means: Means
    now: datetime

    def archives(self) -> list[str]:
        """List the tags that have a receipt."""
        return [place.tag for place in ArchivedTag.all_in(self.directory)]

    def is_due(self, tag: str, least_age: timedelta) -> bool:
        """Tell whether to drop the states of an archive, or to remove the rest of a full archive.

        States are never dropped while the original exists anywhere, or unless the receipt says that
        it was removed.
        """
        place = ArchivedTag(self.directory, tag)
        receipt = place.read_receipt()
        if receipt is None or receipt.state not in (PURGED, DROPPING, WEIGHTS_ONLY):
            return False
        if receipt.tag != tag:
            raise CorruptFileError(f"{place.receipt}: is the receipt of {receipt.tag}")
        if receipt.state == WEIGHTS_ONLY:
            return any(map(is_there, self._remains(place)))
        try:
            is_old = age_at(self.now, receipt.purged) > least_age
        except ValueError as error:
            message = f"{place.receipt}: does not say since when {tag} is gone"
            raise CorruptFileError(message) from error
        return is_old and next(self._originals(tag), None) is None

    def drop(self, tag: str, *, is_dry_run: bool) -> CompactedTag:
        """Drop the states of an archive that is due, and return the result."""
        full = ArchivedTag(self.directory, tag)
        receipt = full.read_receipt()
        if receipt is None:
            raise CorruptFileError(f"{full.receipt}: gone while it was looked at")
        reported = CompactedTag(tag, step_of(tag), compact_report.WEIGHTS_ONLY, "")
        if receipt.state != WEIGHTS_ONLY:
            left = Remainder.of(full.store, at=receipt.dropped or show_moment(self.now), why=_WHY)
            if not states_of(left.full.checkpoint):
                reason = "its archive holds no optimizer states"
                if not left.full.checkpoint.layout.stage:
                    reason = "saved without ZeRO (stage 0), whose states cannot be distinguished"
                return replace(reported, action=compact_report.KEPT, reason=reason)
            nbytes = left.dropped_bytes
            if is_dry_run:
                self._original_gone(receipt)
            else:
                receipt = self._make(receipt, full, left)
        else:
            nbytes = receipt.full_bytes - receipt.archive_bytes
        if not is_dry_run:
            self._remove_full(full)
        if receipt.full_bytes:
            nbytes = receipt.full_bytes - receipt.archive_bytes
        return replace(
            reported,
            reason=f"no job can resume from it; {show_bytes(nbytes)} of optimizer states dropped",
            source_bytes=receipt.source_bytes,
            archive_bytes=receipt.archive_bytes - (0 if receipt.full_bytes else nbytes),
            shared_bytes=receipt.shared_bytes,
            dropped_bytes=nbytes,
        )

    def _make(self, receipt: Receipt, full: ArchivedTag, left: Remainder) -> Receipt:
        """Make and prove the archive of weights, and let the receipt name it."""
        checks = Checks()
        before = tuple(check for check in receipt.checks if check.holds)
        try:
            checks.hold("original_gone", lambda: self._original_gone(receipt))
            if receipt.sums_sha256:
                checks.hold("same_archive", lambda: same_archive(receipt, full))
            checks.hold("full_archive_bytes", lambda: intact(full, self.means))
            receipt = self._begin(receipt, full, left)
            weights = replace(full, of_weights=True)
            if is_there(weights.store):
                # An earlier run completed this archive; if it is wrong, it is made anew.
                with suppress(StreamshardError):
                    return self._seal(receipt, full, left, Checks(), (*before, *checks.done))
                full.write_receipt(receipt)  # it must not name the archive that is removed now
                with target_errors(weights.store):
                    remove(weights.store)
            left.write(weights.store)
            return self._seal(receipt, full, left, checks, before)
        except StreamshardError:
            full.write_receipt(replace(receipt, checks=(*before, *checks.done)))
            raise

    def _begin(self, receipt: Receipt, full: ArchivedTag, left: Remainder) -> Receipt:
        """Record that files under the names of the archive of weights are ours from now on."""
        if receipt.state == DROPPING:
            return receipt
        weights = replace(full, of_weights=True)
        for path in (weights.store, partial_of(weights.store), weights.sums):
            if is_there(path):
                message = f"{path}: is there, and no receipt says that compact made it"
                raise TargetExistsError(f"{message}; move it away")
        dropped = left.source.checkpoint.dropped
        begun = replace(receipt, state=DROPPING, dropped=dropped.at if dropped else "")
        full.write_receipt(begun)
        return begun

    def _seal(
        self,
        receipt: Receipt,
        full: ArchivedTag,
        left: Remainder,
        checks: Checks,
        before: tuple[Check, ...],
    ) -> Receipt:
        """Prove the archive of weights, and let the receipt name it."""
        weights = replace(full, of_weights=True)
        statuses = weights.statuses()
        with source_errors(weights.store):
            paths = [weights.store / path for path in statuses]
            digests = self.means.hash_all(paths, weights.store)
        sums = dict(sorted(zip(statuses, digests, strict=True)))
        checks.hold("kept_files_same", lambda: _same_files(full, weights, sums, left))
        weights.write_sums(sums)
        etags = weights.etags()
        archive = prove(left.source, weights, self.means, checks)
        checks.hold("content_equal", lambda: content_equal(archive, left.source, self.means))
        checks.hold("original_still_gone", lambda: self._original_gone(receipt))
        dropped = left.source.checkpoint.dropped
        # The full archive has one link to a kept file, and this archive another.
        shared = [stat.nbytes for stat in statuses.values() if stat.links > 2]
        sealed = replace(
            receipt,
            state=WEIGHTS_ONLY,
            dropped_states=dropped.states if dropped else (),
            full_bytes=receipt.archive_bytes,
            archive_bytes=sum(stat.nbytes for stat in statuses.values()),
            shared_files=len(shared),
            shared_bytes=sum(shared),
            sums_sha256=weights.sums_sha256(),
            etags=etags,
            checks=(*before, *checks.done),
        )
        weights.write_receipt(sealed)
        return sealed

    def _remove_full(self, full: ArchivedTag) -> None:
        """Remove a full archive, after the archive of weights was checked once more."""
        intact(replace(full, of_weights=True), self.means)
        store, going, _ = self._remains(full)
        with target_errors(going):
            remove(going)
            # A partly removed archive must not have the archive's name, or be no store.
            if is_object(store):
                remove_file(store / ROOT_DOCUMENT, missing_ok=True)
                remove(store)
            elif lexists(store):
                rename(store, going)
            sync_path(self.directory)
            remove_file(full.sums, missing_ok=True)
            remove(going)
            sync_path(self.directory)

    def _remains(self, full: ArchivedTag) -> tuple[Path, Path, Path]:
        """List the paths that may be left of a full archive."""
        going = full.store.with_name(f"{names.OWN_PREFIX}.going.{full.store.name}")
        return full.store, going, full.sums

    def _originals(self, tag: str) -> Iterator[Path]:
        """Yield the paths where the original, or a part of it, still exists."""
        trash = trash_of(self.run_dir)
        if is_there(self.run_dir / tag):
            yield self.run_dir / tag
        if tag in (*trash.tags(), *trash.going()):
            yield trash.place_of(tag)

    def _original_gone(self, receipt: Receipt) -> str:
        """Require that the run directory is the archived one, and that the original is gone."""
        now = Identity.of(self.run_dir)
        if now != self.here or not now.is_in(receipt.run_dir, receipt.device, receipt.inode):
            message = f"{self.run_dir}: is another directory, or on another device, than the one"
            raise CorruptFileError(f"{message} whose tag was archived; is the original elsewhere?")
        for path in self._originals(receipt.tag):
            raise CorruptFileError(f"{path}: is there, and its receipt says that it is gone")
        return ""


def _same_files(
    full: ArchivedTag, weights: ArchivedTag, sums: dict[str, str], left: Remainder
) -> str:
    """Require that the kept files have their recorded SHA-256."""
    recorded, kept = full.read_sums(), left.kept()
    for path in kept:
        if path not in sums or sums[path] != recorded.get(path):
            raise IntegrityError(f"{weights.store / path}: not what {full.store} has there")
    return f"{len(kept):,} files"
