"""Runs of `compact`: what was done before, the command, and what has to hold whatever happens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias

import streamshard
from tests.compact.runs import ARCHIVE, RUN, make_run, tag_of
from tests.faults.scenarios import Scenario
from tests.faults.shim import NO_OPTION, Option, Side
from tests.job import Job

JOB: Final = Job(groups=((("weight", (7, 3)),),), frozen=(("old", (3,)),), tied={})
TAG: Final = tag_of(1)
"""The tag that all is about, except where another one is to be archived."""


@dataclass(frozen=True, slots=True)
class CompactScenario:
    """A command line of `compact`."""

    name: str
    setup: str
    """What was done before; one of `SETUPS`."""
    options: tuple[str, ...]
    tag: str = TAG
    """The tag to which something is done."""
    ends_as: str = "archived"
    """State that the receipt has in the end."""
    by_hand: bool = False
    """Whether doing it again is an error: it is done."""
    original_goes: bool = False
    """Whether the original is removed for good, or is gone already."""

    own: ClassVar[Side] = Side.TARGET
    """What of its calls no other has."""
    system: ClassVar[Option] = NO_OPTION

    def arguments(self, _: Path, place: Path) -> list[str]:
        """Spell the command line for a directory that holds run and archives."""
        fixed = ("--keep-last", "2", "--workers", "1")
        return ["compact", str(place / RUN), str(place / ARCHIVE), *fixed, *self.options]


AnyScenario: TypeAlias = Scenario | CompactScenario
COMPACT_SCENARIOS: Final[Sequence[CompactScenario]] = (
    CompactScenario("compact: archive", "one archived of four", (), tag=tag_of(2)),
    CompactScenario("compact: delete", "archived", ("--delete",), ends_as="trashed"),
    CompactScenario("compact: archive and delete", "saved", ("--delete",), ends_as="trashed"),
    CompactScenario(
        "compact: archive in one file and delete",
        "saved",
        ("--delete", "--packed"),
        ends_as="trashed",
    ),
    CompactScenario("compact: undelete", "deleted", ("--undelete", TAG), by_hand=True),
    CompactScenario(
        "compact: purge",
        "deleted",
        ("--purge", TAG, "--grace", "0s"),
        ends_as="purged",
        by_hand=True,
        original_goes=True,
    ),
    CompactScenario(
        "compact: empty the trash",
        "deleted",
        ("--delete", "--grace", "0s"),
        ends_as="purged",
        original_goes=True,
    ),
    CompactScenario(
        "compact: drop states",
        "purged",
        ("--weights-only-older-than", "0s"),
        ends_as="weights only",
        original_goes=True,
    ),
    CompactScenario(
        "compact: drop states in one file",
        "purged in one file",
        ("--weights-only-older-than", "0s"),
        ends_as="weights only",
        original_goes=True,
    ),
)

_KEPT: Final[Mapping[str, Any]] = {"keep_last": 2}
_PURGE: Final[Mapping[str, Any]] = {"purge": [TAG], "grace": timedelta(0), "now": None}
SETUPS: Final[Mapping[str, tuple[Sequence[int], Sequence[Mapping[str, Any]]]]] = {
    # What was saved, and what `compact` was asked for in turn.
    "one archived of four": ((1, 2, 3, 4), ({"keep_tags": [tag_of(2)]},)),
    "saved": ((1, 2, 3), ()),
    "archived": ((1, 2, 3), ({},)),
    "deleted": ((1, 2, 3), ({"delete": True},)),
    "purged": ((1, 2, 3), ({"delete": True}, _PURGE)),
    "purged in one file": ((1, 2, 3), ({"delete": True, "packed": True}, _PURGE)),
}


def make_setups(root: Path) -> Path:
    """Make all that the runs begin with; returns the directory."""
    yesterday = datetime.now(UTC) - timedelta(days=1)
    for name, (steps, asked) in SETUPS.items():
        (root / name).mkdir(parents=True)
        make_run(root / name / RUN, JOB, steps)
        for options in asked:
            told = {**_KEPT, "now": yesterday, **options}
            streamshard.compact(root / name / RUN, root / name / ARCHIVE, **told)
    return root
