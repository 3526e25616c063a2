"""`newest`: finds the newest checkpoint of a run from which a job can go on."""

import os
import time
from dataclasses import dataclass

from streamshard.compare.assessment import AssessedCheckpoint, RunAssessment
from streamshard.engine.run import resident_memory
from streamshard.engine.run.memory_limits import Limits
from streamshard.engine.run.phases import Silent
from streamshard.errors import IncompleteError, SourceNotFoundError
from streamshard.options import takes
from streamshard.sizes import counted
from streamshard.transfer.report import Watched
from streamshard.verb_options import NewestOptions


class _Search(NewestOptions, Watched):
    """What `newest` takes."""


@dataclass(frozen=True, slots=True)
class Newest(os.PathLike[str]):
    """The newest good checkpoint of a run; it can be given wherever a path can."""

    run_dir: str
    path: str | None
    """The run directory as it was given, with the name of the checkpoint; None if there is none."""
    checkpoints: tuple[AssessedCheckpoint, ...]
    """All of the run, newest first; of those after the one at `path` nothing is known."""
    notes: tuple[str, ...]
    bytes_read: int
    seconds: float

    def __fspath__(self) -> str:
        """Return the path."""
        if self.path is None:
            raise TypeError(f"{self.run_dir}: no good checkpoint")
        return self.path

    def __str__(self) -> str:
        """Return the path."""
        return self.path or ""

    @property
    def passed_over(self) -> tuple[AssessedCheckpoint, ...]:
        """The newer ones, from which a job should not go on."""
        return tuple(one for one in self.checkpoints if one.reason)


@takes(_Search)
def newest(options: _Search) -> Newest:
    """Find the newest checkpoint of a run that is whole and healthy.

    The result is a path: `resharding(source=newest("runs/7b"))`. Checkpoints are read newest first,
    until one is good: its checksums match, and no weight and no optimizer state holds NaN or
    infinities. A checkpoint that is not whole or not healthy is passed over, and the result says
    why.

    Raises
    ------
    SourceNotFoundError
        There is no checkpoint in the directory.
    IncompleteError
        There are some, and none is good.
    """
    found = search(**vars(options))
    if found.path is None:
        raise none_good(found)
    return found


@takes(_Search)
def search(options: _Search) -> Newest:
    """Find the newest good checkpoint; of a run without one, the result has no path."""
    began = time.monotonic()
    assessment = _assessment(options)
    checkpoints, path = assessment.order(), None
    for number, one in enumerate(checkpoints):
        checkpoints[number] = assessed = assessment.assess(one)
        if assessed.is_good:
            path = assessed.path
            break
    seconds = time.monotonic() - began
    notes, nbytes = tuple(assessment.notes), assessment.bytes_read
    return Newest(str(options.run_dir), path, tuple(checkpoints), notes, nbytes, seconds)


def none_good(report: Newest) -> IncompleteError | SourceNotFoundError:
    """Return the error that says that there is no good checkpoint, and why each is not good."""
    if not report.checkpoints:
        message = "no checkpoint in it; give the directory that holds 'latest' or 'checkpoint-N'"
        return SourceNotFoundError(f"{report.run_dir}: {message}")
    count = counted(len(report.checkpoints), "checkpoint")
    error = IncompleteError(f"{report.run_dir}: {count} in it, none of which is whole and healthy")
    for one in report.passed_over:
        error.add_note(f"{one.path}: {one.reason}")
    return error


def _assessment(options: _Search) -> RunAssessment:
    limits = Limits(resident_memory.resident_bytes(), options.memory_limit, options.workers)
    progress = options.progress or Silent()
    run_dir = str(options.run_dir)
    return RunAssessment(run_dir, limits, progress, is_quick=options.quick)
