"""Checks the structure of a checkpoint of any kind, and lists the units to read."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamshard.checks.problems import Findings
from streamshard.checks.scan import Unit, scan
from streamshard.errors import IntegrityError, SourceError, release_frames
from streamshard.io.entries import listings_kept
from streamshard.io.files import source_errors
from streamshard.layout.memory_plan import MemoryPlan
from streamshard.model import SourceFile
from streamshard.source.source import Kind, Request, Source

_PIECE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class CheckedStructure:
    """A checkpoint whose structure was checked."""

    kind: Kind
    tag: str | None
    files: Sequence[SourceFile] = ()
    units: Callable[[], Iterable[Unit]] = tuple
    """Yields the units to read."""
    codec_bytes: int = 0
    source: Source | None = None
    """The opened shards; None if they cannot be opened, and for a store, which has digests."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)

    def read(self, memory: MemoryPlan, progress: Callable[[int], None]) -> None:
        """Read everything that has checksums; problems are added to the findings."""
        scan(self.units(), self.files, memory, progress)


def opened_to_check(place: Path, request: Request, findings: Findings) -> Source | None:
    """Open a checkpoint and find what is wrong with it; None if it cannot be opened."""
    try:
        opened = request.open()
    except (SourceError, IntegrityError) as error:
        release_frames(error)
        findings.add_error(error, place)
        return None
    findings.notes += opened.checkpoint.remarks
    return opened


def require_same_repeats(source: Source) -> None:
    """Compare the bytes that ranks have of the same elements."""
    with source_errors(source.path):
        for repeat in source.repeats:
            # Not at the top: few optimizers have them.
            from streamshard.formats.deepspeed.rare_states import require_alike

            nbytes = repeat[2]
            for start in range(0, nbytes, _PIECE_BYTES):
                require_alike(repeat, start, min(_PIECE_BYTES, nbytes - start))


def check_structure(request: Request, findings: Findings) -> CheckedStructure:
    """Check the structure of a checkpoint; all problems are added to the findings."""
    with listings_kept(), source_errors(request.root):
        reader, place = request.reader()
        checked: CheckedStructure = reader.check_structure(place, request, findings)
    return checked
