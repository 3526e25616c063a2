"""The report that `compact` returns."""

from dataclasses import dataclass
from typing import Final

KEPT: Final = "kept"
ARCHIVED: Final = "archived"
READY: Final = "archived before"
DELETED: Final = "deleted"
IN_TRASH: Final = "in the trash"
PURGED: Final = "purged"
ACKNOWLEDGED: Final = "acknowledged"
BROUGHT_BACK: Final = "brought back"
WEIGHTS_ONLY: Final = "weights only"
AMBIGUOUS: Final = "ambiguous"
FAILED: Final = "failed"

_NEED_SOMEBODY: Final = (AMBIGUOUS, FAILED)


@dataclass(frozen=True, slots=True)
class CompactedTag:
    """The result for one tag; of a dry run, the expected result."""

    tag: str
    step: int | None
    """The number at the end of its name."""
    action: str
    """`kept`, `archived`, `archived before`, `deleted` (that is, moved into the trash), `in the
    trash`, `purged`, `brought back`, `acknowledged`, `weights only`; `ambiguous` or `failed` if the
    user has to look."""
    reason: str
    """The reason, or the error."""
    source_bytes: int = 0
    archive_bytes: int = 0
    """Size of its archive, including files that it shares with earlier archives."""
    shared_bytes: int = 0
    dropped_bytes: int = 0
    """Bytes of optimizer states that were dropped from its archive."""
    exit_code: int = 0
    """Exit code of the error."""

    @property
    def needs_somebody(self) -> bool:
        """Whether the user has to look at it."""
        return self.action in _NEED_SOMEBODY


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
        return tuple(tag for tag in self.tags if tag.needs_somebody)

    @property
    def exit_code(self) -> int:
        """Exit code of the first error; 0 if there was none."""
        return next((tag.exit_code for tag in self.problems), 0)
