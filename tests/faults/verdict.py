"""What a run was to which nothing happened, and what came of one to which something did."""

from dataclasses import dataclass
from typing import Final

from streamshard.formats.deepspeed.names import OWN_PREFIX
from streamshard.operations.source.unfinished import JOURNAL
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
        """Count of the calls after which the journal has a part, whatever the threads do."""
        partial, journal = f"{OUT}.partial/", f"{OUT}.partial/{JOURNAL}"
        writes = [c for c in self.calls if c.kind & Kind.WRITE and partial in c.path]
        first = next(n for n, c in enumerate(writes) if f"{partial}{OWN_PREFIX}" not in c.path)
        noted = next(call for call in writes[first:] if journal in call.path)
        return noted.number + _ORDER_DIFFERS


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
