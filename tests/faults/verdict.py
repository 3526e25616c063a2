"""What a run was to which nothing happened, and what came of one to which something did."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile
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
        return _notes(self.calls)[0].number + _ORDER_DIFFERS


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


def has_noted(calls: Sequence[Call]) -> bool:
    """Tell whether a run had noted a part: a second note shows that it returned from the first."""
    return sum(call.is_done for call in _notes(calls)) > 1


def _notes(calls: Sequence[Call]) -> list[Call]:
    """Select the writes to the journal that come after a write to a file of the target."""
    partial, journal = f"{OUT}.partial/", f"{OUT}.partial/{JOURNAL}"
    writes = [call for call in calls if call.kind & Kind.WRITE and partial in call.path]
    own = f"{partial}{OWN_PREFIX}"
    return [
        call for call in dropwhile(lambda call: own in call.path, writes) if journal in call.path
    ]
