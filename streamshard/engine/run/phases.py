"""The names of a run's phases, and what observes and counts its progress."""

import threading
from collections.abc import Callable
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


class Progress(Protocol):
    """Receives the progress of a run; its methods are called from several threads.

    Those here do nothing.
    """

    def start(self, total_bytes: int, phase: str = READING) -> None:
        """Start with the total of bytes and the first phase."""
        return

    def advance(self, nbytes: int) -> None:
        """Count bytes that were processed since the last call."""
        return

    def keep(self, nbytes: int) -> None:
        """Count processed bytes that an earlier run wrote; `advance` gets them too."""
        return

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        return


class Silent(Progress):
    """Progress that is not shown."""


class Count:
    """A count that several workers add to; each addition is also passed to a callback.

    `per`: how many are passed on as one.
    """

    def __init__(self, then: Callable[[int], None], per: int = 1) -> None:
        self.value = 0
        self._lock = threading.Lock()
        self._then = then
        self._per = per

    def add(self, number: int) -> None:
        with self._lock:
            before, self.value = self.value, self.value + number
        self._then((before + number) // self._per - before // self._per)
