"""A directory of unfinished target files, with its journal and the space for the rest."""

import threading
from pathlib import Path

from streamshard.engine.journals.journal import Journal
from streamshard.io.preallocation import Reservation


class Partial:
    """A staging directory; all workers of a run share it."""

    def __init__(
        self, path: Path, journal: Journal, reservation: Reservation | None = None
    ) -> None:
        self.path = path
        self.journal = journal
        self.kept_bytes = 0
        """Bytes that an earlier run wrote, and that this run found correct."""
        self._reservation = reservation
        self._lock = threading.Lock()

    def keep(self, nbytes: int) -> None:
        """Count bytes that need not be written again."""
        with self._lock:
            self.kept_bytes += nbytes

    def make_room(self, nbytes: int) -> None:
        """Free preallocated space for bytes that are about to be written."""
        if self._reservation is not None:
            self._reservation.give_back(nbytes)
