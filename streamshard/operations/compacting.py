"""One run of `compact`: what is done tag by tag, at night or by hand."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from streamshard.engine.files import target_errors
from streamshard.engine.lock import Lock
from streamshard.errors import (
    CorruptFileError,
    IncompleteError,
    SourceError,
    StreamshardError,
)
from streamshard.formats import deepspeed_names as names
from streamshard.operations import choosing, compaction
from streamshard.operations.archiving import Archiver
from streamshard.operations.choosing import Choice, Rules, Run, choose, refusal, step_of
from streamshard.operations.compaction import CompactedTag
from streamshard.operations.convert import Limits, StoreShape
from streamshard.operations.deleting import Remover
from streamshard.operations.dropping import Dropper
from streamshard.operations.proof import Means, unchanged
from streamshard.operations.receipts import BEGUN, Place, Receipt, remove_unfinished
from streamshard.operations.report import Progress
from streamshard.operations.run_directory import Identity, look_at
from streamshard.operations.target import is_there
from streamshard.sizes import show_duration

_LOCK: Final = f"{names.OWN_PREFIX}.lock"


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run was asked to do."""

    run_dir: Path
    archive_dir: Path
    rules: Rules
    shape: StoreShape
    limits: Limits
    delete: bool
    grace: timedelta
    max_delete: int | None
    dry_run: bool
    undelete: tuple[str, ...]
    purge: tuple[str, ...]
    weights_only_older_than: timedelta | None = None

    @property
    def changes_run_dir(self) -> bool:
        """Whether anything in the run directory may be moved."""
        return self.delete or bool(self.undelete or self.purge)


class Compacting:
    """One run of the verb."""

    def __init__(self, settings: Settings, now: datetime, progress: Progress) -> None:
        self._settings = settings
        self._now = now
        self._here = Identity.of(settings.run_dir)
        self._means = Means(settings.limits, progress)
        self._deleted: set[str] = set()
        self._run: Run | None = None
        """The run directory as it was found at first."""
        rest_ns = self._now_ns - settings.rules.min_age_ns
        run_dir, directory = settings.run_dir, settings.archive_dir
        self._archiver = Archiver(run_dir, directory, settings.shape, self._means, rest_ns)
        self._remover = Remover(run_dir, self._here, directory, self._means, now)
        self._dropper = Dropper(run_dir, self._here, directory, self._means, now)

    @property
    def _now_ns(self) -> int:
        return int(self._now.timestamp() * 10**9)

    def run(self) -> Iterator[CompactedTag]:
        """Do what was asked for, tag by tag; what goes wrong with one is told of that one."""
        settings = self._settings
        with ExitStack() as stack:
            if not settings.dry_run:
                for place in self._locked():
                    with target_errors(place):
                        place.mkdir(parents=True, exist_ok=True)
                        lock = Lock(place / _LOCK, place)
                        lock.take()
                    stack.callback(lock.release)
                remove_unfinished(settings.archive_dir)
            if settings.undelete or settings.purge:
                yield from self._by_hand()
            else:
                yield from self._nightly()

    def _locked(self) -> list[Path]:
        """List what is locked; a run directory from which is only read is none of our business."""
        settings = self._settings
        return [settings.archive_dir, *([settings.run_dir] if settings.changes_run_dir else [])]

    # By hand -------------------------------------------------------------------------------------

    def _by_hand(self) -> Iterator[CompactedTag]:
        for tag in self._settings.undelete:
            what = "its archive stays where it is"
            yield self._attempt(tag, compaction.BROUGHT_BACK, what, self._remover.bring_back)
        for tag in self._settings.purge:
            yield self._attempt(tag, compaction.PURGED, "asked for", self._remover.purge)

    def _attempt(
        self, tag: str, action: str, reason: str, do: Callable[[str], object]
    ) -> CompactedTag:
        """Do something with a tag unless this is a dry run; tell what came of it."""
        try:
            if not self._settings.dry_run:
                do(tag)
        except StreamshardError as error:
            return _failed(tag, error)
        return CompactedTag(tag, step_of(tag), action, reason)

    # By night ------------------------------------------------------------------------------------

    def _nightly(self) -> Iterator[CompactedTag]:
        run_dir = self._settings.run_dir
        run = self._run = look_at(run_dir)
        reason = refusal(run)
        if reason is not None:
            raise IncompleteError(f"{run_dir}: {reason}. Nothing was done")
        for choice in choose(run, self._settings.rules, self._now_ns):
            if choice.verdict == choosing.KEPT:
                yield CompactedTag(choice.tag.name, choice.step, compaction.KEPT, choice.reason)
            elif choice.verdict == choosing.AMBIGUOUS:
                yield CompactedTag(
                    choice.tag.name,
                    choice.step,
                    compaction.AMBIGUOUS,
                    choice.reason,
                    exit_code=SourceError.exit_code,
                )
            else:
                yield self._compact(choice)
        yield from self._empty_trash()
        if self._settings.weights_only_older_than is not None:
            yield from self._drop_states(run, self._settings.weights_only_older_than)

    def _compact(self, choice: Choice) -> CompactedTag:
        """Archive a tag, and remove it if that was asked for."""
        tag = choice.tag.name
        found = CompactedTag(
            tag, choice.step, compaction.READY, choice.reason, source_bytes=choice.tag.nbytes
        )
        try:
            receipt = self._archived(tag)
            if receipt is None:
                found = replace(found, action=compaction.ARCHIVED)
                if not self._settings.dry_run:
                    receipt = self._archiver.archive(tag)
            elif self._remover.is_back(receipt) and not self._settings.dry_run:
                receipt = self._remover.note_back(receipt)  # a run was cut off at that
            if receipt is not None:
                found = replace(
                    found,
                    source_bytes=receipt.source_bytes,
                    archive_bytes=receipt.archive_bytes,
                    shared_bytes=receipt.shared_bytes,
                )
            return self._delete(choice, found)
        except StreamshardError as error:
            return replace(_failed(tag, error), source_bytes=found.source_bytes)

    def _archived(self, tag: str) -> Receipt | None:
        """Return the receipt of a tag that is archived; None if that is still to be done.

        Raises
        ------
        CorruptFileError
            What is archived under its name is something else, or gone.
        """
        place = Place(self._settings.archive_dir, tag)
        receipt = place.read_receipt()
        if receipt is None or receipt.state == BEGUN:
            return None
        place = place.held(receipt)
        if not is_there(place.store):
            message = f"{place.store}: gone, and {place.receipt} says that it was made"
            raise CorruptFileError(f"{message}; remove that to archive {tag} again")
        try:
            unchanged(receipt, self._settings.run_dir / tag, None)
        except SourceError as error:
            message = f"{error}. {place.store} is of another save, so this one is kept"
            raise CorruptFileError(f"{message}; move one of them away") from error
        return receipt

    def _delete(self, choice: Choice, found: CompactedTag) -> CompactedTag:
        most = self._settings.max_delete
        if not self._settings.delete:
            return found
        if most is not None and len(self._deleted) >= most:
            return replace(found, reason=f"--max-delete {most:,} is reached")
        if not self._settings.dry_run:
            self._remover.remove(choice.tag.name, lambda: self._still_free(choice))
        self._deleted.add(choice.tag.name)
        return replace(found, action=compaction.DELETED)

    def _still_free(self, choice: Choice) -> str:
        """Choose again, now.

        Raises
        ------
        SourceError
            Something protects the tag now, or it has changed.
        """
        run = look_at(self._settings.run_dir, self._run)
        reason = refusal(run)
        if reason is None:
            now_ns = max(self._now_ns, time.time_ns())
            again = {c.tag.name: c for c in choose(run, self._settings.rules, now_ns)}
            now = again.get(choice.tag.name)
            if now is None or now.tag.looks != choice.tag.looks:
                reason = "changed while it was watched"
            elif now.verdict != choosing.CANDIDATE:
                reason = now.reason
        if reason is not None:
            message = f"{self._settings.run_dir / choice.tag.name}: may not go any more: {reason}"
            raise CorruptFileError(message)
        return choice.reason

    def _empty_trash(self) -> Iterator[CompactedTag]:
        """Remove for good what has been in the trash for long enough."""
        trash, grace = self._remover.trash, show_duration(self._settings.grace)
        try:
            held = {*trash.tags(), *trash.going()} - self._deleted
        except StreamshardError as error:
            yield _failed("the trash", error)
            return
        for tag in sorted(held, key=lambda t: (step_of(t) or -1, t)):
            if not self._settings.delete:
                yield CompactedTag(tag, step_of(tag), compaction.IN_TRASH, "no --delete")
                continue
            try:
                is_over = tag in trash.going() or self._remover.is_over(tag, self._settings.grace)
            except StreamshardError as error:
                yield _failed(tag, error)
                continue
            if is_over:
                reason = f"in the trash for longer than --grace {grace}"
                yield self._attempt(tag, compaction.PURGED, reason, self._remover.purge)
            else:
                reason = f"not yet for --grace {grace}"
                yield CompactedTag(tag, step_of(tag), compaction.IN_TRASH, reason)

    def _drop_states(self, run: Run, least_age: timedelta) -> Iterator[CompactedTag]:
        """Drop the optimizer states of archives whose originals have been gone for long enough."""
        most, count = self._settings.max_delete, len(self._deleted)
        try:
            tags = self._dropper.archives()
        except StreamshardError as error:
            yield _failed("the archives", error)
            return
        for tag in sorted(tags, key=lambda t: (step_of(t) or -1, t)):
            try:
                if not self._dropper.is_due(tag, least_age):
                    continue
                reason = choosing.protection(tag, run, self._settings.rules)
                if reason is None and most is not None and count >= most:
                    reason = f"--max-delete {most:,} is reached"
                if reason is not None:
                    yield CompactedTag(tag, step_of(tag), compaction.KEPT, reason)
                    continue
                done = self._dropper.drop(tag, is_dry_run=self._settings.dry_run)
                count += done.action == compaction.WEIGHTS_ONLY
                yield done
            except StreamshardError as error:
                yield _failed(tag, error)


def _failed(tag: str, error: StreamshardError) -> CompactedTag:
    # What cannot be read, or is not what it was, is nothing that failed: it is not clear.
    action = compaction.AMBIGUOUS if isinstance(error, SourceError) else compaction.FAILED
    return CompactedTag(tag, step_of(tag), action, str(error), exit_code=error.exit_code)
