"""What a run was to which nothing happened, and what came of one to which something did."""

from dataclasses import dataclass
from typing import Final

from tests.faults.scenarios import OUT, Tree
from tests.faults.shim import Call, Kind

_ORDER_DIFFERS: Final = 25
"""Calls of two threads may change places by so many."""


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """A scenario's run to which nothing happened."""

    calls: tuple[Call, ...]
    tree: Tree
    seconds: float
    written: int
    """Bytes that went into files."""

    @property
    def has_begun(self) -> int:
        """Count of the calls after which some of the target is written, whatever the threads do."""
        own = f"{OUT}.partial/.streamshard."
        writes = [c for c in self.calls if c.kind & Kind.WRITE and f"{OUT}.partial/" in c.path]
        first = next(call for call in writes if own not in call.path)
        return first.number + _ORDER_DIFFERS


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a case."""

    told: str
    """The case, and the call at which it happened."""
    code: int
    has_fired: bool
    was_whole: bool
    """Whether the target was there after the fault."""
    written_again: int
    """Bytes that running again wrote into files."""
    problems: tuple[str, ...]

    def __str__(self) -> str:
        return "\n    ".join((self.told, *self.problems))
