"""Those who watch a run, and the names of its phases."""

from typing import Final, Protocol

READING_HEADERS: Final = "reading headers"
WRITING: Final = "writing"
SYNCING: Final = "syncing"
VERIFYING: Final = "verifying"
COMMITTING: Final = "committing"
COMPARING: Final = "comparing"
"""With a target that may be what a run would make."""
READING: Final = "reading"
"""What verbs do that write nothing."""


class Watcher(Protocol):
    """Someone who wants to know how far the work is; called from several threads."""

    def advance(self, nbytes: int) -> None:
        """Take note of bytes that were dealt with since the last call."""

    def keep(self, nbytes: int) -> None:
        """Take note that so many of the bytes that are told of were written by an earlier run."""

    def enter(self, phase: str) -> None:
        """Take note of what is being done from here on."""
