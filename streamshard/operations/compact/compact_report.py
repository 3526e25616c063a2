"""What `compact` returns."""

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
    """What became of one tag, or would."""

    tag: str
    step: int | None
    """The number at the end of its name."""
    action: str
    """`kept`, `archived`, `archived before`, `deleted` (which is moved into the trash), `in the
    trash`, `purged`, `brought back`, `acknowledged`, `weights only`; `ambiguous` or `failed` where
    somebody has to look."""
    reason: str
    """Why, or what went wrong."""
    source_bytes: int = 0
    archive_bytes: int = 0
    """Of its archive, with what it shares with earlier ones."""
    shared_bytes: int = 0
    dropped_bytes: int = 0
    """Of its archive that were optimizer states, and are gone."""
    exit_code: int = 0
    """Of what went wrong."""

    @property
    def needs_somebody(self) -> bool:
        """Whether somebody has to look."""
        return self.action in _NEED_SOMEBODY


@dataclass(frozen=True, slots=True)
class Compaction:
    """What a run of `compact` did, or would do."""

    run_dir: str
    archive_dir: str
    is_dry_run: bool
    tags: tuple[CompactedTag, ...]
    """In the order in which they were looked at, by step."""
    seconds: float
    notes: tuple[str, ...] = ()
    """What the user should know: patterns of tags to keep that fit none, for instance."""

    @property
    def problems(self) -> tuple[CompactedTag, ...]:
        """The tags that somebody has to look at."""
        return tuple(tag for tag in self.tags if tag.needs_somebody)

    @property
    def exit_code(self) -> int:
        """Of the first thing that went wrong; 0 if nothing did."""
        return next((tag.exit_code for tag in self.problems), 0)
