"""Decides what may go, and again right before it goes; moves and removes nothing itself.

It also knows the ambiguous tags that the user acknowledged: they are not reported again.
"""

import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Final

from streamshard.errors import (
    CorruptFileError,
    IncompleteError,
    IntegrityError,
    Option,
    SourceError,
    SourceNotFoundError,
    UsageError,
    command,
)
from streamshard.formats.deepspeed import names
from streamshard.operations.compact import compact_report, tag_choice
from streamshard.operations.compact.compact_report import CompactedTag
from streamshard.operations.compact.receipts import (
    DROPPING,
    PURGED,
    WEIGHTS_ONLY,
    JsonRecord,
    show_moment,
)
from streamshard.operations.compact.run_context import RunContext
from streamshard.operations.compact.run_directory import scan_run_directory
from streamshard.operations.compact.tag_choice import (
    Choice,
    Rules,
    RunDirectory,
    Tag,
    choose,
    refusal,
)
from streamshard.operations.compact.tag_health import TagHealths
from streamshard.operations.transfer.target import is_there
from streamshard.sizes import show_duration, some_of

_ACKNOWLEDGED: Final = ".acknowledged.json"
_MOST_NAMED: Final = 4


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


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules of a run, and the run directory as it was when the run began."""

    context: RunContext
    rules: Rules
    before: RunDirectory
    healths: TagHealths

    @classmethod
    def of(cls, context: RunContext, rules: Rules, *, is_dry_run: bool) -> "Policy":
        """Scan a run directory, and refuse it if nothing in it may be removed."""
        healths = TagHealths(context, remembers=not is_dry_run)
        run = scan_run_directory(context.run_dir, None, rules.tags)
        run = replace(run, unhealthy=healths.read)
        known = [tag.name for tag in (*run.tags, *run.trashed)]
        if known and not any(map(rules.considers, known)):
            message = f"{context.run_dir}: {Option('tags', rules.tags)} matches no tag; there are"
            raise SourceNotFoundError(f"{message} {some_of(known, _MOST_NAMED)}")
        reason = refusal(run)
        if reason is not None:
            raise IncompleteError(f"{context.run_dir}: {reason}. Nothing was done")
        return cls(context, rules, run, healths)

    def choices(self) -> list[Choice]:
        """Decide about the considered tags, in the order of their steps; the newest are read."""
        found = choose(self.before, self.rules, self.context.now_ns)
        self.healths.record(self.before)
        return found

    def kept(self, choice: Choice) -> CompactedTag:
        """Report a tag that is kept; one that is ambiguous only until the user acknowledges it."""
        tag, reason = choice.tag, choice.reason
        if choice.verdict == tag_choice.KEPT and self.healths.is_unread(tag):
            return CompactedTag.failed(tag.name, SourceError(reason))
        if choice.verdict == tag_choice.KEPT:
            code = IntegrityError.exit_code if choice.unhealthy else 0
            kept = CompactedTag.of(tag.name, compact_report.KEPT, reason, code)
            return replace(kept, unhealthy=choice.unhealthy)
        known = _Acknowledgement.read(self._acknowledgement_of(tag))
        if known is not None and known == _Acknowledgement.of(tag, known.at):
            reason = f"{reason}; acknowledged {known.at[:10]}"
            return CompactedTag.of(tag.name, compact_report.KEPT, reason)
        if tag.is_denied:
            return CompactedTag.failed(tag.name, SourceError(reason))
        dirs = self.context.run_dir, self.context.archive_dir
        advice = f"To leave it as it is: {command('compact', *dirs, acknowledge=tag.name)}"
        if known is not None:
            since = f"It is not as it was when it was acknowledged on {known.at[:10]}"
            advice = f"{since}. {advice}"
        return CompactedTag.failed(tag.name, SourceError(f"{reason}. {advice}"))

    def acknowledge(self, tag: str, *, is_dry_run: bool) -> CompactedTag:
        """Record that a tag stays as it is, and is not reported again until it changes."""
        # Whether a tag is unclear does not depend on numbers in it, so none is read.
        run = replace(self.before, unhealthy=lambda _: "")
        found = choose(run, self.rules, self.context.now_ns)
        choices = {choice.tag.name: choice for choice in found}
        if tag not in choices:
            message = f"{self.context.run_dir}: no tag {tag} with shards; there are"
            raise UsageError(f"{message} {', '.join(choices) or 'none'}")
        choice = choices[tag]
        if choice.verdict == tag_choice.KEPT:
            raise UsageError(f"kept anyway ({choice.reason}), so there is nothing to acknowledge")
        if choice.verdict == tag_choice.CANDIDATE:
            message = "it can be opened, and no rule keeps it"
            raise UsageError(
                f"{message}; {Option('keep_tags', [tag])} in every run leaves it alone"
            )
        if not is_dry_run:
            at = show_moment(self.context.now)
            _Acknowledgement.of(choice.tag, at).write(self._acknowledgement_of(choice.tag))
        reason = "kept, and reported again when a file in it changes or another problem appears"
        return CompactedTag.of(tag, compact_report.ACKNOWLEDGED, reason)

    def _acknowledgement_of(self, tag: Tag) -> Path:
        return self.context.archive_dir / f"{names.flat(tag.name)}{_ACKNOWLEDGED}"

    def require_removable(self, choice: Choice) -> str:
        """Repeat the choice for a tag that is about to be moved."""
        run = self._scan_again()
        reason = refusal(run)
        if reason is None:
            now_ns = max(self.context.now_ns, time.time_ns())
            choices = {c.tag.name: c for c in choose(run, self.rules, now_ns)}
            now = choices.get(choice.tag.name)
            if now is None or now.tag.looks != choice.tag.looks:
                reason = "changed while it was watched"
            elif now.verdict != tag_choice.CANDIDATE:
                reason = now.reason
        if reason is not None:
            path = self.context.run_dir / choice.tag.name
            raise CorruptFileError(f"{path}: may not be removed any more: {reason}")
        return choice.reason

    def require_unprotected(self, tag: str) -> str:
        """Require that no rule would protect a tag in the trash if it were brought back."""
        reason = self.protection_in_trash(tag)
        if reason is not None:
            message = f"{self.context.run_dir}: {tag} in its trash may not be removed any more:"
            raise CorruptFileError(f"{message} {reason}")
        return "no rule would keep it"

    def protection_in_trash(self, tag: str) -> str | None:
        """Say what would protect a tag in the trash if it were brought back, if anything."""
        run = self._scan_again()
        reason = refusal(run) or self._not_read(run)
        trashed = next((one for one in run.trashed if one.name == tag), None)
        if reason is not None or trashed is None:
            reason = reason or "its trash cannot be read"
            raise CorruptFileError(f"{self.context.run_dir}: {reason}; {tag} stays in the trash")
        run = replace(run, unhealthy=self.healths.read)
        found = tag_choice.protection_in_trash(trashed, run, self.rules)
        self.healths.record(run)
        return found

    def protection_of_archive(self, tag: str) -> str | None:
        """Say what protects the optimizer states in the archive of a removed tag, if anything."""
        found = tag_choice.protection(tag, self.before, self.rules)
        if found is not None:
            return found
        run = self._scan_again()  # the run may have begun long ago
        return refusal(run) or tag_choice.protection(tag, run, self.rules)

    def _scan_again(self) -> RunDirectory:
        run = scan_run_directory(self.context.run_dir, self.before, self.rules.tags)
        # Reading takes time, in which others may go on to change the directory.
        return replace(run, unhealthy=self.healths.recall)

    def _not_read(self, run: RunDirectory) -> str | None:
        """Return the problem of a tag that could be opened when the run began, and now cannot.

        Without that tag, the rules would keep other tags in its place.
        """
        whole = {tag.name for tag in self.before.tags if tag.problem is None}
        return next((tag.problem for tag in run.tags if tag.problem and tag.name in whole), None)


def grace_left(context: RunContext, tag: str, grace: timedelta) -> str | None:
    """Say since when a tag has been in the trash; None if its grace time is over."""
    archived = context.archived(tag)
    receipt = archived.require_receipt()
    since = archived.since(receipt.trashed, "in the trash")
    if not grace or context.now - since > grace:
        return None
    return f"since {since:%Y-%m-%d %H:%M} UTC, {Option('grace')} is {show_duration(grace)}"


def is_from_future(context: RunContext, tag: str) -> bool:
    """Tell whether a tag was moved to the trash later than now, as by a machine's wrong clock."""
    archived = context.archived(tag)
    return archived.since(archived.require_receipt().trashed, "in the trash") > context.now


def may_drop_states(context: RunContext, tag: str, least_age: timedelta) -> bool:
    """Tell whether to drop the states of an archive, or to remove the rest of a full archive.

    States are never dropped while the original exists anywhere, or unless the receipt says that it
    was removed.
    """
    archived = context.archived(tag)
    receipt = archived.read_receipt()
    if receipt is None or receipt.state not in (PURGED, DROPPING, WEIGHTS_ONLY):
        return False
    if receipt.tag != tag:
        raise CorruptFileError(f"{archived.receipt}: is the receipt of {receipt.tag}")
    if receipt.state == WEIGHTS_ONLY:
        return any(map(is_there, archived.full_of(receipt).leftovers))
    is_old = context.now - archived.since(receipt.purged, "gone") > least_age
    return is_old and not any(context.originals(tag))
