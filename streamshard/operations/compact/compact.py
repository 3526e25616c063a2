"""`compact`: archives old tags of a run directory, and with `delete` removes them.

`prune` decides what becomes of each tag, from a description of what is there. Right before a tag
goes, it decides again from what is there by then, and has to come to the same.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Final

from streamshard.engine.jobs.executor import current_executor
from streamshard.engine.run import resident_memory
from streamshard.engine.run.memory_limits import Limits
from streamshard.engine.run.phases import Silent
from streamshard.errors import (
    CorruptFileError,
    IncompleteError,
    Option,
    SourceError,
    SourceNotFoundError,
    StreamshardError,
    TargetError,
    UsageError,
    command,
)
from streamshard.formats.deepspeed import names
from streamshard.io.changes import lock_at, make_directory
from streamshard.io.entries import paths_like, resolve
from streamshard.io.files import target_errors
from streamshard.io.object_path import as_path
from streamshard.io.place import place_of
from streamshard.operations.compact import compact_report, receipts
from streamshard.operations.compact.archive import archive_tag
from streamshard.operations.compact.compact_report import (
    LAST_RUN,
    CompactedTag,
    Compaction,
    RunRecord,
)
from streamshard.operations.compact.proof import remove_rebuilt
from streamshard.operations.compact.prune import (
    RunDirectory,
    Tag,
    by_step,
    considers,
    grace_left,
    matches,
    nanoseconds,
    prune,
    refusal,
    require_pattern,
)
from streamshard.operations.compact.receipts import (
    BEGUN,
    JsonRecord,
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
from streamshard.operations.compact.run_context import RunContext, TagProgress
from streamshard.operations.compact.run_directory import (
    identity_of,
    require_on_disk,
    require_parent,
    scan_run_directory,
)
from streamshard.operations.compact.tag_checks import unchanged
from streamshard.operations.compact.tag_health import TagHealths
from streamshard.operations.compact.weights_only import drop_states
from streamshard.options import option, takes
from streamshard.sizes import counted, some_of
from streamshard.transfer.report import Watched
from streamshard.transfer.target import is_there, require_space
from streamshard.verb_options import CompactOptions

_LOCK: Final = f"{names.OWN_PREFIX}.lock"
_MOST_NAMED: Final = 4
_ACKNOWLEDGED: Final = ".acknowledged.json"


class _Compact(CompactOptions, Watched):
    now: datetime | None = option()


@takes(_Compact)
def compact(options: _Compact) -> Compaction:
    """Archive the old tags of a run directory, each into a compressed store of its own.

    If one tag fails, the result says so, and the run continues with the others.

    Nothing in the run directory changes without `delete`, `undelete` or `purge`; with these or
    `acknowledge`, the named tags alone are dealt with. Use one archive directory for each run
    directory. `now`: time from which ages are counted, by default the present.

    Raises
    ------
    UsageError
        The arguments are invalid, or contradict each other, or the run directory is in a bucket.
    IncompleteError
        No `latest` says which tag is needed, so nothing is changed.
    TargetLockedError
        Another run is active.
    """
    began = time.monotonic()
    now = options.now or datetime.now(UTC)
    if now.tzinfo is None:
        raise UsageError(f"now={now}: has no time zone")
    limits = Limits(resident_memory.resident_bytes(), options.memory_limit, options.workers)
    run_dir = as_path(options.run_dir).absolute()
    archive_dir = as_path(options.archive_dir).absolute()
    require_on_disk(run_dir)
    if options.tags is not None:
        require_pattern(options.tags)
        if options.is_by_hand:
            message = "chooses for runs by the rules; with the names of tags, leave it out"
            raise UsageError(f"{Option('tags', options.tags)}: {message}")
    _require_apart(run_dir, archive_dir)
    if not current_executor().shares_memory:
        _require_for_cluster(options)
    progress = TagProgress(options.progress or Silent(), options.bytes_per_second)
    context = RunContext(run_dir, archive_dir, identity_of(run_dir), now, limits, progress)
    tags = tuple(CompactRun(options, context).results())
    seconds = time.monotonic() - began
    patterns = () if options.is_by_hand else options.keep_tags
    notes = tuple(_unmatched(patterns, tags))
    places = str(options.run_dir), str(options.archive_dir)
    return Compaction(*places, options.dry_run, tags, seconds, notes)


def _require_for_cluster(options: CompactOptions) -> None:
    for name, why in (
        ("packed", "a cluster writes no archives of one file"),
        ("bytes_per_second", "workers of a cluster keep to no rate"),
    ):
        if value := getattr(options, name):
            raise UsageError(f"{Option(name, value)}: {why}; leave it out")


def _unmatched(patterns: Sequence[str], tags: Sequence[CompactedTag]) -> Iterator[str]:
    for pattern in patterns:
        if not any(matches(tag.tag, pattern) for tag in tags):
            yield f"{Option('keep_tags', [pattern])}: no tag has such a name"


def _require_apart(run_dir: Path, archive_dir: Path) -> None:
    here, there = resolve(run_dir), resolve(archive_dir)
    if here == there or here in there.parents or there in here.parents:
        message = f"{archive_dir}: lies in or around {run_dir}; choose another place, best on"
        raise UsageError(f"{message} another disk")


class CompactRun:
    """One run of the verb, tag by tag; an error of one tag is in the result for that tag."""

    def __init__(self, options: CompactOptions, context: RunContext) -> None:
        self._options = options
        self._context = context
        self._before = RunDirectory((), None)
        self._healths = TagHealths(context, remembers=not options.dry_run)

    def results(self) -> list[CompactedTag]:
        options = self._options
        if options.delete and not options.is_by_hand:
            self._require_archives()
        with ExitStack() as stack:
            if not options.dry_run:
                self._lock(stack)
                remove_unfinished(self._context.archive_dir)
                remove_rebuilt(self._context.archive_dir)
            if options.is_by_hand:
                return self._carried_out(self._by_hand())
            return self._by_rules() if options.dry_run else self._recorded()

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
        context, trashed = self._context, self._context.trash.all_tags()
        if trashed and not any(is_there(context.archived(tag).receipt) for tag in trashed):
            tags = counted(len(trashed), "tag")
            message = f"{context.archive_dir}: has no receipt of what is in the trash of"
            message = f"{message} {context.run_dir} ({tags}). Is it mounted, and is it the"
            raise IncompleteError(f"{message} directory of their archives? Nothing was done")

    def _recorded(self) -> list[CompactedTag]:
        """Run by the rules, and record before it that it began, and after it how it ended.

        What cannot be recorded stops nothing; in the end it is one result more.
        """
        context, options, now = self._context, self._options, self._context.now
        path, start = context.archive_dir / LAST_RUN, time.monotonic()
        begun = RunRecord(
            str(context.run_dir),
            str(context.archive_dir),
            began=show_moment(now),
            grace_seconds=int(options.grace.total_seconds()),
            deletes=options.delete,
        )

        def write(results: list[CompactedTag], error: StreamshardError | None = None) -> None:
            at = show_moment(now + timedelta(seconds=time.monotonic() - start))
            begun.after(results, error, at).write(path)

        with suppress(TargetError):
            begun.write(path)
        try:
            results = self._by_rules()
        except StreamshardError as error:
            with suppress(TargetError):
                write([], error)
            raise
        try:
            write(results)
        except TargetError as error:
            results.append(CompactedTag.failed(LAST_RUN, error))
        return results

    def _by_hand(self) -> Iterator[CompactedTag]:
        options = self._options
        if options.acknowledge:
            self._before = self._first_look()
        kept = "kept, and reported again when a file in it changes or another problem appears"
        deletes, keeps = Option("delete", True), Option("keep_tags")
        back = f"a run with {deletes} moves it to the trash again, unless {keeps} names it"
        requests = (
            (options.acknowledge, compact_report.ACKNOWLEDGED, kept),
            (options.undelete, compact_report.BROUGHT_BACK, back),
            (options.purge, receipts.PURGED, "asked for"),
        )
        for tags, action, reason in requests:
            yield from (CompactedTag.of(tag, action, reason) for tag in tags)

    def _by_rules(self) -> list[CompactedTag]:
        context = self._context
        self._before = self._first_look()
        outcomes = [*prune(self._before, context, self._options, context.now)]
        self._healths.record(self._before)
        return self._carried_out(outcomes)

    def _first_look(self) -> RunDirectory:
        """Scan the run directory, and refuse it if nothing in it may be removed."""
        run, run_dir = self._scanned(), self._context.run_dir
        there = [tag.name for tag in (*run.tags, *run.trashed)]
        if there and not any(considers(self._options, name) for name in there):
            message = f"{run_dir}: {Option('tags', self._options.tags)} matches no tag; there are"
            raise SourceNotFoundError(f"{message} {some_of(there, _MOST_NAMED)}")
        reason = refusal(run)
        if reason is not None:
            raise IncompleteError(f"{run_dir}: {reason}. Nothing was done")
        return replace(run, unhealthy=self._healths.read)

    def _scanned(self, before: RunDirectory | None = None) -> RunDirectory:
        run = scan_run_directory(self._context.run_dir, before, self._options.tags)
        by_user = partial(_acknowledged, self._context)
        # Reading takes time, in which others may go on to change the directory.
        return replace(run, unhealthy=self._healths.recall, acknowledged=by_user)

    def _carried_out(self, outcomes: Iterable[CompactedTag]) -> list[CompactedTag]:
        """Do what was decided; returns the results, of which an error is one too."""
        results = []
        for outcome in outcomes:
            self._context.progress.tag = outcome.tag
            try:
                results.append(self._carry_out(outcome))
            except StreamshardError as error:
                failed = CompactedTag.failed(outcome.tag, error)
                results.append(replace(failed, source_bytes=outcome.source_bytes))
        return results

    def _carry_out(self, outcome: CompactedTag) -> CompactedTag:
        tag, options, context = outcome.tag, self._options, self._context
        match outcome.action:
            case receipts.ARCHIVED | receipts.TRASHED:
                try:
                    return self._archive(outcome)
                except SourceError:
                    self._require_there(tag)
                    raise
            case receipts.PURGED:
                return self._purge(outcome)
            case receipts.WEIGHTS_ONLY:
                again = self._decided_again(outcome)
                if again.action != outcome.action:
                    return again
                return outcome if options.dry_run else drop_states(context, outcome)
            case compact_report.ACKNOWLEDGED:
                self._acknowledge(tag)
            case compact_report.BROUGHT_BACK if options.dry_run:
                context.trash.require(tag)
            case compact_report.BROUGHT_BACK:
                bring_back(context, tag)
        return outcome

    def _require_there(self, tag: str) -> None:
        """Say of a tag that cannot be read if a job that keeps only a few tags has removed it."""
        context = self._context
        is_same = identity_of(context.run_dir) == context.identity
        if is_same and not is_there(context.run_dir / tag):
            raise IncompleteError(f"{context.run_dir / tag}: removed while this run went on")

    def _archive(self, outcome: CompactedTag) -> CompactedTag:
        """Archive a tag if it is not archived yet, and move it to the trash if it is to go."""
        tag, context, is_dry_run = outcome.tag, self._context, self._options.dry_run
        goes = outcome.action == receipts.TRASHED
        receipt, proof = self._archived(tag), None
        if is_dry_run and (receipt is None or goes):  # it is stored, or rebuilt, there
            require_space(context.archived(tag).store, outcome.source_bytes)
        if receipt is not None and not goes:
            outcome = replace(outcome, action=compact_report.READY)
        if not is_dry_run:
            if receipt is None:
                receipt, proof = archive_tag(
                    context,
                    tag,
                    self._options,
                    stable_since_ns=context.now_ns - nanoseconds(self._options.min_age),
                    health=self._healths.tensors(self._before.by_name[tag]),
                    rebuilds=goes,
                )
            elif is_back(context, receipt):
                receipt = record_back(context, receipt)  # an earlier run was interrupted here
            if goes:
                move_to_trash(context, tag, partial(self._require_same, outcome), proof)
        return outcome if receipt is None else outcome.with_sizes(receipt)

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
            unchanged(receipt, self._context.run_dir / tag)
        except SourceError as error:
            message = f"{error}. {store} may be of another save, so this one is kept; move this"
            raise CorruptFileError(f"{message} away, or the archive and its receipt") from error
        return receipt

    def _purge(self, outcome: CompactedTag) -> CompactedTag:
        tag, context, options, still = outcome.tag, self._context, self._options, None
        is_begun = tag in context.trash.being_removed()
        if options.is_by_hand and not is_begun:
            context.trash.require(tag)
            waits = grace_left(context, tag, options, context.now)
            if waits is not None:
                now = Option("grace", timedelta())
                raise UsageError(f"in the trash {waits}; give {now} too to remove it for good now")
        elif not is_begun:
            again = self._decided_again(outcome)
            if again.action != outcome.action:
                return again
            still = partial(self._require_same, outcome)
        if not options.dry_run:
            purge(context, tag, still)
        return outcome

    def _acknowledge(self, tag: str) -> None:
        """Record that a tag stays as it is, and is not reported again until it changes."""
        # Whether a tag is unclear does not depend on numbers in it, so none is read. A tag of any
        # age is there, and has been looked at.
        run = replace(self._before, unhealthy=lambda _: "", acknowledged=lambda _: (False, ""))
        tags = run.by_name
        if tag not in tags:
            shown = ", ".join(sorted(tags, key=by_step)) or "none"
            message = f"{self._context.run_dir}: no tag {tag} with shards; there are {shown}"
            raise UsageError(message)
        rules = self._options.replaced(min_age=timedelta())
        outcome = next(prune(run, self._context, rules, self._context.now, tag))
        if outcome.action != compact_report.AMBIGUOUS:
            message = f"not ambiguous: {outcome.reason}; {Option('keep_tags', [tag])} in every run"
            raise UsageError(f"{message} leaves it alone")
        if not self._options.dry_run:
            _acknowledge(self._context, tags[tag])

    def _decided_again(self, outcome: CompactedTag) -> CompactedTag:
        """Decide about a tag again, from what is there now: the run may have begun long ago."""
        tag, before, run = outcome.tag, self._before, self._scanned(self._before)
        reason = refusal(run)
        if reason is None and outcome.action == receipts.TRASHED:
            now = run.by_name.get(tag)
            if now is None or now.looks != before.by_name[tag].looks:
                reason = "changed while it was watched"
        elif reason is None and outcome.action == receipts.PURGED:
            # Without one that could be opened before, the rules would keep others in its place.
            whole = {earlier.name for earlier in before.tags if earlier.problem is None}
            torn = (now.problem for now in run.tags if now.name in whole and now.problem)
            reason = next(torn, None)
        if reason is not None:
            raise self._kept_now(tag, reason)
        at = max(self._context.now, datetime.now(UTC))
        again = [*prune(run, self._context, self._options, at, tag)]
        same = [now for now in again if now.action == outcome.action]
        changed = CompactedTag.of(tag, compact_report.KEPT, "it changed during this run")
        return [changed, *again, *same][-1]

    def _require_same(self, outcome: CompactedTag) -> str:
        again = self._decided_again(outcome)
        if again.action != outcome.action:
            raise self._kept_now(outcome.tag, again.reason)
        return "no rule keeps it"

    def _kept_now(self, tag: str, reason: str) -> CorruptFileError:
        message = f"{self._context.run_dir}: {tag} may not be removed any more: {reason}"
        return CorruptFileError(message)


@dataclass(frozen=True, slots=True)
class _Acknowledgement(JsonRecord):
    """The state of a tag when the user acknowledged it."""

    tag: str
    looks: str
    """Digest of the path, mode, size, inode and time of change of everything in it."""
    changed_ns: int
    problem: str
    """Why it could not be opened; empty if it could."""
    at: str

    @classmethod
    def of(cls, tag: Tag, at: str) -> "_Acknowledgement":
        return cls(tag.name, tag.looks, tag.changed_ns, tag.problem or "", at)


def _acknowledge(context: RunContext, tag: Tag) -> None:
    _Acknowledgement.of(tag, show_moment(context.now)).write(_path(context, tag))


def _acknowledged(context: RunContext, tag: Tag) -> tuple[bool, str]:
    """Tell whether a tag is as it was acknowledged, and what to add to the reason why it stays."""
    before = _Acknowledgement.read(_path(context, tag))
    if before is not None and before == _Acknowledgement.of(tag, before.at):
        return True, f"; acknowledged {before.at[:10]}"
    if tag.is_denied or not names.is_tag(tag.name):  # a name that nobody can type is changed
        return False, ""
    dirs = context.run_dir, context.archive_dir
    advice = f"To leave it as it is: {command('compact', *dirs, acknowledge=tag.name)}"
    if before is not None:
        since = f"It is not as it was when it was acknowledged on {before.at[:10]}"
        advice = f"{since}. {advice}"
    return False, f". {advice}"


def _path(context: RunContext, tag: Tag) -> Path:
    return context.archive_dir / f"{names.flat(tag.name)}{_ACKNOWLEDGED}"
