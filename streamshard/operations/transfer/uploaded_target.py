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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Self

from streamshard.engine.run.uploads import Uploads
from streamshard.errors import NotAsWrittenError, Option, TargetExistsError
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.dumps.dump_names import Template
from streamshard.io.changes import remove_file, write_new
from streamshard.io.entries import entries_below
from streamshard.io.files import target_errors
from streamshard.io.lock import AnyLock, nothing
from streamshard.io.object_path import ObjectPath, object_of
from streamshard.io.objects.buckets import copy_object, for_each, moved, objects_below
from streamshard.io.objects.clients import together
from streamshard.io.objects.listings import is_no_marker
from streamshard.io.objects.object_upload import create, upload_requests
from streamshard.io.readable import Entry
from streamshard.io.retry import FROM_OUTSIDE, ignored
from streamshard.operations.source.unfinished import COMMITTED, JOURNAL
from streamshard.operations.transfer.run_identity import RunIdentity
from streamshard.operations.transfer.target import partial_of
from streamshard.operations.transfer.target_state import TargetKind
from streamshard.operations.transfer.upload_state import UploadState, abort_strays

_FORMAT: Final = 1
_LAST: Final = (names.LATEST, "zarr.json")
"""Objects that make a directory a checkpoint or a store."""


class UploadedTarget:
    """A target while it is being uploaded; see `PartialTarget`."""

    def __init__(
        self,
        target: ObjectPath,
        lock: AnyLock,
        identity: RunIdentity,
        *,
        nbytes: int,
        sizes: Callable[[], Mapping[str, int]],
        verify: bool = False,
        template: Template | None = None,
    ) -> None:
        self._target = target
        self._sizes = sizes
        self._identity = identity
        self._nbytes = nbytes
        self._overwrite = identity.replaces
        self._template = template
        self._lock = lock
        self._is_own = False
        """Whether the journal belongs to this run, or to the earlier run it continues."""
        self.is_done = False
        """Whether the target exists, and is what this run would make."""
        self._tidy: Callable[[], None] = nothing
        """Removes what is of no use once the target exists."""
        self.notes: tuple[str, ...] = ()
        """What the user should know of what an earlier run left."""

    def __enter__(self) -> Self:
        with target_errors(self._target), ExitStack() as stack:
            self._lock.take(self._look)
            stack.callback(self._release)
            self._prepare(self._settled())
            self._held = stack.pop_all()
        return self

    def _look(self) -> None:
        self._found = UploadState.at(self._target, self._template)

    def _settled(self) -> UploadState:
        """Find where the target is uploaded, and finish a commit that was cut off."""
        upload = self._found
        self.path: Path = self._target
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

    def _prepare(self, upload: UploadState) -> None:
        """Start from the beginning, or continue an earlier run."""
        if self.is_done:
            return
        header = self.journal.header
        upload.require_free(overwrite=self._overwrite)
        if self._overwrite or header is None:
            if header is not None:
                self._clear()
                self._abort()
            self.journal.begin(self._identity.header)
        else:
            self._identity.require_same(header, self.path)
            self._abort()
            self._forget_changed()
        self._is_own = True
        self.partial = Uploads(self.path, self.journal)

    def _abort(self) -> None:
        """Abort uploads in parts of the earlier run, or say that some may be left."""
        # Copies of the largest objects are made of parts too, below the target.
        strays = abort_strays(self._target, self.path)
        if any(upload_requests(nbytes) > 1 for nbytes in self._sizes().values()):
            self.notes = strays

    def _forget_changed(self) -> None:
        """Forget recorded objects that are gone, or are others now: they are uploaded again."""
        if not self.journal.is_whole:
            found = {name: entry.status().version for name, entry in self._objects()}
            known = ((name, self.journal.version_of(name)) for name in self.journal.paths())
            self.journal.keep_only({name for name, version in known if found.get(name) == version})

    def _objects(self) -> Iterator[tuple[str, Entry]]:
        """Yield the relative paths and the entries of all objects but the journal's."""
        for entry in entries_below(self.path):
            name = entry.path.relative_to(self.path).as_posix()
            if not entry.is_directory and not name.startswith(JOURNAL):
                yield name, entry

    def _own(self) -> set[str]:
        """Return the relative paths of all objects that this run, or the one it continues, made."""
        return {*self._sizes(), *self.journal.paths()}

    def _require_alone(self) -> None:
        """Refuse to complete a target in which there are objects of others."""
        own = self._own()
        others = (entry for name, entry in self._objects() if name not in own)
        strange = next((entry.path for entry in others if is_no_marker(entry)), None)
        if strange is not None:
            message = f"{strange}: came to {self.path} while that was written, from elsewhere; move"
            raise TargetExistsError(f"{message} it away, and run the same command again")

    @property
    def is_written(self) -> bool:
        """Whether an earlier run uploaded everything."""
        return self.is_done or self.journal.is_whole

    @property
    def kept_bytes(self) -> int:
        """Bytes that an earlier run uploaded."""
        return self._nbytes if self.is_written else self.partial.kept_bytes

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with ignored(FROM_OUTSIDE):
            if isinstance(error, NotAsWrittenError):
                self._clear()
            elif self._is_own and error is not None:
                self._keep(error)
        self._held.close()

    def _release(self) -> None:
        with target_errors(self._target):
            self._lock.release(self._tidy)

    def _keep(self, error: BaseException) -> None:
        self.journal.close()
        if self.journal.is_empty:
            self._clear()
            return
        how = f"without {Option('overwrite', True)}" if self._overwrite else "again"
        error.add_note(f"{self.path}: keeps what was uploaded; run the same command {how} to go on")

    def complete(self) -> Path:
        """Return where the files lie, all of which are complete."""
        return self.path

    def commit(self, require: Callable[[], None], latest: str | None = None) -> None:
        """Upload `latest` and the commit record, which make the target exist.

        `latest`: tag for the `latest` file, which is written after everything else.
        """
        if self.is_done:
            return
        with target_errors(self._target):
            if not self.journal.is_whole:
                together(require, self._require_alone)
                if latest is not None:
                    write_new(self.path / names.LATEST, latest.encode())
                if self.path != self._target:
                    self.journal.note_whole()
            if self.path != self._target:
                self._replace()
            record = {"format": _FORMAT, "bytes": self._nbytes, "verb": self._verb}
            create(self._target.of_key(f"{self._target.key}/{COMMITTED}"), _serialize(record))
            self._is_own = False  # the target exists: whatever fails now takes nothing back
            self._tidy = self.journal.remove if self.path == self._target else self._clear

    def _clear(self) -> None:
        """Remove all that was uploaded, so that what is left of it at any moment is known as such.

        First it no longer counts as whole. As long as anything is there, the journal's header is.
        Objects of others stay.
        """
        own = self._own()
        self.journal.take_back_whole()
        found = [entry.path for name, entry in self._objects() if name in own] if own else []
        for_each(found, remove_file)
        self.journal.remove()

    @property
    def _verb(self) -> str:
        return str(self._identity.header["options"]["verb"])

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


def _serialize(record: dict[str, object]) -> bytes:
    return json.dumps(record).encode() + b"\n"


KIND: Final = TargetKind(UploadState, UploadedTarget)
