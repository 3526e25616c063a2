"""Writes the files of an export: weights with their sidecars, or a whole checkpoint."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from streamshard.engine.run.work import TargetFile
from streamshard.layout.memory_plan import MemoryPlan
from streamshard.operations.export import export_read_back
from streamshard.operations.export.export_read_back import ExportFiles
from streamshard.operations.export.model_sidecars import ModelSidecars
from streamshard.operations.export.universal_files import UniversalFiles
from streamshard.operations.transfer import execution
from streamshard.operations.transfer.byte_accounting import ByteCounts
from streamshard.operations.transfer.report import Progress, Report
from streamshard.operations.transfer.target_writer import Pass

MOST_NAMED: Final = 4
"""Most tensors that a note names."""


@dataclass(frozen=True, slots=True)
class ExportWriter:
    """Writes an export's files."""

    files: ExportFiles
    sidecars: ModelSidecars
    """The sidecars, and the source to read from."""
    counts: ByteCounts

    @classmethod
    def of(cls, files: ExportFiles, sidecars: ModelSidecars) -> Self:
        """Count the bytes of the files."""
        return cls(files, sidecars, sidecars.added_to(files.byte_counts()))

    def byte_counts(self) -> ByteCounts:
        """Return the bytes that are written, and how often each tensor is read."""
        return self.counts

    def copies_bytes(self, workers: int | None) -> int:
        """Return an upper bound of the memory for the copies of the files in flight."""
        return self.files.copies_bytes(workers or execution.default_workers())

    def passes(self) -> Sequence[Pass]:
        """Return the only pass."""
        return [self._targets]

    def _targets(self) -> Iterator[TargetFile]:
        if not isinstance(self.files, UniversalFiles):
            self.files.overflowed.clear()
        yield from self.sidecars.targets()
        yield from self.files.targets()

    def differences(self, place: Path, memory: MemoryPlan, progress: Progress) -> list[str]:
        """Read the written files back, and compare them with the source."""
        return export_read_back.export_differences(
            place, self.files, self.sidecars, memory, progress
        )

    def finish(self, report: Report) -> Report:
        """Add to the report the elements that became infinite."""
        found = sorted(self.files.overflowed.items(), key=lambda item: (-item[1], item[0]))
        count = sum(number for _, number in found)
        if not count:
            return replace(report, overflowed=0)
        named = ", ".join(f"{name} ({number:,})" for name, number in found[:MOST_NAMED])
        more = f" and {len(found) - MOST_NAMED:,} more" if len(found) > MOST_NAMED else ""
        note = (
            f"{count:,} finite elements are too large for {report.dtype} and became infinite, in "
            f"{named}{more}: use bf16, or leave them as they are with --keep-dtype."
        )
        return replace(report, overflowed=count, notes=(note, *report.notes))
