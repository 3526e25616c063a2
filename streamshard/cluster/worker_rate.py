"""What one worker of a cluster has done."""

from dataclasses import dataclass


@dataclass(slots=True)
class WorkerRate:
    """The work of one process."""

    nbytes: int = 0
    """Bytes that were processed."""
    seconds: float = 0.0
    """Time that its threads worked, in total."""
    jobs: int = 0
    """Parts of files."""

    def add(self, nbytes: int, seconds: float) -> None:
        """Add a job."""
        self.nbytes += nbytes
        self.seconds += seconds
        self.jobs += 1
