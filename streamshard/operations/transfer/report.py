"""What verbs return, and what they tell while they run."""

from dataclasses import dataclass, field
from typing import Protocol

from streamshard.engine.run.phases import READING, Watcher


class Progress(Watcher, Protocol):
    """Someone who wants to know how far a run is; called from several threads."""

    def start(self, total_bytes: int, phase: str = READING) -> None:
        """Take note of how much there is to deal with, and of what is done first."""

    def stop(self) -> None:
        """Take note of the end, whether good or bad."""


class Silent:
    """Progress that nobody wants to know."""

    def start(self, total_bytes: int, phase: str = READING) -> None:
        """Do nothing."""

    def advance(self, nbytes: int) -> None:
        """Do nothing."""

    def keep(self, nbytes: int) -> None:
        """Do nothing."""

    def enter(self, phase: str) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a run did, or what it would do. Its names are the keys of `--json`."""

    verb: str
    source: str
    target: str
    tag: str
    zero_stage: int
    source_world_size: int
    world_size: int | None
    """World size of the target; None for stores and exported weights, which have none."""
    files: int
    """Files written."""
    bytes_written: int
    """Exact, but for a compressed store before the run: an upper bound."""
    floor_bytes: int
    """Resident memory before anything was opened."""
    limit_bytes: int
    """Memory allowed above the floor."""
    projected_bytes: int
    """Resident memory that the run was not to exceed, floor included."""
    kept_bytes: int = 0
    """Bytes of these that an earlier run had written before it was cut off."""
    peak_bytes: int | None = None
    """Highest resident memory that was measured; None before the run."""
    seconds: float | None = None
    """Duration of the run without planning; None before the run."""
    is_verified: bool = False
    """Whether what was written is read back and compared with the source."""
    tensors: int | None = None
    """Tensors exported, tied ones once; None for other verbs."""
    dtype: str | None = None
    """What they are cast to: `fp32`, `bf16` or `fp16`; None where nothing is cast."""
    overflowed: int | None = None
    """Finite elements that the dtype cannot hold, and that became infinite; None before a run."""
    path: str = ""
    """Where what was asked for is, and a job resumes from: the target; or with `if_needed` the
    source, if a job can resume from that as it is."""
    found: str | None = None
    """With `if_needed`, what has it already, so that nothing was written: `source` or `target`."""
    notes: tuple[str, ...] = field(default=())
    """What the user should know or do next."""
