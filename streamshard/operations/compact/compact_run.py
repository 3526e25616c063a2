"""Carries out one run of `compact`: by the rules, or for tags that the user names."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Final

from streamshard.errors import (
    CorruptFileError,
    IncompleteError,
    Option,
    SourceError,
    StreamshardError,
    TargetError,
    UsageError,
)
from streamshard.formats.deepspeed import names
from streamshard.io.changes import lock_at, make_directory
from streamshard.io.entries import paths_like
from streamshard.io.files import target_errors
from streamshard.io.place import place_of
from streamshard.operations.compact import compact_report
from streamshard.operations.compact.archive import archive_tag
from streamshard.operations.compact.compact_report import LAST_RUN, CompactedTag, RunRecord
from streamshard.operations.compact.policy import (
    Policy,
    grace_left,
    is_from_future,
    may_drop_states,
)
from streamshard.operations.compact.proof import remove_rebuilt
from streamshard.operations.compact.receipts import (
    BEGUN,
    ArchivedTag,
    Receipt,
    remove_unfinished,
    show_moment,
)
from streamshard.operations.compact.removal import (
    bring_back,
    is_back,
    move_to_trash,
    purge,
    record_back,
)
from streamshard.operations.compact.run_context import ProofContext, RunContext, TagProgress
from streamshard.operations.compact.run_directory import Identity, require_parent
from streamshard.operations.compact.tag_checks import unchanged
from streamshard.operations.compact.tag_choice import CANDIDATE, Choice, Rules, by_step
from streamshard.operations.compact.tag_health import growth
from streamshard.operations.compact.weights_only import drop_states
from streamshard.operations.transfer.execution import Limits
from streamshard.operations.transfer.target import is_there, require_space
from streamshard.sizes import counted
from streamshard.verb_options import CompactOptions

_LOCK: Final = f"{names.OWN_PREFIX}.lock"


class CompactRun:
    """One run of the verb, tag by tag; an error of one tag is in the result for that tag."""

    def __init__(
        self,
        options: CompactOptions,
        run_dir: Path,
        archive_dir: Path,
        limits: Limits,
        now: datetime,
        progress: TagProgress,
    ) -> None:
        self._options = options
        self._progress = progress
        self._rules = Rules.of(options)
        proofs = ProofContext(limits, progress)
        self._context = RunContext(run_dir, archive_dir, Identity.of(run_dir), now, proofs)
        self._deleted: set[str] = set()
        self.notes: list[str] = []
        """What the user should know of the trash."""

    def results(self) -> Iterator[CompactedTag]:
        """Carry out the run, and yield the result for each tag."""
        options = self._options
        if options.delete and not options.is_by_hand:
            self._require_archives()
        with ExitStack() as stack:
            if not options.dry_run:
                self._lock(stack)
                remove_unfinished(self._context.archive_dir)
                remove_rebuilt(self._context.archive_dir)
            if options.is_by_hand:
                yield from self._by_hand()
            elif options.dry_run:
                yield from self._by_rules()
            else:
                yield from self._recorded(self._by_rules())

    def _lock(self, stack: ExitStack) -> None:
        """Lock the archives' directory, and the run directory if anything in it may be moved."""
        options, archive_dir = self._options, self._context.archive_dir
        changes_run_dir = options.delete or options.undelete or options.purge
        run_dirs = [self._context.run_dir] if changes_run_dir else []
        require_parent(archive_dir)
        for directory in (archive_dir, *run_dirs):
            with target_errors(directory):
                make_directory(directory, exist_ok=True)
                lock = lock_at(directory / _LOCK, directory)
                lock.take()
            stack.callback(lock.release)
        if changes_run_dir:
            with suppress(TargetError):  # emptying the trash reports this error
                self._context.trash.tidy()
        with target_errors(archive_dir):
            place_of(archive_dir).remove_dead_locks(paths_like(archive_dir, f"{_LOCK}.*"))

    def _require_archives(self) -> None:
        """Refuse an archive directory that has no receipt of any tag in the trash.

        Its disk may not be mounted. Then new archives would lie on the wrong disk, and their tags
        would be removed.
        """
        context, trashed = self._context, set[str]()
        with suppress(TargetError):  # emptying the trash reports this error
            trashed = context.trash.all_tags()
        if trashed and not any(is_there(context.archived(tag).receipt) for tag in trashed):
            tags = counted(len(trashed), "tag")
            message = f"{context.archive_dir}: has no receipt of what is in the trash of"
            message = f"{message} {context.run_dir} ({tags}). Is it mounted, and is it the"
            raise IncompleteError(f"{message} directory of their archives? Nothing was done")

    def _recorded(self, results: Iterator[CompactedTag]) -> Iterator[CompactedTag]:
        """Record before the results that the run began, and after them how it ended.

        What cannot be recorded stops nothing; in the end it is one result more.
        """
        context, options, now = self._context, self._options, self._context.now
        path, start = context.archive_dir / LAST_RUN, time.monotonic()
        done: list[CompactedTag] = []
        begun = RunRecord(
            str(context.run_dir),
            str(context.archive_dir),
            began=show_moment(now),
            grace_seconds=int(options.grace.total_seconds()),
            deletes=options.delete,
        )

        def write(error: StreamshardError | None = None) -> None:
            at = show_moment(now + timedelta(seconds=time.monotonic() - start))
            begun.after(done, error, at).write(path)

        with suppress(TargetError):
            begun.write(path)
        try:
            for result in results:
                done.append(result)
                yield result
        except StreamshardError as error:
            with suppress(TargetError):
                write(error)
            raise
        try:
            write()
        except TargetError as error:
            yield CompactedTag.failed(LAST_RUN, error)

    def _by_hand(self) -> Iterator[CompactedTag]:
        """Do what the user asks for with the tags that the user names."""
        options, context = self._options, self._context
        if options.acknowledge:
            # A tag of any age is there, and has been looked at.
            rules = replace(self._rules, min_age_ns=0)
            policy = Policy.of(context, rules, is_dry_run=options.dry_run)
            acknowledge = partial(policy.acknowledge, is_dry_run=options.dry_run)
            yield from self._each(options.acknowledge, acknowledge)
        yield from self._each(options.undelete, self._undelete)
        yield from self._each(options.purge, self._purge_if_over)

    def _each(
        self, tags: Iterable[str], do: Callable[[str], CompactedTag | None]
    ) -> Iterator[CompactedTag]:
        """Do something with tags, and yield the results, if there are any; an error is one too."""
        for tag in tags:
            self._progress.tag = tag
            try:
                result = do(tag)
            except StreamshardError as error:
                result = CompactedTag.failed(tag, error)
            if result is not None:
                yield result

    def _undelete(self, tag: str) -> CompactedTag:
        if self._options.dry_run:
            self._context.trash.require(tag)
        else:
            bring_back(self._context, tag)
        reason = "its archive stays where it is"
        return CompactedTag.of(tag, compact_report.BROUGHT_BACK, reason)

    def _purge_if_over(self, tag: str) -> CompactedTag:
        """Remove a tag for good, but not before its grace time in the trash is over."""
        trash = self._context.trash
        if tag not in trash.being_removed():
            trash.require(tag)
            waits = grace_left(self._context, tag, self._options.grace)
            if waits is not None:
                now = Option("grace", timedelta())
                raise UsageError(f"in the trash {waits}; give {now} too to remove it for good now")
        return self._purge(tag, "asked for")

    def _purge(
        self, tag: str, reason: str, require_unprotected: Callable[[], str] | None = None
    ) -> CompactedTag:
        trash = self._context.trash
        if not self._options.dry_run:
            purge(self._context, tag, require_unprotected)
        elif tag not in trash.being_removed():
            trash.require(tag)
        return CompactedTag.of(tag, compact_report.PURGED, reason)

    def _by_rules(self) -> Iterator[CompactedTag]:
        """Archive and remove what the rules do not keep."""
        context, is_dry_run = self._context, self._options.dry_run
        policy = Policy.of(context, self._rules, is_dry_run=is_dry_run)
        choices = {choice.tag.name: choice for choice in policy.choices()}
        for result in self._each(choices, lambda tag: self._carry_out(choices[tag], policy)):
            nbytes = result.source_bytes or choices[result.tag].tag.nbytes
            yield replace(result, source_bytes=nbytes)
        yield from self._each_in(
            "the trash",
            lambda: context.trash.all_tags() - self._deleted,
            partial(self._empty_trash, policy),
        )
        least_age = self._options.weights_only_older_than
        if least_age is not None:
            yield from self._each_in(
                "the archives",
                lambda: [archived.tag for archived in ArchivedTag.all_in(context.archive_dir)],
                partial(self._drop_states, policy, least_age),
            )

    def _each_in(
        self,
        what: str,
        tags: Callable[[], Iterable[str]],
        do: Callable[[str], CompactedTag | None],
    ) -> Iterator[CompactedTag]:
        """Do something with the considered ones of some tags, in the order of their steps."""
        try:
            considered = sorted(filter(self._rules.considers, tags()), key=by_step)
        except StreamshardError as error:
            yield CompactedTag.failed(what, error)
            return
        yield from self._each(considered, do)

    def _carry_out(self, choice: Choice, policy: Policy) -> CompactedTag:
        """Archive a tag, and with `delete` move it to the trash, unless it is kept."""
        if choice.verdict != CANDIDATE:
            return policy.kept(choice)
        tag = choice.tag.name
        context, is_dry_run, is_moved = self._context, self._options.dry_run, self._options.delete
        receipt, proof, action, grown = self._archived(tag), None, compact_report.READY, ""
        if is_dry_run and (receipt is None or is_moved):  # it is stored, or rebuilt, there
            require_space(context.archived(tag).store, choice.tag.nbytes)
        if receipt is None:
            action = compact_report.ARCHIVED
            if not is_dry_run:
                receipt, proof = archive_tag(
                    context,
                    tag,
                    self._options,
                    stable_since_ns=context.now_ns - self._rules.min_age_ns,
                    health=policy.healths.tensors(choice.tag),
                    rebuilds=is_moved,
                )
                grown = growth(context, tag)
        elif is_back(context, receipt) and not is_dry_run:
            receipt = record_back(context, receipt)  # an earlier run was interrupted here
        if is_moved:
            if not is_dry_run:
                move_to_trash(context, tag, partial(policy.require_removable, choice), proof)
            self._deleted.add(tag)
            action = compact_report.DELETED
        reason = "; ".join(filter(None, (choice.reason, grown)))
        result = CompactedTag.of(tag, action, reason)
        return result if receipt is None else result.with_sizes(receipt)

    def _archived(self, tag: str) -> Receipt | None:
        """Return the receipt of a tag that is archived; None if it is not archived yet."""
        archived = self._context.archived(tag)
        receipt = archived.read_receipt()
        if receipt is None or receipt.state == BEGUN:
            return None
        store = archived.named_by(receipt).store
        if not is_there(store):
            message = f"{store}: gone, and {archived.receipt} says that it was made"
            raise CorruptFileError(f"{message}; remove the receipt to archive {tag} again")
        try:
            unchanged(receipt, self._context.run_dir / tag, None)
        except SourceError as error:
            message = f"{error}. {store} may be of another save, so this one is kept"
            raise CorruptFileError(f"{message}; move one of them away") from error
        return receipt

    def _empty_trash(self, policy: Policy, tag: str) -> CompactedTag:
        """Remove a tag for good whose grace time in the trash is over."""
        stays = self._stays_in_trash(policy, tag)
        if stays is not None:
            return CompactedTag.of(tag, compact_report.IN_TRASH, stays)
        over = f"in the trash for longer than {Option('grace', self._options.grace)}"
        return self._purge(tag, over, partial(policy.require_unprotected, tag))

    def _stays_in_trash(self, policy: Policy, tag: str) -> str | None:
        """Say why a tag stays in the trash; None if it is removed for good."""
        if not self._options.delete:
            return f"no {Option('delete', True)}"
        if tag in self._context.trash.being_removed():
            return None
        waits = grace_left(self._context, tag, self._options.grace)
        if waits is not None:
            if is_from_future(self._context, tag):
                ends = f"{Option('undelete')} brings it back"
                self.notes.append(f"{tag}: in the trash {waits}: the time is to come; {ends}")
            return waits
        protection = policy.protection_in_trash(tag)
        return f"{protection}; {Option('undelete')} brings it back" if protection else None

    def _drop_states(self, policy: Policy, least_age: timedelta, tag: str) -> CompactedTag | None:
        """Drop the optimizer states of an archive whose original was removed long enough ago."""
        if not may_drop_states(self._context, tag, least_age):
            return None
        reason = policy.protection_of_archive(tag)
        if reason is not None:
            return CompactedTag.of(tag, compact_report.KEPT, reason)
        return drop_states(self._context, tag, is_dry_run=self._options.dry_run)
