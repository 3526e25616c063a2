"""Runs the command line again and again, in children of one process that has all of it imported.

A child is there in a few milliseconds, where a new interpreter takes half a second. The process is
that of `forking.py`.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from tests.asking import Asked
from tests.faults.shim import NO_OPTION, NOTHING, Arming, Call, Kind, Option


@dataclass(frozen=True, slots=True)
class Kill:
    """A signal from outside."""

    number: int
    after_seconds: float
    """Since the command line was called."""


@dataclass(frozen=True, slots=True)
class Meanwhile:
    """What happens while a run is stopped at a call."""

    fills: Path | None = None
    """A file that takes all the space there is."""
    renames: Sequence[tuple[Path, Path]] = ()
    second: Sequence[object] = ()
    """A command line that is run to its end after them."""
    second_ahead_seconds: float = 0
    kills: bool = False
    """Whether the run is killed then, and not sent on."""


NOTHING_MEANWHILE: Final = Meanwhile()


@dataclass(frozen=True, slots=True)
class Second:
    """How a run ended that was begun, and came to its end, while the first was stopped."""

    code: int
    err: str


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended."""

    code: int
    """Exit code, or the negative number of the signal that ended it."""
    out: str
    err: str
    count: int
    """Calls to the file system on the source or the target."""
    fired: Call | None
    """The call at which something happened."""
    failed: Kind
    """Kinds of all the calls that were made to fail."""
    written: int
    """Bytes that went into files of the target."""
    slept: float
    """Seconds that the run asked to wait."""
    seconds: float
    was_killed: bool
    """Whether it was still running when it was sent the signal."""
    process: int
    """Number that it had."""
    second: Second | None
    calls: tuple[Call, ...]
    """All calls, where they were asked for."""


class Server(Asked):
    """The process that forks, with the shim preloaded."""

    def __init__(self, library: Path) -> None:
        super().__init__("tests.faults.forking", LD_PRELOAD=str(library))

    def warm_up(self, *arguments: object) -> None:
        """Run a command in the server itself, so that no child has to import anything."""
        self.ask({"warm_up": list(map(str, arguments))})

    def run(
        self,
        arguments: Sequence[object],
        *,
        source: Path,
        target: Path,
        arming: Arming = NOTHING,
        options: Option = NO_OPTION,
        kill: Kill | None = None,
        meanwhile: Meanwhile = NOTHING_MEANWHILE,
        ahead_seconds: float = 0,
        user: int | None = None,
        with_calls: bool = False,
        with_content: bool = False,
    ) -> Ended:
        """Run the command line in a child.

        Parameters
        ----------
        source, target
            Directories, calls on what is below which are counted.
        meanwhile
            What is done while the run is stopped at a call.
        ahead_seconds
            By how much the run's clock is ahead.
        with_content
            Whether the calls also tell what was written, and what names lead to.
        user
            Number of the user as whom the command runs; by default this process's own.
        """
        answer = self.ask(
            {
                "run": list(map(str, arguments)),
                "source": source,
                "target": target,
                "arming": asdict(arming),
                "options": int(options),
                "kill": None if kill is None else asdict(kill),
                "meanwhile": asdict(meanwhile),
                "ahead_seconds": ahead_seconds,
                "user": user,
                "with_calls": with_calls,
                "with_content": with_content,
            }
        )
        fired = answer.pop("fired")
        calls = tuple(map(Call.of, answer.pop("calls")))
        failed = Kind(answer.pop("failed"))
        fired = None if fired is None else Call.of(fired)
        told = answer.pop("second")
        other = None if told is None else Second(**told)
        return Ended(**answer, fired=fired, failed=failed, second=other, calls=calls)
