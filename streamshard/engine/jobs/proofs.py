"""Shows that a process on another machine sees the source, and the target of a run.

Of the source some files are examined. How the target is proved depends on where it is.

In a directory that a run has staged, the process that leads the run makes a directory of a random
name, with a file in that. Each process that is to write reads that file and leaves an answer next
to it, which the leader reads before it believes any other result. So neither a copy of the
directory nor a file system that keeps writes to itself goes unnoticed.

The directory goes when the run ends. A process that was thought lost and wakes up later finds it
gone when it opens a file, and writes nothing: the file may be another run's by then.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from streamshard.engine.journals.journal import PROOF_PREFIX
from streamshard.errors import SourceError, TargetError
from streamshard.io.changes import make_directory, remove, rename, write_durably
from streamshard.io.entries import examine, read_all
from streamshard.io.file_system import boot_id
from streamshard.io.object_path import is_object
from streamshard.model import SourceFile

_EXAMINED: Final = 64
"""Files that are examined beforehand. Each is examined once more when it is opened."""
_NONCE: Final = "run"
_MOST_UNDER_WAY: Final = 8
"""As many answers may be under way when a run ends: each disturbs one removal."""
_OTHER: Final = "mount the target's file system at the same path on all machines"


def some_files(files: Sequence[SourceFile]) -> list[SourceFile]:
    """Choose files: of each directory the first one, and others at equal distances."""
    firsts = {file.path.parent: file for file in reversed(files)}
    step = -(-len(files) // _EXAMINED) or 1
    chosen = {file.path: file for file in (*list(firsts.values())[:_EXAMINED], *files[::step])}
    return list(chosen.values())


def require_seen(files: Sequence[SourceFile]) -> None:
    for file in files:
        try:
            status = examine(file.path)
        except OSError as error:
            message = f"cannot be read here ({error.strerror})"
            raise SourceError(message, path=file.path) from error
        seen = status.source_file(file.path)
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


@dataclass(frozen=True, slots=True)
class StagedProof(TargetProof):
    directory: Path
    token: str
    boot: str
    """Boot of the machine that leads the run."""
    device: int
    """Its number for the target's file system."""

    @classmethod
    def begin(cls, staged: Path) -> Self:
        token = secrets.token_hex(16)
        directory = staged / f"{PROOF_PREFIX}{token[:16]}"
        make_directory(directory)
        _write(directory / _NONCE, token)
        return cls(directory, token, boot_id(), examine(directory).device)

    def end(self) -> None:
        """Remove it: from now on no process begins to write.

        It gets another name first, so that no other answer comes. One that is under way may still
        get its name between the listing of the directory and its removal.
        """
        ended = self.directory.with_name(f"{self.directory.name}.ended")
        rename(self.directory, ended)
        for disturbed in range(_MOST_UNDER_WAY + 1):
            try:
                remove(ended)
            except OSError:
                if disturbed == _MOST_UNDER_WAY:
                    raise
            else:
                return

    def prove(self) -> str:
        """Read what the leader wrote, and leave an answer; returns the answer's name."""
        self.require_current()
        answer = secrets.token_hex(8)
        path = self.directory / answer
        try:
            _write(path, answer)
        except OSError as error:
            message = f"cannot be written here ({error.strerror})"
            raise TargetError(message, path=self.directory.parent) from error
        return answer

    def accept(self, evidence: str) -> None:
        path = self.directory / evidence
        try:
            found = read_all(path, len(evidence))
        except OSError:
            found = b""
        if found != evidence.encode():
            message = "what was written there is not seen where the run"
            raise TargetError(f"{message} is led; {_OTHER}", path=self.directory.parent)

    def require_current(self) -> None:
        """Require that the run goes on, in the directory that is seen here.

        Call it after a file is opened: then that file is of this run. An open file is renamed or
        removed together with its run, so nothing that is written to it goes astray.
        """
        try:
            found = read_all(self.directory / _NONCE, len(self.token))
        except OSError:
            found = b""
        if found != self.token.encode():
            message = "is another directory here than where the run is led, or the run has ended;"
            raise TargetError(f"{message} {_OTHER}", path=self.directory.parent)

    def shares_cache(self) -> bool:
        here = boot_id(), examine(self.directory).device
        return bool(self.boot) and here == (self.boot, self.device)


def _write(path: Path, text: str) -> None:
    """Write a small file into a directory that exists: one that is gone is not made again."""
    write_durably(path, text.encode(), path.with_name(f"{path.name}.new"))
