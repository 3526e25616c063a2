"""The ways in which a target comes into being: by a rename, or by a commit record."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from streamshard.engine.run.runner import StagedFiles
from streamshard.errors import Option
from streamshard.io.changes import lock_at
from streamshard.io.files import target_errors
from streamshard.io.lock import AnyLock
from streamshard.io.retry import FROM_OUTSIDE, ignored
from streamshard.model import Template
from streamshard.operations.transfer.run_identity import RunIdentity
from streamshard.operations.transfer.target import LOCK
from streamshard.operations.transfer.target_state import TargetKind


class StagedTarget(ABC):
    """A target while it is being written; a context manager.

    `nbytes`: size of all its files.
    `sizes`: lists the files, relative to the target, with their sizes.
    `verify`: whether what is written is read back before the target exists.
    `template`: names of the dumps, if the target is a directory of dumps.
    """

    path: Path
    """Where its files are until it is complete."""
    partial: StagedFiles
    """Its files."""
    journal: Any
    """What is written of them; a `Journal` or an `UploadJournal`."""
    is_done = False
    """Whether the target exists, and is what this run would make."""

    def __init__(
        self,
        target: Path,
        lock: AnyLock,
        identity: RunIdentity,
        *,
        nbytes: int,
        sizes: Callable[[], Mapping[str, int]],
        verify: bool = False,
        template: Template | None = None,
    ) -> None:
        self.path = self._target = target.absolute()
        self._lock = lock
        self._identity = identity
        self._overwrite = identity.replaces
        self._nbytes = nbytes
        self._sizes = sizes
        self._verify = verify
        self._template = template
        self._is_own = False
        """Whether the journal belongs to this run, or to the earlier run it continues."""
        self.notes: tuple[str, ...] = ()
        """What the user should know of what an earlier run left."""

    @property
    def is_written(self) -> bool:
        """Whether an earlier run wrote everything, so that at most committing is left to do."""
        return self.is_done or self.journal.is_whole

    @property
    def kept_bytes(self) -> int:
        """Bytes that an earlier run wrote."""
        return self._nbytes if self.is_written else self.partial.kept_bytes

    def complete(self) -> Path:
        """Complete what is to be read back; returns the directory that it lies in."""
        return self.path

    @abstractmethod
    def commit(self, require: Callable[[], None], latest: str | None = None) -> None:
        """Make the target exist, with this tag in its `latest` file if one is given.

        `require`: what raises an error if the source has changed, before the target exists.
        """

    def __enter__(self) -> Self:
        """Take the lock, and find what an earlier run wrote."""
        with target_errors(self.path), ExitStack() as stack:
            self._begin(stack)
            self._held = stack.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Keep what was written if there is an error, and release the lock."""
        with ignored(FROM_OUTSIDE):
            self._end(error)
        self._held.close()

    @abstractmethod
    def _begin(self, stack: ExitStack) -> None:
        """See `__enter__`; what the stack is given is done at the end."""

    @abstractmethod
    def _end(self, error: BaseException | None) -> None:
        """See `__exit__`."""

    def _keep(self, error: BaseException, what: str) -> None:
        """Say how to go on with what was written."""
        how = f"without {Option('overwrite', True)}" if self._overwrite else "again"
        error.add_note(f"{self.path}: keeps what was {what}; run the same command {how} to go on")


def staged(
    target: Path,
    identity: RunIdentity,
    *,
    nbytes: int,
    sizes: Callable[[], Mapping[str, int]],
    verify: bool,
    template: Template | None = None,
) -> StagedTarget:
    """Return a target to be written."""
    place = target.absolute().with_name(f"{LOCK}.{target.name}")
    lock = lock_at(place, target.absolute())
    made: StagedTarget = TargetKind.of(target).staged(
        target, lock, identity, nbytes=nbytes, sizes=sizes, verify=verify, template=template
    )
    return made
