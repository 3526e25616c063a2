"""Ambiguous tags that the user acknowledged, which are not reported again until they change."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamshard.errors import command
from streamshard.formats.deepspeed import names
from streamshard.operations.compact.prune import Tag
from streamshard.operations.compact.receipts import JsonRecord, show_moment
from streamshard.operations.compact.run_context import RunContext

_ACKNOWLEDGED: Final = ".acknowledged.json"


@dataclass(frozen=True, slots=True)
class Acknowledgement(JsonRecord):
    """The state of a tag when the user acknowledged it."""

    tag: str
    looks: str
    """Digest of the path, mode, size, inode and time of change of everything in it."""
    changed_ns: int
    problem: str
    """Why it could not be opened; empty if it could."""
    at: str

    @classmethod
    def of(cls, tag: Tag, at: str) -> "Acknowledgement":
        return cls(tag.name, tag.looks, tag.changed_ns, tag.problem or "", at)


def acknowledge(context: RunContext, tag: Tag) -> None:
    Acknowledgement.of(tag, show_moment(context.now)).write(_path(context, tag))


def acknowledged(context: RunContext, tag: Tag) -> tuple[bool, str]:
    """Tell whether a tag is as it was acknowledged, and what to add to the reason why it stays."""
    before = Acknowledgement.read(_path(context, tag))
    if before is not None and before == Acknowledgement.of(tag, before.at):
        return True, f"; acknowledged {before.at[:10]}"
    if tag.is_denied:
        return False, ""
    dirs = context.run_dir, context.archive_dir
    advice = f"To leave it as it is: {command('compact', *dirs, acknowledge=tag.name)}"
    if before is not None:
        since = f"It is not as it was when it was acknowledged on {before.at[:10]}"
        advice = f"{since}. {advice}"
    return False, f". {advice}"


def _path(context: RunContext, tag: Tag) -> Path:
    return context.archive_dir / f"{names.flat(tag.name)}{_ACKNOWLEDGED}"
