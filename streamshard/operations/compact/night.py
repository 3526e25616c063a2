"""Carries out one run of `compact`, tag by tag: by the rules at night, or for named tags."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from streamshard.errors import (
    CorruptFileError,
    IncompleteError,
    Option,
    SourceError,
    SourceNotFoundError,
    StreamshardError,
    TargetError,
    UsageError,
)
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.names import step_of
from streamshard.io.changes import lock_at, make_directory
from streamshard.io.entries import paths_like
from streamshard.io.files import target_errors
from streamshard.io.place import place_of
from streamshard.operations.compact import compact_report, tag_choice
from streamshard.operations.compact.acknowledgement import Acknowledging
from streamshard.operations.compact.archive.archive import Archiver
from streamshard.operations.compact.archive.proof import Means, Proved
from streamshard.operations.compact.archive.receipts import (
    BEGUN,
    ArchivedTag,
    Receipt,
    show_moment,
)
from streamshard.operations.compact.archive.state_removal import Dropper
from streamshard.operations.compact.compact_report import CompactedTag
from streamshard.operations.compact.night_record import Night, recorded
from streamshard.operations.compact.record import remove_unfinished
from streamshard.operations.compact.removal.originals import unchanged
from streamshard.operations.compact.removal.rebuild import remove_rebuilt
from streamshard.operations.compact.removal.removal import Remover
from streamshard.operations.compact.run_directory import Identity, look_at
from streamshard.operations.compact.tag_choice import Choice, Rules, Run, choose, refusal
from streamshard.operations.compact.tag_choice_review import Again
from streamshard.operations.compact.tag_progress import TagProgress
from streamshard.operations.transfer.execution import Limits
from streamshard.operations.transfer.target import is_there
from streamshard.operations.verb_options import ConvertOptions

_LOCK: Final = f"{names.OWN_PREFIX}.lock"
_MOST_NAMED: Final = 4


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of a run."""

    run_dir: Path
    archive_dir: Path
    rules: Rules
    storing: ConvertOptions
    limits: Limits
    delete: bool
    grace: timedelta
    max_delete: int | None
    dry_run: bool
    undelete: tuple[str, ...]
    purge: tuple[str, ...]
    weights_only_older_than: timedelta | None = None
    acknowledge: tuple[str, ...] = ()

    @property
    def is_by_hand(self) -> bool:
        """Whether the run is only about tags that the user names."""
        return bool(self.undelete or self.purge or self.acknowledge)

    @property
    def changes_run_dir(self) -> bool:
        """Whether anything in the run directory may be moved."""
        return self.delete or bool(self.undelete or self.purge)


class Compacting:
    """One run of the verb."""

    def __init__(self, settings: Settings, now: datetime, progress: TagProgress) -> None:
        self._settings = settings
        self._now = now
        self._here = Identity.of(settings.run_dir)
        self._progress = progress
        self._means = Means(settings.limits, progress)
        self._deleted: set[str] = set()
        self._acknowledging = Acknowledging(settings.run_dir, settings.archive_dir)
        rest_ns = self._now_ns - settings.rules.min_age_ns
        run_dir, directory = settings.run_dir, settings.archive_dir
        self._archiver = Archiver(run_dir, directory, settings.storing, self._means, rest_ns)
        self._remover = Remover(run_dir, self._here, directory, self._means, now)
        self._dropper = Dropper(run_dir, self._here, directory, self._means, now)

    @property
    def _now_ns(self) -> int:
        return int(self._now.timestamp() * 10**9)

    def run(self) -> Iterator[CompactedTag]:
        """Carry out the run tag by tag; an error of one tag is in the result for that tag."""
        settings = self._settings
        if settings.delete and not settings.is_by_hand:
            self._require_archives()
        with ExitStack() as stack:
            if not settings.dry_run:
                for place in self._locked():
                    with target_errors(place):
                        make_directory(place, parents=True, exist_ok=True)
                        lock = lock_at(place / _LOCK, place, is_wanted=settings.storing.lock)
                        lock.take()
                    stack.callback(lock.release)
                if settings.storing.lock:
                    with target_errors(settings.archive_dir):
                        dead = paths_like(settings.archive_dir, f"{_LOCK}.*")
                        place_of(settings.archive_dir).remove_dead_locks(dead)
                remove_unfinished(settings.archive_dir)
                remove_rebuilt(settings.archive_dir)
            if settings.is_by_hand:
                yield from self._by_hand()
            elif settings.dry_run:
                yield from self._nightly()
            else:
                yield from recorded(self._nightly(), self._night(), self._now)

    def _night(self) -> Night:
        """Describe the night that begins."""
        settings = self._settings
        return Night(
            str(settings.run_dir),
            str(settings.archive_dir),
            began=show_moment(self._now),
            grace_seconds=int(settings.grace.total_seconds()),
            deletes=settings.delete,
        )

    def _locked(self) -> list[Path]:
        """List the directories to lock; a run directory that is only read is not locked."""
        settings = self._settings
        return [settings.archive_dir, *([settings.run_dir] if settings.changes_run_dir else [])]

    def _require_archives(self) -> None:
        """Refuse an archive directory that has no receipt of any tag in the trash.

        Its disk may not be mounted. Then new archives would lie on the wrong disk, and their tags
        would be removed.
        """
        directory, held = self._settings.archive_dir, set[str]()
        with suppress(TargetError):  # emptying the trash reports this error
            held = {*self._remover.trash.tags(), *self._remover.trash.going()}
        if held and not any(is_there(ArchivedTag(directory, tag).receipt) for tag in held):
            message = f"{directory}: has no receipt of any of the {len(held):,} tags in the trash"
            message = f"{message} of {self._settings.run_dir}; is it mounted, and the one that they"
            raise IncompleteError(f"{message} were archived in? Nothing was done")

    # By hand -------------------------------------------------------------------------------------

    def _by_hand(self) -> Iterator[CompactedTag]:
        if self._settings.acknowledge:
            yield from self._acknowledge()
        for tag in self._settings.undelete:
            what = "its archive stays where it is"
            yield self._attempt(tag, compact_report.BROUGHT_BACK, what, self._remover.bring_back)
        for tag in self._settings.purge:
            look, purge = self._require_over, self._remover.purge
            yield self._attempt(tag, compact_report.PURGED, "asked for", purge, look)

    def _require_over(self, tag: str) -> None:
        """Refuse to remove a tag for good before its grace time in the trash is over."""
        trash = self._remover.trash
        if tag not in trash.going():
            trash.require(tag)
            waits = self._remover.waits(tag, self._settings.grace)
            if waits:
                now = Option("grace", timedelta())
                raise UsageError(f"in the trash {waits}; give {now} too to remove it for good now")

    def _attempt(
        self,
        tag: str,
        action: str,
        reason: str,
        do: Callable[[str], object],
        look: Callable[[str], object] = lambda _: None,
    ) -> CompactedTag:
        """Do something with a tag in the trash unless this is a dry run; return the result."""
        trash = self._remover.trash
        self._progress.turn_to(tag)
        try:
            look(tag)
            if not self._settings.dry_run:
                do(tag)
            elif action == compact_report.BROUGHT_BACK or tag not in trash.going():
                trash.require(tag)
        except StreamshardError as error:
            return _failed(tag, error)
        return CompactedTag(tag, step_of(tag), action, reason)

    def _acknowledge(self) -> Iterator[CompactedTag]:
        """Acknowledge the given tags."""
        run, is_dry_run = self._look_at(), self._settings.dry_run
        rules = replace(self._settings.rules, min_age_ns=0)  # it is there, and has been looked at
        choices = {c.tag.name: c for c in choose(run, rules, self._now_ns)}
        for tag in self._settings.acknowledge:
            try:
                if tag not in choices:
                    held = ", ".join(choices) or "none"
                    message = f"{self._settings.run_dir}: no tag {tag} with shards; there are"
                    raise UsageError(f"{message} {held}")
                noting = self._acknowledging
                yield noting.acknowledge(choices[tag], self._now, is_dry_run=is_dry_run)
            except StreamshardError as error:
                yield _failed(tag, error)

    # By night ------------------------------------------------------------------------------------

    def _look_at(self) -> Run:
        """Describe the run directory, and refuse it if nothing in it may be removed."""
        rules = self._settings.rules
        run = look_at(self._settings.run_dir, None, rules.tags)
        known = [tag.name for tag in (*run.tags, *run.trashed)]
        if known and not any(map(rules.considers, known)):
            more = ", …" if len(known) > _MOST_NAMED else ""
            asked = Option("tags", rules.tags)
            message = f"{self._settings.run_dir}: {asked} matches no tag; there are"
            raise SourceNotFoundError(f"{message} {', '.join(known[:_MOST_NAMED])}{more}")
        reason = refusal(run)
        if reason is not None:
            raise IncompleteError(f"{self._settings.run_dir}: {reason}. Nothing was done")
        return run

    def _nightly(self) -> Iterator[CompactedTag]:
        run = self._look_at()
        again = Again(self._settings.run_dir, self._settings.rules, self._now_ns, run)
        for choice in choose(run, self._settings.rules, self._now_ns):
            if choice.verdict == tag_choice.KEPT:
                found = CompactedTag(
                    choice.tag.name, choice.step, compact_report.KEPT, choice.reason
                )
                yield replace(found, source_bytes=choice.tag.nbytes)
            elif choice.verdict == tag_choice.AMBIGUOUS:
                try:
                    found = self._acknowledging.judge(choice)
                except SourceError as error:
                    found = _failed(choice.tag.name, error)
                yield replace(found, source_bytes=choice.tag.nbytes)
            else:
                yield self._compact(choice, again)
        yield from self._empty_trash(again)
        if self._settings.weights_only_older_than is not None:
            yield from self._drop_states(run, self._settings.weights_only_older_than)

    def _compact(self, choice: Choice, again: Again) -> CompactedTag:
        """Archive a tag, and with `delete` remove it."""
        tag = choice.tag.name
        self._progress.turn_to(tag)
        found = CompactedTag(
            tag, choice.step, compact_report.READY, choice.reason, source_bytes=choice.tag.nbytes
        )
        try:
            receipt, proved = self._archived(tag), None
            if receipt is None:
                found = replace(found, action=compact_report.ARCHIVED)
                if not self._settings.dry_run:
                    receipt, proved = self._archiver.archive(tag, rebuilds=self._may_delete())
            elif self._remover.is_back(receipt) and not self._settings.dry_run:
                receipt = self._remover.note_back(receipt)  # an earlier run was interrupted here
            if receipt is not None:
                found = replace(
                    found,
                    source_bytes=receipt.source_bytes,
                    archive_bytes=receipt.archive_bytes,
                    shared_bytes=receipt.shared_bytes,
                )
            return self._delete(choice, found, again, proved)
        except StreamshardError as error:
            return replace(_failed(tag, error), source_bytes=found.source_bytes)

    def _archived(self, tag: str) -> Receipt | None:
        """Return the receipt of a tag that is archived; None if it is not archived yet."""
        place = ArchivedTag(self._settings.archive_dir, tag)
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
            message = f"{error}. {place.store} may be of another save, so this one is kept"
            raise CorruptFileError(f"{message}; move one of them away") from error
        return receipt

    def _may_delete(self) -> bool:
        """Tell whether this run may remove one more tag."""
        most = self._settings.max_delete
        return self._settings.delete and (most is None or len(self._deleted) < most)

    def _delete(
        self, choice: Choice, found: CompactedTag, again: Again, proved: Proved | None
    ) -> CompactedTag:
        if not self._settings.delete:
            return found
        if not self._may_delete():
            most = Option("max_delete", self._settings.max_delete)
            return replace(found, reason=f"{most} is reached")
        if not self._settings.dry_run:
            self._remover.remove(choice.tag.name, lambda: again.still_free(choice), proved)
        self._deleted.add(choice.tag.name)
        return replace(found, action=compact_report.DELETED)

    def _empty_trash(self, again: Again) -> Iterator[CompactedTag]:
        """Remove the tags for good whose grace time in the trash is over."""
        trash, no_delete = self._remover.trash, f"no {Option('delete', True)}"

        def purge(tag: str) -> None:
            self._remover.purge(tag, lambda: again.still_unwanted(tag))

        try:
            held = {*trash.tags(), *trash.going()} - self._deleted
            held = set(filter(self._settings.rules.considers, held))
        except StreamshardError as error:
            yield _failed("the trash", error)
            return
        for tag in sorted(held, key=lambda t: (step_of(t) or -1, t)):
            if not self._settings.delete:
                yield CompactedTag(tag, step_of(tag), compact_report.IN_TRASH, no_delete)
                continue
            try:
                is_going = tag in trash.going()
                waits = "" if is_going else self._remover.waits(tag, self._settings.grace)
                kept = None if is_going or waits else again.kept_in_trash(tag)
            except StreamshardError as error:
                yield _failed(tag, error)
                continue
            if waits:
                yield CompactedTag(tag, step_of(tag), compact_report.IN_TRASH, waits)
            elif kept is not None:
                reason = f"{kept}; {Option('undelete')} brings it back"
                yield CompactedTag(tag, step_of(tag), compact_report.IN_TRASH, reason)
            else:
                reason = f"in the trash for longer than {Option('grace', self._settings.grace)}"
                yield self._attempt(tag, compact_report.PURGED, reason, purge)

    def _drop_states(self, run: Run, least_age: timedelta) -> Iterator[CompactedTag]:
        """Drop the optimizer states of archives whose originals were removed long enough ago."""
        most, count = self._settings.max_delete, len(self._deleted)
        try:
            tags = filter(self._settings.rules.considers, self._dropper.archives())
        except StreamshardError as error:
            yield _failed("the archives", error)
            return
        for tag in sorted(tags, key=lambda t: (step_of(t) or -1, t)):
            try:
                if not self._dropper.is_due(tag, least_age):
                    continue
                reason = tag_choice.protection(tag, run, self._settings.rules)
                if reason is None and most is not None and count >= most:
                    reason = f"{Option('max_delete', most)} is reached"
                if reason is not None:
                    yield CompactedTag(tag, step_of(tag), compact_report.KEPT, reason)
                    continue
                self._progress.turn_to(tag)
                done = self._dropper.drop(tag, is_dry_run=self._settings.dry_run)
                count += done.action == compact_report.WEIGHTS_ONLY
                yield done
            except StreamshardError as error:
                yield _failed(tag, error)


def _failed(tag: str, error: StreamshardError) -> CompactedTag:
    # A source that cannot be read, or has changed, is not a failure but an ambiguous tag.
    action = compact_report.AMBIGUOUS if isinstance(error, SourceError) else compact_report.FAILED
    return CompactedTag(tag, step_of(tag), action, str(error), exit_code=error.exit_code)
