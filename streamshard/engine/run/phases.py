"""Those who watch a run, and the names of its phases."""

from typing import Final, Protocol

READING_HEADERS: Final = "reading headers"
WRITING: Final = "writing"
SYNCING: Final = "syncing"
VERIFYING: Final = "verifying"
"""Checksums of what was written."""
COMMITTING: Final = "committing"
COMPARING: Final = "comparing"
"""What was written with the source, or what is there with what a run would make."""
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
