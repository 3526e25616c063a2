"""How far a target in a bucket is, and whether a run may write there."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamshard.engine.journals.upload_journal import UploadJournal
from streamshard.formats.deepspeed.dumps.dump_names import Template
from streamshard.io.entries import has_file, is_real_directory, list_ahead, listings_kept
from streamshard.io.object_path import ObjectPath, object_of
from streamshard.io.objects.clients import together
from streamshard.io.objects.listings import has_content, holds_objects
from streamshard.io.place import place_of
from streamshard.operations.source.directory_content import DirectoryContent
from streamshard.operations.source.unfinished import COMMITTED, JOURNAL
from streamshard.operations.transfer.target import partial_of
from streamshard.operations.transfer.target_state import TargetState, replaces

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
    """How far a target in a bucket is."""

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
    def at(cls, target: ObjectPath, template: Template | None = None) -> "UploadState":
        """Ask the service."""
        with listings_kept(anew=True):
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
        """Whether a run is uploading the target, or was cut off."""
        return not self.is_committed and self.journal.header is not None

    @property
    def is_settled(self) -> bool:
        """Whether nothing is there to compare: it is free, or a run is not done with it."""
        return not self.is_occupied or (self.journal.is_there and not self.is_committed)

    def _require_free(self, *, overwrite: bool) -> None:
        if self.is_unfinished or not self.is_occupied:
            return
        with listings_kept(anew=True):
            # All objects, as a service may list directories that are empty.
            list_ahead(self.target)
            self._require_replaceable(overwrite=overwrite)

    def _require_replaceable(self, *, overwrite: bool) -> None:
        target, begun, partial = self.target, self.begun, object_of(partial_of(self.target))
        if begun.header is None and holds_objects(partial):
            raise self._in_the_way(partial)
        # A run that was killed right after it had completed the target left its journal there.
        is_just_done = self.is_committed and self.journal.header is not None
        if not overwrite and not replaces(begun.header) and not is_just_done:
            raise self._exists()
        if not begun.is_whole:
            is_directory = is_real_directory(target)
            content = DirectoryContent.of(target, self.template) if is_directory else None
            self._require_ours(content)
