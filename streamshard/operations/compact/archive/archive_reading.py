"""Reads every file of an archive once, from the disk, for all that is proved of its bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from streamshard.engine.run import resident_memory
from streamshard.io.page_cache import drop_cached
from streamshard.layout.memory_plan import MemoryPlan
from streamshard.layout.sample import EVERYTHING
from streamshard.model import SourceFile
from streamshard.operations.checks.problems import Findings
from streamshard.operations.checks.scan import scan
from streamshard.operations.checks.structure import Request, look_at
from streamshard.operations.transfer.report import Progress


@dataclass(slots=True)
class ArchiveReading:
    """One reading of an archive: its checksums, the digests of its tensors, and its SHA-256s."""

    store: Path
    memory: Callable[[int, Sequence[SourceFile]], MemoryPlan]
    """Fits the reading into the memory limit, with the bytes that decoding takes."""
    progress: Progress
    findings: Findings = field(default_factory=Findings)

    def run(self) -> dict[Path, str]:
        """Read the archive, bypassing the page cache; the findings say what is wrong with it.

        Returns the SHA-256 of each file that was read from its first byte to its last. Files that
        are damaged may be missing, and so may large files that several workers read.
        """
        resident_memory.restart_peak()
        drop_cached(self.store)
        looked = look_at(Request(self.store), self.findings, EVERYTHING)
        whole: dict[Path, str] = {}

        def note(file: int, sha256: str) -> None:
            whole[looked.files[file].path] = sha256

        self.progress.start(looked.nbytes)
        try:
            plan = self.memory(looked.codec_bytes, looked.files)
            units, advance = looked.units(), self.progress.advance
            scan(units, looked.files, looked.decoders, plan, advance, note)
        finally:
            self.progress.stop()
        return whole
