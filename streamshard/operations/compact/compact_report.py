"""What `compact` returns, and the record of the last run, which lies next to the archives."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

from streamshard.errors import SourceError, StreamshardError
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.names import step_of
from streamshard.operations.compact.receipts import JsonRecord, Receipt, parse_moment

KEPT: Final = "kept"
READY: Final = "archived before"
IN_TRASH: Final = "in the trash"
ACKNOWLEDGED: Final = "acknowledged"
BROUGHT_BACK: Final = "brought back"
AMBIGUOUS: Final = "ambiguous"
_FAILED: Final = "failed"

LAST_RUN: Final = f"{names.OWN_PREFIX}.last_run.json"
"""Name of the record of the last run in a directory of archives."""


@dataclass(frozen=True, slots=True)
class CompactedTag:
    """The result for one tag; of a dry run, the expected result."""

    RETIRED: ClassVar[tuple[str, ...]] = ("dropped_bytes", "repeated_bytes")

    tag: str
    step: int | None
    """The number at the end of its name."""
    action: str
    """`kept`, `archived`, `archived before`, `trashed` now or earlier (`in the trash`), `purged`,
    `weights only`, `brought back`, `acknowledged`; `ambiguous` or `failed` if the user has to
    look."""
    reason: str
    """The reason, or the error."""
    source_bytes: int = 0
    archive_bytes: int = 0
    """Size of its archive, including files that it shares with earlier archives."""
    shared_bytes: int = 0
    exit_code: int = 0
    """Exit code of the error; 6 if it is kept and `unhealthy`."""
    unhealthy: str = ""
    """Why no job should go on from it, if no newer tag is good either."""

    @classmethod
    def of(cls, tag: str, action: str, reason: str, exit_code: int = 0) -> "CompactedTag":
        return cls(tag, step_of(tag), action, reason, exit_code=exit_code)

    @classmethod
    def failed(cls, tag: str, error: StreamshardError) -> "CompactedTag":
        """Return the result for a tag with an error.

        A source that cannot be read, or has changed, is not a failure but an ambiguous tag.
        """
        action = AMBIGUOUS if isinstance(error, SourceError) else _FAILED
        return cls.of(tag, action, str(error), error.exit_code)

    def with_sizes(self, receipt: Receipt) -> "CompactedTag":
        return replace(
            self,
            source_bytes=receipt.source_bytes,
            archive_bytes=receipt.archive_bytes,
            shared_bytes=receipt.shared_bytes,
        )

    @property
    def needs_attention(self) -> bool:
        """Whether the user has to look at it."""
        return self.action in (AMBIGUOUS, _FAILED) or bool(self.unhealthy)


@dataclass(frozen=True, slots=True)
class Compaction:
    """The result of a run of `compact`; of a dry run, the expected result."""

    run_dir: str
    archive_dir: str
    is_dry_run: bool
    tags: tuple[CompactedTag, ...]
    """In the order in which they were handled, by step."""
    seconds: float
    notes: tuple[str, ...] = ()
    """What the user should know, for instance patterns of `keep_tags` that match no tag."""

    @property
    def problems(self) -> tuple[CompactedTag, ...]:
        """The tags that the user has to look at."""
        return tuple(tag for tag in self.tags if tag.needs_attention)

    @property
    def exit_code(self) -> int:
        """Exit code of the first problem; 0 if there was none."""
        return next((tag.exit_code for tag in self.problems if tag.exit_code), 0)


@dataclass(frozen=True, slots=True)
class RunRecord(JsonRecord):
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
    problems: tuple[CompactedTag, ...] = ()
    """The tags that the user has to look at."""

    def require_sound(self) -> None:
        for moment in filter(None, (self.began, self.ended)):
            parse_moment(moment)

    def after(
        self, tags: Sequence[CompactedTag], error: StreamshardError | None, at: str
    ) -> "RunRecord":
        """Return the outcome of the run; an error ended it before every tag had its turn."""
        problems = tuple(tag for tag in tags if tag.needs_attention)
        codes = [one.exit_code for one in (error, *problems) if one is not None and one.exit_code]
        return replace(
            self,
            ended=at,
            exit_code=codes[0] if codes else 0,
            error=str(error or ""),
            actions=dict(Counter(tag.action for tag in tags)),
            problems=problems,
        )
