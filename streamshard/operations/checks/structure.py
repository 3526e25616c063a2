"""Checks the structure of a checkpoint of any kind, and lists the units to read."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from streamshard import registry
from streamshard.errors import IntegrityError, SourceError, release_frames
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.deepspeed import ds_config, names
from streamshard.formats.deepspeed.cut.zero_cutting import require_alike
from streamshard.io.entries import listings_kept
from streamshard.io.files import source_errors
from streamshard.layout.memory_plan import MemoryPlan
from streamshard.model import SourceFile
from streamshard.operations.checks.problems import Findings
from streamshard.operations.checks.scan import Unit, scan
from streamshard.operations.source.directory_content import DirectoryContent
from streamshard.operations.source.source import Request, Source

_PIECE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class CheckedStructure:
    """A checkpoint whose structure was checked."""

    kind: str
    tag: str | None
    files: Sequence[SourceFile] = ()
    units: Callable[[], Iterable[Unit]] = tuple
    """Yields the units to read."""
    codec_bytes: int = 0
    copies: Callable[[], Iterable[Source]] = tuple
    """Opens other copies that the files have of the source's tensors, where these may differ."""
    source: Source | None = None
    """The opened shards; None if they cannot be opened, and for a store, which has digests."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)

    def read(self, memory: MemoryPlan, progress: Callable[[int], None]) -> None:
        """Read everything that has checksums; problems are added to the findings."""
        scan(self.units(), self.files, memory, progress)


class Reader(ABC):
    """Reads one kind of checkpoint; `registry` lists the readers."""

    kind: ClassVar[str]
    """What `Source.kind` says."""
    title: ClassVar[str]
    """What text calls this kind."""
    completes: ClassVar[bool] = False
    """Whether a job's config can tell what the checkpoint lacks."""
    renames: ClassVar[bool] = False
    """Whether it takes rules for other names of its tensors."""

    def holds(self, directory: Path) -> bool:
        """Tell whether a directory is one of the checkpoints to choose from around it."""
        return False

    @abstractmethod
    def recognizes(self, request: Request) -> Path | None:
        """Return the place of the checkpoint that is asked for; None if it is another kind.

        That is its directory, or the template of its files.
        """

    def at(self, request: Request) -> Path | None:
        """Return the path, or the tag in it that is asked for, if it holds such a checkpoint."""
        root, tag = request.root, request.tag
        place = root if tag is None else root / tag
        return place if (tag is None or names.is_tag(tag)) and self.holds(place) else None

    def is_alone_in(self, content: DirectoryContent) -> bool | None:
        """Tell whether all of a directory is one such checkpoint; None if nothing of this kind.

        A target of ours may be replaced only if it is.
        """
        return None

    @abstractmethod
    def open(self, place: Path, request: Request) -> Source:
        """Open the checkpoint at a place."""

    @abstractmethod
    def check_structure(
        self, place: Path, request: Request, findings: Findings
    ) -> CheckedStructure:
        """Check its structure; all problems are added to the findings."""

    def complete(
        self, source: Source, config: ds_config.Config, stage: int | None, world_size: int
    ) -> Checkpoint:
        """Add what a job's config tells of the training state, where `completes`."""
        raise NotImplementedError


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
    """Compare what ranks have of the same elements, of which only the ends were compared."""
    with source_errors(source.path):
        for repeat in source.repeats:
            for start in range(0, repeat[-1], _PIECE_BYTES):
                require_alike(repeat, start, min(_PIECE_BYTES, repeat[-1] - start))


def title_of(kind: str) -> str:
    """Return what text calls a kind of checkpoint."""
    found: str = next(reader.title for reader in registry.readers() if reader.kind == kind)
    return found


def check_structure(request: Request, findings: Findings) -> CheckedStructure:
    """Check the structure of a checkpoint; all problems are added to the findings."""
    with listings_kept(), source_errors(request.root):
        reader, place = request.reader()
        checked: CheckedStructure = reader.check_structure(place, request, findings)
    return checked
