"""Shows that a process on another machine sees the source, and the target of a run.

Of the source some files are examined. How the target is proved depends on where it is.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from streamshard.errors import SourceError
from streamshard.io.entries import examine
from streamshard.io.object_path import is_object
from streamshard.model import SourceFile

_EXAMINED: Final = 64
"""Files that are examined beforehand. Each is examined once more when it is opened."""


def some_files(files: Sequence[SourceFile]) -> list[SourceFile]:
    """Choose files: of each directory the first one, and others at equal distances."""
    firsts = {file.path.parent: file for file in reversed(files)}
    step = -(-len(files) // _EXAMINED) or 1
    chosen = {file.path: file for file in (*list(firsts.values())[:_EXAMINED], *files[::step])}
    return list(chosen.values())


def require_seen(files: Sequence[SourceFile]) -> None:
    """Refuse files that are others here than where the run was planned."""
    for file in files:
        try:
            found = examine(file.path)
        except OSError as error:
            message = f"cannot be read here ({error.strerror})"
            raise SourceError(message, path=file.path) from error
        seen = found.source_file(file.path)
        if seen != file:
            message = f"is another file here ({_described(seen)}) than where the"
            raise SourceError(f"{message} run was planned ({_described(file)})", path=file.path)


def _described(file: SourceFile) -> str:
    if is_object(file.path):
        return f"{file.nbytes} bytes, ETag {file.version}"
    return f"{file.nbytes} bytes, inode {file.file_id}, changed {file.version} ns after 1970"


class TargetProof(ABC):
    """Proof of one run's target; data, so it is sent to all processes."""

    __slots__ = ()

    def end(self) -> None:  # noqa: B027
        """End the run: from now on no process begins to write."""

    def prove(self) -> str:
        """Show that this process sees the target; returns what `accept` checks."""
        self.require_current()
        return ""

    def accept(self, evidence: str) -> None:  # noqa: B027
        """Check what a process returned, in the one that leads the run."""

    @abstractmethod
    def require_current(self) -> None:
        """Require that the run goes on, in the target that is seen here."""

    def shares_cache(self) -> bool:
        """Whether what is written here is synced when the leader syncs the target."""
        return True
