"""Records ambiguous tags that the user accepts as they are, so that no run reports them again."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamshard.commands import command
from streamshard.errors import Option, SourceError, UsageError
from streamshard.formats.deepspeed import names
from streamshard.operations.compact import compact_report, tag_choice
from streamshard.operations.compact.compact_report import CompactedTag
from streamshard.operations.compact.receipts import JsonRecord, show_moment
from streamshard.operations.compact.run_context import RunContext
from streamshard.operations.compact.tag_choice import Choice, Tag

_ENDING: Final = ".acknowledged.json"


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


def acknowledge(context: RunContext, choice: Choice, *, is_dry_run: bool) -> CompactedTag:
    """Record that a tag stays as it is, and is not reported again until it changes."""
    tag = choice.tag
    if choice.verdict == tag_choice.KEPT:
        raise UsageError(f"kept anyway ({choice.reason}), so there is nothing to acknowledge")
    if choice.verdict == tag_choice.CANDIDATE:
        keep = Option("keep_tags", [tag.name])
        message = "it can be opened, and no rule keeps it"
        raise UsageError(f"{message}; {keep} in every run leaves it alone")
    if not is_dry_run:
        _Acknowledgement.of(tag, show_moment(context.now)).write(_path(context, tag))
    what = "kept, and reported again when a file in it changes or another problem appears"
    return CompactedTag(tag.name, choice.step, compact_report.ACKNOWLEDGED, what)


def judge(context: RunContext, choice: Choice) -> CompactedTag:
    """Report an ambiguous tag, or that it is acknowledged."""
    tag = choice.tag
    known = _Acknowledgement.read(_path(context, tag))
    if known is not None and known == _Acknowledgement.of(tag, known.at):
        reason = f"{choice.reason}; acknowledged {known.at[:10]}"
        return CompactedTag(tag.name, choice.step, compact_report.KEPT, reason)
    way = command("compact", context.run_dir, context.archive_dir, acknowledge=tag.name)
    advice = f"To leave it as it is: {way}"
    if known is not None:
        advice = f"It is not as it was when it was acknowledged on {known.at[:10]}. {advice}"
    reason, code = f"{choice.reason}. {advice}", SourceError.exit_code
    return CompactedTag(tag.name, choice.step, compact_report.AMBIGUOUS, reason, exit_code=code)


def _path(context: RunContext, tag: Tag) -> Path:
    return context.archive_dir / f"{names.flat(tag.name)}{_ENDING}"
