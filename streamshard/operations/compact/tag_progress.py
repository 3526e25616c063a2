"""Progress of a run that deals with one tag after the other."""

from streamshard.engine.io.throttle import Throttle
from streamshard.engine.run.phases import READING
from streamshard.operations.transfer.report import Progress


class TagProgress:
    """Tells somebody what is done, with the name of the tag, and no faster than is allowed."""

    def __init__(self, somebody: Progress, bytes_per_second: int | None) -> None:
        self._somebody = somebody
        self._tag = ""
        self.keep, self.stop = somebody.keep, somebody.stop
        self.advance = somebody.advance
        if bytes_per_second is not None:
            self.advance = Throttle(somebody.advance, bytes_per_second).advance

    def turn_to(self, tag: str) -> None:
        """Take note of the tag that all is about from here on."""
        self._tag = tag

    def start(self, total_bytes: int, phase: str = READING) -> None:
        """Tell of how much there is to deal with."""
        self._somebody.start(total_bytes, self._named(phase))

    def enter(self, phase: str) -> None:
        """Tell of what is done from here on."""
        self._somebody.enter(self._named(phase))

    def _named(self, phase: str) -> str:
        return f"{self._tag}: {phase}" if self._tag else phase
