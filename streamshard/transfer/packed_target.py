"""A target that is one file: it is written in `OUT.partial`, and moved from there to OUT.

At any moment the disk is in one of these states, and the same command finishes each of them:

- OUT does not exist, or is the old one; OUT.partial does not exist, or has a journal, and the
  beginning of the file: this is written again.
- OUT.partial has a journal that says that the file in it is complete: the file is moved to OUT.
- OUT.partial has that journal, and its file is at OUT: OUT.partial is removed.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from streamshard.engine.journals.journal import Journal
from streamshard.errors import SourceError, TargetExistsError
from streamshard.formats.zarr.store_index import is_store
from streamshard.io.changes import remove, remove_file, rename, sync_path
from streamshard.io.entries import examine_if_there, is_same_file, lexists
from streamshard.io.place import place_of
from streamshard.model import Template
from streamshard.source.unfinished import JOURNAL
from streamshard.transfer.packed_files import PackedFiles
from streamshard.transfer.staging import PartialTarget
from streamshard.transfer.target import partial_of
from streamshard.transfer.target_state import DiskState, replaces


@dataclass(frozen=True)
class PackedState(DiskState):
    @classmethod
    def at(cls, target: Path, template: Template | None = None) -> Self:
        is_there = examine_if_there(target, follows=False) is not None
        return cls(target, is_there, None, Journal(target / JOURNAL))

    @property
    def written(self) -> Path:
        """Where the file is until it is complete."""
        return partial_of(self.target) / self.target.name

    @property
    def is_in_place(self) -> bool:
        """Whether a run has moved the complete file to its place, and the rest is to be tidied."""
        if not self.begun.is_whole:
            return False
        if not lexists(self.written):
            return True
        return self.is_there and is_same_file(self.written, self.target)

    @property
    def is_settled(self) -> bool:
        return self.is_vacant or self.is_in_place

    def _require_free(self, *, overwrite: bool) -> None:
        if self.is_in_place:
            return
        if self.partial is not None and not self._is_of_a_run(self.partial):
            raise self._in_the_way(partial_of(self.target))
        if self.is_vacant:
            return
        if not overwrite and not replaces(self.begun.header):
            raise self._exists()
        require_packed_store(self.target)


def require_packed_store(target: Path) -> None:
    status = examine_if_there(target, follows=False)
    with suppress(SourceError):
        if status is not None and status.is_file and is_store(target):
            return
    message = f"{target}: is no store of ours in one file, so it is not replaced"
    raise TargetExistsError(f"{message}; remove it yourself")


class PackedTarget(PartialTarget):
    state = PackedState
    files: PackedFiles

    def _settled(self) -> DiskState:
        """Look at the target, after what an interrupted run left is tidied."""
        state = PackedState.at(self._target)
        self.is_done = False
        if state.is_in_place and state.begun.header is not None:
            is_other = self._identity.difference(state.begun.header) is not None
            self.is_done = state.is_there and not (is_other or self._overwrite)
            self._tidy(state.begun)
            return PackedState.at(self._target)
        return state

    def __init__(self, *planned: Any, **options: Any) -> None:  # noqa: ANN401
        super().__init__(*planned, **options)
        self.files = PackedFiles(self.path / self._target.name, self._nbytes)

    def _open_files(self) -> PackedFiles:
        super()._open_files()
        self.files.reservation = self._reservation
        return self.files

    def _end(self, error: BaseException | None) -> None:
        self.files.close()
        super()._end(error)

    def _swap_in(self) -> None:
        """Move the file to its place; where it may not replace another one, it never does."""
        written = self.path / self._target.name
        if replaces(self.journal.header):
            rename(written, self._target)
            return
        try:
            place_of(written).make_link(written, self._target)
        except FileExistsError:
            raise
        except OSError:  # there are no hard links here
            if lexists(self._target):
                raise PackedState.at(self._target)._exists() from None
            rename(written, self._target)

    def _tidy(self, done: Journal) -> None:
        """Remove what is next to the file; the journal in it says that the file is complete."""
        done.close()
        remove_file(self.path / self._target.name, missing_ok=True)
        remove(self.path)
        sync_path(self._target.parent)
