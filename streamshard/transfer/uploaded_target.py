"""A target in a bucket: where it is uploaded, locked, and kept for the next run if this one fails.

Nothing can be renamed there. At any moment the bucket is in one of these states, and the same
command finishes each of them:

- OUT has no objects, or a journal of those that are uploaded: the target does not exist yet.
- OUT has a commit record: the target exists. A journal next to it is removed.
- With `overwrite`, OUT.partial has what will replace OUT, and its journal says how much of it.
  If the journal says that everything is there, the objects of OUT are replaced, one by one, by
  copies that the service makes. Until the commit record is back, OUT has no `latest` and no root
  document, so that nothing is read from it by mistake; then OUT.partial is removed.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from streamshard.engine.journals.upload_journal import UploadJournal
from streamshard.engine.run.uploads import Uploads
from streamshard.errors import TargetExistsError
from streamshard.formats.deepspeed import names
from streamshard.io.changes import remove_file, write_new
from streamshard.io.entries import (
    entries_below,
    has_file,
    is_real_directory,
    list_ahead,
    listings_kept,
)
from streamshard.io.files import target_errors
from streamshard.io.lock import nothing
from streamshard.io.object_path import ObjectPath, object_of
from streamshard.io.objects.buckets import copy_object, for_each, moved, objects_below
from streamshard.io.objects.clients import together
from streamshard.io.objects.listings import has_content, holds_objects, is_no_marker
from streamshard.io.objects.object_upload import create, upload_requests
from streamshard.io.place import place_of
from streamshard.io.readable import Entry
from streamshard.model import Template
from streamshard.source.directory_content import DirectoryContent
from streamshard.source.unfinished import COMMITTED, JOURNAL
from streamshard.transfer.target import partial_of
from streamshard.transfer.target_state import TargetState, in_the_way, replaces
from streamshard.transfer.transaction import JournaledTransaction

_STRAYS: Final = (
    "{}: a run that was cut off may have left parts of an upload, which cost their storage until "
    "a rule of the bucket removes them (AbortIncompleteMultipartUpload); {}"
)


def abort_strays(target: ObjectPath, elsewhere: Path) -> tuple[str, ...]:
    """Abort what a killed run began to upload to either path; if that fails, say why."""
    why = place_of(target).abort_uploads(target, elsewhere)
    return (_STRAYS.format(target, why),) if why else ()


@dataclass(frozen=True, slots=True)
class UploadState(TargetState):
    target: ObjectPath
    template: Template | None
    is_committed: bool
    """Whether it exists: its commit record is there, and whatever else."""
    journal: UploadJournal
    """The journal among its objects."""
    begun: UploadJournal
    """The journal next to it, of a run that is to replace it."""
    is_occupied: bool
    """Whether there is any object at its path or below it."""

    @classmethod
    def at(cls, target: ObjectPath, template: Template | None = None) -> Self:
        with listings_kept(fresh=True):
            is_committed, journal, begun, has_object, is_occupied = together(
                lambda: has_file(target / COMMITTED),
                lambda: UploadJournal(target / JOURNAL),
                lambda: UploadJournal(partial_of(target) / JOURNAL),
                lambda: has_content(target),
                lambda: holds_objects(target),
            )
        found = has_object or is_occupied
        return cls(target, template, is_committed, journal, begun, found)

    @property
    def is_unfinished(self) -> bool:
        return not self.is_committed and self.journal.header is not None

    @property
    def is_settled(self) -> bool:
        return not self.is_occupied or (self.journal.is_there and not self.is_committed)

    def _require_free(self, *, overwrite: bool) -> None:
        if self.is_unfinished or not self.is_occupied:
            return
        with listings_kept(fresh=True):
            # All objects, as a service may list directories that are empty.
            list_ahead(self.target)
            self._require_replaceable(overwrite=overwrite)

    def _require_replaceable(self, *, overwrite: bool) -> None:
        target, begun, partial = self.target, self.begun, object_of(partial_of(self.target))
        if begun.header is None and holds_objects(partial):
            raise in_the_way(partial)
        # A run that was killed right after it had completed the target left its journal there.
        is_just_done = self.is_committed and self.journal.header is not None
        if not overwrite and not replaces(begun.header) and not is_just_done:
            raise self._exists()
        if not begun.is_whole:
            is_directory = is_real_directory(target)
            content = DirectoryContent.of(target, self.template) if is_directory else None
            self._require_ours(content)


_FORMAT: Final = 1
_LAST: Final = (names.LATEST, "zarr.json")
"""Objects that make a directory a checkpoint or a store."""


class UploadedTarget(JournaledTransaction):
    state = UploadState
    _target: ObjectPath
    journal: UploadJournal

    def _begin(self, stack: ExitStack) -> None:
        self._tidy: Callable[[], None] = nothing
        """Removes what is of no use once the target exists."""
        self._lock.take(self._look)
        stack.callback(self._release)
        stack.push(self._ended)
        self._prepare(self._settled())

    def _look(self) -> None:
        self._found = UploadState.at(self._target, self._template)

    def _settled(self) -> UploadState:
        """Find where the target is uploaded, and finish a commit that was cut off."""
        upload = self._found
        self.journal = upload.journal
        if upload.is_committed and self.journal.header is not None:
            is_same = self._identity.difference(self.journal.header) is None
            self.is_done = is_same and not self._overwrite
            self.journal.remove()
        if self.is_done or self.journal.header is not None:
            return upload
        if upload.begun.header is not None or (self._overwrite and upload.is_occupied):
            self.path, self.journal = partial_of(self._target), upload.begun
        return upload

    def _make_ready(self, state: UploadState, *, is_new: bool) -> None:
        if self.journal.header is None:
            return
        if is_new:
            self._discard()
        # Copies of the largest objects are made of parts too, below the target.
        strays = abort_strays(self._target, self.path)
        if any(upload_requests(nbytes) > 1 for nbytes in self._sizes().values()):
            self.notes = strays

    def _open_files(self) -> Uploads:
        self._forget_changed()
        return Uploads(self.path, self.journal)

    def _forget_changed(self) -> None:
        """Forget recorded objects that are gone, or are others now: they are uploaded again."""
        if not (self.journal.is_whole or self.journal.is_empty):
            versions = {name: entry.status().version for name, entry in self._objects()}
            for file in self.journal.finished():
                if versions.get(file.path) != file.version:
                    self.journal.forget(file.path)

    def _objects(self) -> Iterator[tuple[str, Entry]]:
        for entry in entries_below(self.path):
            name = entry.path.relative_to(self.path).as_posix()
            if not entry.is_directory and not name.startswith(JOURNAL):
                yield name, entry

    def _own(self) -> set[str]:
        return {*self._sizes(), *(file.path for file in self.journal.finished())}

    def _require_alone(self) -> None:
        own = self._own()
        others = (entry for name, entry in self._objects() if name not in own)
        strange = next((entry.path for entry in others if is_no_marker(entry)), None)
        if strange is not None:
            message = f"{strange}: came to {self.path} while that was written, from elsewhere; move"
            raise TargetExistsError(f"{message} it away, and run the same command again")

    def _release(self) -> None:
        with target_errors(self._target):
            self._lock.release(self._tidy)

    def commit(self, require: Callable[[], None], latest: str | None = None) -> None:
        if self.is_done:
            return
        with target_errors(self._target):
            if not self.journal.is_whole:
                together(require, self._require_alone)
                if latest is not None:
                    write_new(self.path / names.LATEST, latest.encode())
                if self.path != self._target:
                    self.journal.note_whole()
            self._lock.require_held()
            if self.path != self._target:
                self._replace()
            verb = str(self._identity.header["options"]["verb"])
            record = {"format": _FORMAT, "bytes": self._nbytes, "verb": verb}
            place = self._target.of_key(f"{self._target.key}/{COMMITTED}")
            create(place, json.dumps(record).encode() + b"\n")
            self._is_own = False  # the target exists: whatever fails now takes nothing back
            self._tidy = self.journal.remove if self.path == self._target else self._discard

    def _discard(self) -> None:
        """Remove all that was uploaded, so that what is left of it at any moment is known as such.

        First it no longer counts as whole. As long as anything is there, the journal's header is.
        Objects of others stay.
        """
        own = self._own()
        self.journal.take_back_whole()
        found = [entry.path for name, entry in self._objects() if name in own] if own else []
        for_each(found, remove_file)
        self.journal.remove()

    def _replace(self) -> None:
        """Replace the old target by copies of the new objects, and make those complete last."""
        new, target = object_of(self.path), self._target
        for name in (COMMITTED, *_LAST):
            remove_file(target / name)
        objects = [
            path for path in objects_below(new) if not _relative(path, new).startswith(JOURNAL)
        ]
        wanted = {_relative(path, new) for path in objects}
        old = [path for path in objects_below(target) if _relative(path, target) not in wanted]
        for_each(old, remove_file)
        first = [path for path in objects if _relative(path, new) not in _LAST]
        for_each(first, lambda path: copy_object(path, moved(path, new, target)))
        for path in objects:
            if _relative(path, new) in _LAST:
                copy_object(path, moved(path, new, target))


def _relative(path: ObjectPath, root: ObjectPath) -> str:
    return path.relative_to(root).as_posix()
