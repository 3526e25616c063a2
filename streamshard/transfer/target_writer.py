"""What a verb that writes has to supply; all other steps are those of `TransferPlan`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from streamshard.engine.run.phases import Progress
from streamshard.layout.memory_plan import MemoryPlan
from streamshard.model import Template
from streamshard.source.source import Source
from streamshard.transfer.byte_accounting import ByteCounts
from streamshard.transfer.file_layout import FileLayout, Layout
from streamshard.transfer.report import Change, Report

Pass: TypeAlias = Callable[[], Iterable[Layout]]
"""Lays out the target's files, or a part of them."""


class TargetWriter(ABC):
    """Writes the files of a target: native files, a store, or an export."""

    counts: ByteCounts
    """The bytes that are written, and how often each tensor is read."""

    def byte_counts(self) -> ByteCounts:
        """Return the counts; a writer that does not keep them counts again."""
        return self.counts

    @abstractmethod
    def passes(self) -> Sequence[Pass]:
        """Return what lays out the files; a pass may need the results of the passes before it."""

    def beginnings(self) -> Iterator[FileLayout]:
        """Lay out what tells this target from others without reading all of it.

        That is what comes before the elements in a file, such as the step, the settings and the
        names, and the first elements.
        """
        for layout in self.passes()[0]():
            if isinstance(layout, FileLayout):
                yield layout.beginning()

    @abstractmethod
    def differences(self, place: Path, memory: MemoryPlan, progress: Progress) -> list[str]:
        """Read the written files back from disk, and describe how they differ from the source."""

    def finish(self, report: Report, overflowed: Mapping[str, int]) -> Report:
        """Add to a run's report what is known only after the run."""
        return report


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a run is to write, before it is known whether memory and disk suffice for it."""

    source: Source
    writer: TargetWriter
    options: Mapping[str, str]
    """The verb, and the options on which the target's bytes depend."""
    named: str | None = None
    """How the report names the target; by default by its path."""
    source_world_size: int
    world_size: int | None = None
    zero_stage: int | None = None
    """ZeRO stage of the target, if it has one of its own."""
    tensors: int | None = None
    dtype: str | None = None
    notes: tuple[str, ...] = ()
    latest: str | None = None
    """Tag for the `latest` file, which is written after everything else."""
    packs: bool = False
    template: Template | None = None
    is_reusable: bool = False
    """Whether a job can resume from the source as it is."""
    changes: tuple[Change, ...] = ()
    codec_bytes: int = 0
    """Memory of one worker to compress a piece of the target."""
    encode: Callable[[memoryview], bytes] | None = None
    """The function that compresses the target's data; None if it is not compressed."""
    check: Callable[[MemoryPlan, Progress], Sequence[str] | None] | None = None
    """Reads the source and refuses it, or returns notes, before anything is written; None if
    nothing is to check."""
    reopened: int = 1
    """Memory for the headers that are read back, in multiples of the source's."""
