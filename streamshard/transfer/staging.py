"""`OUT.partial`: where a target is built, locked, and kept for the next run if this one fails.

At any moment the disk is in one of these states, and the same command finishes each of them:

- OUT does not exist, is empty, or is the old one; OUT.partial does not exist, or has a journal of
  the parts that are written.
- OUT.partial has a journal that says it is complete: it is renamed to OUT, which may exist if it is
  empty.
- With `overwrite`, OUT.replaced exists, and OUT does not, or is empty because someone made it
  since: OUT.replaced is renamed back to OUT.
- OUT has that journal still in it: OUT.replaced is removed, then the journal.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

from streamshard.engine.journals.journal import PROOF_PREFIX, Journal
from streamshard.engine.run.runner import StagedFiles
from streamshard.engine.run.staged_files import Partial
from streamshard.formats.deepspeed import names
from streamshard.io.changes import (
    discard,
    make_directory,
    remove,
    remove_file,
    rename,
    sync_path,
    write_durably,
)
from streamshard.io.durability import Reservation
from streamshard.io.entries import files_below, lexists, paths_in
from streamshard.io.files import target_errors
from streamshard.io.place import place_of
from streamshard.io.retry import FROM_OUTSIDE, ignored
from streamshard.source.unfinished import JOURNAL
from streamshard.transfer.target import is_vacant, partial_of, replaced_of
from streamshard.transfer.target_state import DiskState, replaces
from streamshard.transfer.transaction import JournaledTransaction

RESERVED: Final = f"{names.OWN_PREFIX}.reserved"


class PartialTarget(JournaledTransaction):
    state = DiskState

    def __init__(self, *planned: Any, **options: Any) -> None:  # noqa: ANN401
        super().__init__(*planned, **options)
        self.path = partial_of(self._target)
        self._replaced = replaced_of(self._target)
        self._reservation: Reservation | None = None

    def _begin(self, stack: ExitStack) -> None:
        self._make_parents()
        self._lock.take()
        stack.callback(self._lock.release)
        state = self._settled()
        self.journal = state.begun
        stack.callback(self.journal.close)
        stack.push(self._ended)
        self._prepare(state)

    def _settled(self) -> DiskState:
        """Look at the target, after an interrupted renaming is finished or undone."""
        self.is_done = False
        state = DiskState.at(self._target, self._template)
        done = state.journal
        if done.is_whole and done.header is not None:
            self._tidy(done)
            self.is_done = self._identity.difference(done.header) is None and not self._overwrite
        elif replaces(state.begun.header) and state.has_replaced and state.is_vacant:
            rename(self._replaced, self._target)
        else:
            return state
        return DiskState.at(self._target, self._template)

    def _make_ready(self, state: DiskState, *, is_new: bool) -> None:
        if is_new:
            make_directory(self.path, exist_ok=True)
        self._become_like_empty(state)

    def _open_files(self) -> StagedFiles:
        if not self.journal.is_whole:
            self._remove_unknown()
            left = max(0, self._nbytes - place_of(self.path).allocated_bytes(self.path))
            self._reservation = Reservation(self.path / RESERVED, left)
        return Partial(self.path, self.journal, self._reservation)

    def _become_like_empty(self, state: DiskState) -> None:
        """Take over owner, mode and access list of the empty directory that will be replaced.

        This happens before anything is written. So the partial target is as private as that
        directory all the time, and its files get the group that a set-group-ID bit gives them.
        """
        if state.is_there and state.is_vacant:
            place_of(self.path).take_over_status(self._target, self.path)

    def _remove_unknown(self) -> None:
        """Remove files that the journal does not list: they are not known to be this run's."""
        for path in paths_in(self.path):
            if path.name.startswith(PROOF_PREFIX):
                remove(path)  # no process of a run that was killed begins to write any more
        for path in files_below(self.path):
            relative = path.relative_to(self.path).as_posix()
            if relative != JOURNAL and not self.journal.holds(relative):
                remove_file(path)

    def _end(self, error: BaseException | None) -> None:
        with ignored(FROM_OUTSIDE):
            self._finish_reservation()
        super()._end(error if lexists(self.path) else None)

    def _discard(self) -> None:
        discard(self.path)

    def _finish_reservation(self) -> None:
        if self._reservation is not None:
            self._reservation.close()
            self._reservation = None

    def commit(self, require: Callable[[], None], latest: str | None = None) -> None:
        require()
        if self.is_done:
            return
        with target_errors(self._target):
            if not self.journal.is_whole:
                self._finish_reservation()
                if latest is not None:
                    temporary = self.path / f"{names.OWN_PREFIX}.{names.LATEST}"
                    write_durably(self.path / names.LATEST, latest.encode(), temporary)
                sync_path(self.path)
                self.journal.note_whole()
            self._swap_in()
            self._sync_parents()
            self._tidy(self.journal)

    def _swap_in(self) -> None:
        """Rename the new directory to the target; if that fails, restore the old target."""
        # If someone has put something there meanwhile, the system refuses to rename.
        if is_vacant(self._target) or not replaces(self.journal.header):
            rename(self.path, self._target)
            return
        rename(self._target, self._replaced)
        try:
            rename(self.path, self._target)
        except BaseException:
            rename(self._replaced, self._target)
            raise

    def _tidy(self, done: Journal) -> None:
        """Remove the replaced target, then the journal that records the replacement."""
        if replaces(done.header) and lexists(self._replaced):
            remove(self._replaced)
            # Durably: without the journal, what is left of it would be in the way of later runs.
            sync_path(self._replaced.parent)
        remove_file(self._target / JOURNAL)
        sync_path(self._target)
