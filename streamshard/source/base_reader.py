"""What a reader of one kind of checkpoint does."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from streamshard.formats.deepspeed import names
from streamshard.source.source import Kind, Request, Source

if TYPE_CHECKING:
    from streamshard.checks.problems import Findings
    from streamshard.source.directory_content import DirectoryContent
    from streamshard.source.structure import CheckedStructure


class Reader(Kind, ABC):
    """Reads one kind of checkpoint; `registry` lists the readers."""

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

    def is_alone_in(self, content: "DirectoryContent") -> bool | None:
        """Tell whether all of a directory is one such checkpoint; None if nothing of this kind.

        A target of ours may be replaced only if it is.
        """
        return None

    @abstractmethod
    def open(self, place: Path, request: Request) -> Source:
        """Open the checkpoint at a place."""

    @abstractmethod
    def check_structure(
        self, place: Path, request: Request, findings: "Findings"
    ) -> "CheckedStructure":
        """Check its structure; all problems are added to the findings."""
