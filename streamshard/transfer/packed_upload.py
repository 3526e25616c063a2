"""A target that is one object: it exists from the moment when it is whole.

A run that is cut off starts from the beginning. What is to be read back first is uploaded below
OUT.partial, and copied from there by the service.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from streamshard.errors import TargetExistsError
from streamshard.io.files import target_errors
from streamshard.io.object_path import ObjectPath, object_of
from streamshard.io.objects.buckets import copy_object
from streamshard.io.objects.clients import together
from streamshard.io.objects.listings import head
from streamshard.io.objects.object_upload import remove_object, upload_requests
from streamshard.io.readable import Status
from streamshard.model import Template
from streamshard.transfer.packed_target import PackedFiles, require_packed_store
from streamshard.transfer.target import partial_of
from streamshard.transfer.target_state import TargetState
from streamshard.transfer.transaction import Transaction
from streamshard.transfer.uploaded_target import abort_strays


@dataclass(frozen=True)
class PackedUploadState(TargetState):
    target: ObjectPath
    found: Status | None

    @classmethod
    def at(cls, target: ObjectPath, template: Template | None = None) -> Self:
        return cls(target, head(target))

    @property
    def is_settled(self) -> bool:
        return self.found is None

    def _require_free(self, *, overwrite: bool) -> None:
        if self.found is None:
            return
        if not overwrite:
            raise self._exists()
        require_packed_store(self.target)


class PackedUploadTarget(Transaction):
    state = PackedUploadState
    _target: ObjectPath
    files: PackedFiles

    def __init__(self, *planned: Any, **options: Any) -> None:  # noqa: ANN401
        super().__init__(*planned, **options)
        self._elsewhere = object_of(partial_of(self._target) / self._target.name)
        """Where the object is uploaded first, if it is to be read back."""
        self.path = self._elsewhere.parent if self._verify else self._target.parent

    def _begin(self, stack: ExitStack) -> None:
        with target_errors(self._target):
            self._lock.take()
            stack.callback(self._lock.release)
            self._before = PackedUploadState.at(self._target)
            self._before.require_free(overwrite=self._overwrite)
            if upload_requests(self._nbytes) > 1:
                self.notes = abort_strays(self._target, self._elsewhere)
            written = self._elsewhere if self._verify else self._target
            must_be_new = not (self._overwrite or self._verify)
            self.files = PackedFiles(written, self._nbytes, must_be_new=must_be_new)
            stack.callback(self.files.close)
            stack.push(self._ended)

    def complete(self) -> Path:
        with target_errors(self._target):
            self.files.finish()
        return self.path

    def commit(self, require: Callable[[], None], latest: str | None = None) -> None:
        with target_errors(self._target):
            together(require, self._require_same)
            if self._verify:
                copy_object(self._elsewhere, self._target)
                remove_object(self._elsewhere)
            else:
                self.files.finish()

    def _require_same(self) -> None:
        now, before = head(self._target), self._before.found
        if (now and now.version) != (before and before.version):
            message = f"{self._target}: was written by someone else meanwhile; move it away"
            raise TargetExistsError(f"{message}, and run the same command again")

    def _end(self, error: BaseException | None) -> None:
        # A run that was killed may have left one.
        if (error is not None or not self._verify) and head(self._elsewhere) is not None:
            remove_object(self._elsewhere)
