"""Progress of a run that handles one tag after the other."""

from streamshard.engine.run.phases import READING
from streamshard.io.throttle import Throttle
from streamshard.operations.transfer.report import Progress


class TagProgress:
    """Passes progress on with the name of the tag, and slows the run down to the allowed rate."""

    def __init__(self, somebody: Progress, bytes_per_second: int | None) -> None:
        self._somebody = somebody
        self._tag = ""
        self.keep, self.stop = somebody.keep, somebody.stop
        self.advance = somebody.advance
        if bytes_per_second is not None:
            self.advance = Throttle(somebody.advance, bytes_per_second).advance

    def turn_to(self, tag: str) -> None:
        """Set the tag that the progress is about from now on."""
        self._tag = tag

    def start(self, total_bytes: int, phase: str = READING) -> None:
        """Start with the total of bytes and the first phase."""
        self._somebody.start(total_bytes, self._named(phase))

    def enter(self, phase: str) -> None:
        """Enter a phase."""
        self._somebody.enter(self._named(phase))

    def _named(self, phase: str) -> str:
        return f"{self._tag}: {phase}" if self._tag else phase
