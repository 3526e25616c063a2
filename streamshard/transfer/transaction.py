"""How a target comes into being: begun or continued, written, and committed.

The order is the same everywhere. Where targets of a place differ in a step, see `staging.py` (a
directory on a disk), `uploaded_target.py` (a bucket), `packed_target.py` (a store in one file).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Self

from streamshard.engine.journals.journal import Journal
from streamshard.engine.run.runner import StagedFiles
from streamshard.errors import IntegrityError, Option
from streamshard.io.changes import lock_at, make_directory, sync_path
from streamshard.io.entries import exists
from streamshard.io.files import target_errors
from streamshard.io.retry import FROM_OUTSIDE, ignored
from streamshard.model import Template
from streamshard.transfer.run_identity import RunIdentity
from streamshard.transfer.target import LOCK
from streamshard.transfer.target_state import TargetState


class Transaction(ABC):
    """A target while it is being written; a context manager.

    `nbytes`: size of all its files.
    `sizes`: lists the files, relative to the target, with their sizes.
    `verify`: whether what is written is read back before the target exists.
    `template`: names of the dumps, if the target is a directory of dumps.
    """

    state: ClassVar[type[TargetState]]
    path: Path
    """Where its files are until it is complete."""
    files: StagedFiles
    is_done = False
    """Whether the target exists, and is what this run would make."""

    def __init__(
        self,
        target: Path,
        identity: RunIdentity,
        *,
        nbytes: int,
        sizes: Callable[[], Mapping[str, int]],
        verify: bool = False,
        template: Template | None = None,
    ) -> None:
        self.path = self._target = target.absolute()
        place = self._target.with_name(f"{LOCK}.{target.name}")
        self._lock = lock_at(place, self._target)
        self._identity = identity
        self._overwrite = identity.replaces
        self._nbytes = nbytes
        self._sizes = sizes
        self._verify = verify
        self._template = template
        self._new_parents: list[Path] = []
        """Parent directories that were made for the target, innermost first."""
        self._is_own = False
        """Whether the journal belongs to this run, or to the earlier run it continues."""
        self.notes: tuple[str, ...] = ()
        """What the user should know of what an earlier run left."""

    @property
    def is_written(self) -> bool:
        """Whether an earlier run wrote everything, so that at most committing is left to do."""
        return False

    @property
    def kept_bytes(self) -> int:
        return self._nbytes if self.is_written else self.files.kept_bytes

    def complete(self) -> Path:
        """Complete what is to be read back; returns the directory that it lies in."""
        return self.path

    @abstractmethod
    def commit(self, require: Callable[[], None], latest: str | None = None) -> None:
        """Make the target exist, with this tag in its `latest` file if one is given.

        `require`: what raises an error if the source has changed, before the target exists.
        """

    def __enter__(self) -> Self:
        with target_errors(self.path), ExitStack() as stack:
            self._begin(stack)
            self._held = stack.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._held.__exit__(None if error is None else type(error), error, None)

    def _make_parents(self) -> None:
        self._new_parents = [p for p in self._target.parents if not exists(p)]
        make_directory(self._target.parent, parents=True, exist_ok=True)

    def _sync_parents(self) -> None:
        for parent in (self._target.parent, *(new.parent for new in self._new_parents)):
            sync_path(parent)

    @abstractmethod
    def _begin(self, stack: ExitStack) -> None:
        """Take the lock, and look; what the stack is given is done at the end."""

    def _ended(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with ignored(FROM_OUTSIDE):
            self._end(error)

    @abstractmethod
    def _end(self, error: BaseException | None) -> None:
        """Keep what was finished if there is an error, but nothing that is wrong."""


class JournaledTransaction(Transaction):
    """A target of several files, which a journal lists; a later run continues from there."""

    journal: Journal

    @property
    def is_written(self) -> bool:
        return self.is_done or self.journal.is_whole

    def _prepare(self, state: TargetState) -> None:
        """Start from the beginning, or continue what an earlier run began."""
        if self.is_done:
            return
        header = self.journal.header
        state.require_free(overwrite=self._overwrite)
        is_new = self._overwrite or header is None
        if header is not None and not is_new:
            self._identity.require_same(header, self.path)
        self._is_own = True
        self._make_ready(state, is_new=is_new)
        if is_new:
            self.journal.begin(self._identity.header)
        else:
            self.journal.proceed()
        self.files = self._open_files()

    @abstractmethod
    def _make_ready(self, state: Any, *, is_new: bool) -> None:  # noqa: ANN401
        """Prepare the place; `is_new`: whether nothing is kept that an earlier run wrote."""

    @abstractmethod
    def _open_files(self) -> StagedFiles:
        """Return the files, of which those are kept that the journal lists."""

    def _end(self, error: BaseException | None) -> None:
        if self._is_own and error is not None:
            self.journal.close()
            if self.journal.is_empty or isinstance(error, IntegrityError):
                self._discard()
            else:
                how = f"without {Option('overwrite', True)}" if self._overwrite else "again"
                kept = f"keeps what was written; run the same command {how} to go on"
                error.add_note(f"{self.path}: {kept}")

    @abstractmethod
    def _discard(self) -> None:
        """Remove all that this run, or the one it continues, has written."""
