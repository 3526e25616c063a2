"""The record of the last night, beside the archives: what status and notices report."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from streamshard.errors import StreamshardError, TargetError
from streamshard.formats.deepspeed import names
from streamshard.io.object_path import as_path
from streamshard.operations.compact import compact_report
from streamshard.operations.compact.archive.receipts import show_moment
from streamshard.operations.compact.compact_report import CompactedTag
from streamshard.operations.compact.record import JsonRecord, require_moments

_NAME: Final = f"{names.OWN_PREFIX}.night.json"


@dataclass(frozen=True, slots=True)
class TagProblem:
    """A tag that someone has to look at."""

    tag: str
    action: str
    """`ambiguous` or `failed`."""
    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class Night(JsonRecord):
    """The outcome of one run of `compact` by the rules."""

    run_dir: str
    archive_dir: str
    began: str = ""
    """Time in UTC, as `ended`."""
    ended: str = ""
    """Empty while the run goes on, and if it was killed."""
    grace_seconds: int = 0
    """Time that tags stay in the trash."""
    deletes: bool = False
    """Whether it was to remove originals."""
    exit_code: int = 0
    error: str = ""
    """Why nothing more was done; empty if every tag had its turn."""
    actions: Mapping[str, int] = field(default_factory=dict)
    """Action → count of the tags with which that was done; see `CompactedTag`."""
    problems: tuple[TagProblem, ...] = ()

    @property
    def needs_somebody(self) -> bool:
        """Whether something is ambiguous or failed."""
        return bool(self.error or self.problems)

    def require_sound(self) -> None:
        """Refuse times without a time zone."""
        require_moments(self.began, self.ended)


def record_of(archive_dir: Path) -> Path:
    """Return the path of the record in a directory of archives."""
    return archive_dir / _NAME


def recorded(tags: Iterator[CompactedTag], night: Night, now: datetime) -> Iterator[CompactedTag]:
    """Pass on the results of a night; record before it that it began, and after it how it ended.

    What cannot be recorded stops nothing; in the end it is one result more.
    """
    path = record_of(as_path(night.archive_dir))
    done: list[CompactedTag] = []
    start = time.monotonic()

    def write(error: StreamshardError | None = None) -> None:
        at = show_moment(now + timedelta(seconds=time.monotonic() - start))
        ended(night, done, error, at).write(path)

    with suppress(TargetError):
        night.write(path)
    try:
        for tag in tags:
            done.append(tag)
            yield tag
    except StreamshardError as error:
        with suppress(TargetError):
            write(error)
        raise
    try:
        write()
    except TargetError as error:
        message, code = str(error), error.exit_code
        yield CompactedTag(_NAME, None, compact_report.FAILED, message, exit_code=code)


def ended(
    began: Night, tags: Sequence[CompactedTag], error: StreamshardError | None, at: str = ""
) -> Night:
    """Return the outcome of a run.

    Parameters
    ----------
    began
        What is known of it before its first tag.
    error
        What ended it before every tag had its turn.
    """
    problems = [tag for tag in tags if tag.needs_somebody]
    codes = [one.exit_code for one in (error, *problems) if one is not None]
    return replace(
        began,
        ended=at,
        exit_code=codes[0] if codes else 0,
        error=str(error or ""),
        actions=dict(Counter(tag.action for tag in tags)),
        problems=tuple(TagProblem(t.tag, t.action, t.reason, t.exit_code) for t in problems),
    )
