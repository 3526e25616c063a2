"""The record of the last night, beside the archives: what status and notices report."""

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from streamshard.errors import CorruptFileError, StreamshardError, TargetError
from streamshard.formats import strict_json
from streamshard.formats.deepspeed import names
from streamshard.formats.links import require_regular
from streamshard.io.changes import write_durably
from streamshard.io.entries import exists, read_document
from streamshard.io.files import source_errors, target_errors
from streamshard.io.object_path import as_path
from streamshard.operations.compact import compact_report
from streamshard.operations.compact.archive.receipts import require_moments, show_moment
from streamshard.operations.compact.compact_report import CompactedTag

_FORMAT: Final = 1
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
class Night:
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


@dataclass(frozen=True, slots=True)
class NightRecord:
    """The file that holds the last outcome."""

    directory: Path
    """Directory of the archives."""

    @property
    def path(self) -> Path:
        """Its path."""
        return self.directory / _NAME

    def write(self, night: Night) -> None:
        """Write it durably."""
        data = json.dumps({"format": _FORMAT, **asdict(night)}, indent=1).encode()
        with target_errors(self.path):
            write_durably(self.path, data, self.path.with_name(f"{_NAME}.partial"))

    def read(self) -> Night | None:
        """Read it; None if no night has left one."""
        try:
            with source_errors(self.path):
                if not exists(self.path):
                    return None
                require_regular(self.path, self.directory)
                return _parse(strict_json.parse(read_document(self.path)))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            message = f"{self.path}: not as streamshard writes it ({error}); remove it"
            raise CorruptFileError(message) from error


def recorded(tags: Iterator[CompactedTag], night: Night, now: datetime) -> Iterator[CompactedTag]:
    """Pass on the results of a night; record before it that it began, and after it how it ended.

    What cannot be recorded stops nothing; in the end it is one result more.
    """
    record = NightRecord(as_path(night.archive_dir))
    done: list[CompactedTag] = []
    start = time.monotonic()

    def write(error: StreamshardError | None = None) -> None:
        at = show_moment(now + timedelta(seconds=time.monotonic() - start))
        record.write(ended(night, done, error, at))

    with suppress(TargetError):
        record.write(night)
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


def _parse(document: Any) -> Night:  # noqa: ANN401
    if document.pop("format") != _FORMAT:
        raise ValueError("of another version")
    actions = {str(action): int(count) for action, count in document.pop("actions").items()}
    problems = tuple(strict_json.make(TagProblem, one) for one in document.pop("problems"))
    night = replace(strict_json.make(Night, document), actions=actions, problems=problems)
    require_moments(night.began, night.ended)
    return night
