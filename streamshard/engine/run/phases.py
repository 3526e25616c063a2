"""The names of a run's phases, and the protocol for observers of its progress."""

from typing import Final, Protocol

READING_HEADERS: Final = "reading headers"
WRITING: Final = "writing"
SYNCING: Final = "syncing"
VERIFYING: Final = "verifying"
"""Checking the checksums of the written files."""
COMMITTING: Final = "committing"
COMPARING: Final = "comparing"
"""Comparing written files with the source, or existing files with what a run would write."""
READING: Final = "reading"
"""The phase of verbs that write nothing."""


class Watcher(Protocol):
    """Receives the progress of a run; called from several threads."""

    def advance(self, nbytes: int) -> None:
        """Count bytes that were processed since the last call."""

    def keep(self, nbytes: int) -> None:
        """Count processed bytes that an earlier run wrote; `advance` gets them too."""

    def enter(self, phase: str) -> None:
        """Begin a phase."""
