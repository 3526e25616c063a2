"""How far a target in a bucket is, and whether a run may write there."""

from dataclasses import dataclass
from typing import Final

from streamshard.engine.journals.upload_journal import UploadJournal
from streamshard.errors import Option, TargetExistsError
from streamshard.formats.deepspeed.dumps.dump_names import Template
from streamshard.io.entries import has_file, list_ahead, listings_kept
from streamshard.io.object_path import ObjectPath, object_of
from streamshard.io.objects.clients import together
from streamshard.io.objects.listings import has_content, holds_objects
from streamshard.operations.source.unfinished import COMMITTED, JOURNAL
from streamshard.operations.transfer.target import is_ours, partial_of, replaces

_OVERWRITE: Final = Option("overwrite", True)


def require_free_objects(target: ObjectPath, *, overwrite: bool, template: Template | None) -> None:
    """Refuse objects below a path that are not to be replaced; see `require_free`."""
    with listings_kept(anew=True):
        upload = UploadState.of(target)
        if upload.is_unfinished or not upload.is_occupied:
            return
        # All objects, as a service may list directories that are empty.
        list_ahead(target)
        _require_replaceable(upload, overwrite=overwrite, template=template)


def _require_replaceable(
    upload: "UploadState", *, overwrite: bool, template: Template | None
) -> None:
    target, begun = upload.target, upload.begun
    partial = object_of(partial_of(target))
    if begun.header is None and holds_objects(partial):
        message = f"{partial}: is in the way, and was not left by a run that was cut off"
        raise TargetExistsError(f"{message}; move it, or choose another target")
    # A run that was killed right after it had completed the target left its journal there.
    is_just_done = upload.is_committed and upload.journal.header is not None
    if not overwrite and not replaces(begun.header) and not is_just_done:
        raise TargetExistsError(f"{target}: exists; use {_OVERWRITE} to replace it")
    if not is_ours(target, template) and not begun.is_whole:
        message = f"{target}: holds more than one checkpoint or store of ours, so {_OVERWRITE} will"
        raise TargetExistsError(f"{message} not replace it; remove it yourself")


@dataclass(frozen=True, slots=True)
class UploadState:
    """How far a target in a bucket is."""

    target: ObjectPath
    is_committed: bool
    """Whether it exists: its commit record is there, and whatever else."""
    journal: UploadJournal
    """The journal among its objects."""
    begun: UploadJournal
    """The journal next to it, of a run that is to replace it."""
    is_occupied: bool
    """Whether there is any object at its path or below it."""

    @classmethod
    def of(cls, target: ObjectPath) -> "UploadState":
        """Ask the service."""
        is_committed, journal, begun, has_object, is_occupied = together(
            lambda: has_file(target / COMMITTED),
            lambda: UploadJournal(target / JOURNAL),
            lambda: UploadJournal(partial_of(target) / JOURNAL),
            lambda: has_content(target),
            lambda: holds_objects(target),
        )
        return cls(target, is_committed, journal, begun, has_object or is_occupied)

    @property
    def is_unfinished(self) -> bool:
        """Whether a run is uploading the target, or was cut off."""
        return not self.is_committed and self.journal.header is not None
