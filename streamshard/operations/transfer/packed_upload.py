"""A target that is one object: its parts are sent in their order, while workers fill those to come.

It exists from the moment when it is whole; a run that is cut off begins from the beginning. What is
to be read back first is uploaded below OUT.partial, and copied from there by the service.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from streamshard.engine.jobs.executor import Job
from streamshard.engine.jobs.proofs import TargetProof
from streamshard.engine.run.endings import FileEndings
from streamshard.engine.run.phases import Watcher
from streamshard.engine.run.runner import Jobs
from streamshard.engine.run.span_writer import (
    FilledSpan,
    Resources,
    SpanTask,
    SpanWriter,
    TargetFiles,
)
from streamshard.engine.run.work import TargetFile
from streamshard.errors import TargetExistsError
from streamshard.formats.deepspeed.dumps.dump_names import Template
from streamshard.io.changes import open_sink
from streamshard.io.files import target_errors
from streamshard.io.object_path import ObjectPath, object_of
from streamshard.io.objects.buckets import copy_object
from streamshard.io.objects.clients import together
from streamshard.io.objects.listings import head
from streamshard.io.objects.object_upload import remove_object, upload_requests
from streamshard.io.readable import Status
from streamshard.io.retry import StoppedError
from streamshard.io.sink import Sink
from streamshard.operations.transfer.packed_files import (
    LOOK_SECONDS,
    Packed,
    PackingJobs,
    require_threads,
)
from streamshard.operations.transfer.packed_target import require_packed_store
from streamshard.operations.transfer.staged_target import StagedTarget
from streamshard.operations.transfer.target import partial_of
from streamshard.operations.transfer.target_state import TargetKind, TargetState
from streamshard.operations.transfer.uploaded_target import abort_strays


@dataclass(frozen=True)
class PackedUploadState(TargetState):
    """What a run finds at the place of a target that is one object."""

    target: ObjectPath
    found: Status | None

    @classmethod
    def at(cls, target: ObjectPath, template: Template | None = None) -> Self:
        """Ask the service."""
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


class PackedUpload(Packed):
    """The one object, until it is complete.

    `nbytes`: its size at most.
    `must_be_new`: whether an object that is there already is an error.
    """

    def __init__(self, path: ObjectPath, nbytes: int, *, must_be_new: bool) -> None:
        super().__init__(path)
        self.path: Path = path.parent
        self._nbytes = nbytes
        self._must_be_new = must_be_new
        self._shared: _Shared | None = None

    def open(self, *, is_new: bool) -> "_InTurn":
        """Begin the object, or go on with it."""
        if self._shared is None:
            sink = open_sink(self.file, is_new=True, nbytes=self._nbytes, is_last=self._must_be_new)
            self._shared = _Shared(sink)
        return _InTurn(self._shared, threading.Event())

    def for_worker(self, sink: Sink, stop: threading.Event) -> Sink:
        if self._shared is None:
            raise TypeError("the object is not begun")
        return _InTurn(self._shared, stop)

    def jobs(self, resources: Resources, watcher: Watcher) -> Jobs:
        require_threads(self.file, "store in one object")
        return PackingJobs(self, _PlacedJobs(self, watcher), watcher)

    def begin_proof(self) -> TargetProof:
        raise NotImplementedError

    def finish(self) -> None:
        """Complete the object."""
        if self._shared is not None:
            self._shared.sink.finish(None)
            self.close()

    def close(self) -> None:
        """Give the upload up, unless it is complete."""
        if self._shared is not None:
            self._shared.sink.close()
            self._shared = None


@dataclass(slots=True)
class _Shared:
    """What all workers of a run write to."""

    sink: Sink
    at: int = 0
    """Byte offset up to which everything is written."""
    changed: threading.Condition = field(default_factory=threading.Condition)


class _InTurn(Sink):
    """What one worker writes to: it waits until all that lies before is written."""

    only_grows = True

    def __init__(self, shared: _Shared, stop: threading.Event) -> None:
        self._shared = shared
        self._stop = stop

    def write(self, view: memoryview, offset: int) -> None:
        shared = self._shared
        with shared.changed:
            while shared.at != offset:
                if self._stop.is_set():
                    raise StoppedError
                shared.changed.wait(LOOK_SECONDS)
            shared.sink.write(view, offset)
            shared.at += len(view)
            shared.changed.notify_all()

    def read_into(self, view: memoryview, offset: int) -> int:
        raise NotImplementedError


class _PlacedJobs(Jobs):
    """The jobs of the one file, where each of its spans is known before it is written."""

    def __init__(self, staged: PackedUpload, watcher: Watcher) -> None:
        self._staged = staged
        self._watcher = watcher
        self._file: TargetFile | None = None
        self._left = 0

    def all(self, files: Iterable[TargetFiles]) -> Iterator[Job[SpanWriter, FilledSpan] | None]:
        for some in files:
            for self._file in some.singly():
                self._endings = FileEndings(self._file)
                self._left = len(self._file.spans)
                with target_errors(self._staged.file):
                    sink = self._staged.open(is_new=True)
                for span in self._file.spans:
                    task = SpanTask(self._staged.file, span, is_new=False, known=None)
                    yield partial(_write, task, partial(self._staged.for_worker, sink))

    def take(self, number: int, done: FilledSpan) -> None:
        """Take note of a span; after the last one, write what comes behind all."""
        if self._file is None:
            raise TypeError("a span of no file")
        self._file.take(done.result)
        self._endings.add(done.result)
        self._left -= 1
        if not self._left:
            with target_errors(self._staged.file):
                sink = self._staged.open(is_new=False)
                for offset, data in self._endings.all():
                    sink.write(memoryview(data), offset)
                    self._watcher.advance(len(data))


def _write(
    task: SpanTask, sink_for: Callable[[threading.Event], Sink], writer: SpanWriter
) -> FilledSpan:
    return writer.write(task, sink_for(writer.stop))


class PackedUploadTarget(StagedTarget):
    """A target that is one object, while it is being written."""

    _target: ObjectPath
    partial: PackedUpload
    is_written = False
    kept_bytes = 0

    def __init__(self, *planned: Any, **options: Any) -> None:  # noqa: ANN401
        super().__init__(*planned, **options)
        self._elsewhere = object_of(partial_of(self._target) / self._target.name)
        """Where the object is uploaded first, if it is to be read back."""
        self.path = self._elsewhere.parent if self._verify else self._target.parent

    def _begin(self, stack: ExitStack) -> None:
        with target_errors(self._target):
            self._lock.take()
            stack.callback(self._lock.release)
            self._state = PackedUploadState.at(self._target)
            self._state.require_free(overwrite=self._overwrite)
            if upload_requests(self._nbytes) > 1:
                self.notes = abort_strays(self._target, self._elsewhere)
            written = self._elsewhere if self._verify else self._target
            must_be_new = not (self._overwrite or self._verify)
            self.partial = PackedUpload(written, self._nbytes, must_be_new=must_be_new)
            stack.callback(self.partial.close)

    def complete(self) -> Path:
        with target_errors(self._target):
            self.partial.finish()
        return self.path

    def commit(self, require: Callable[[], None], latest: str | None = None) -> None:
        with target_errors(self._target):
            together(require, self._require_same)
            if self._verify:
                copy_object(self._elsewhere, self._target)
                remove_object(self._elsewhere)
            else:
                self.partial.finish()

    def _require_same(self) -> None:
        """Refuse to replace an object that came meanwhile."""
        now, before = head(self._target), self._state.found
        if (now and now.version) != (before and before.version):
            message = f"{self._target}: was written by someone else meanwhile; move it away"
            raise TargetExistsError(f"{message}, and run the same command again")

    def _end(self, error: BaseException | None) -> None:
        # A run that was killed may have left one.
        if (error is not None or not self._verify) and head(self._elsewhere) is not None:
            remove_object(self._elsewhere)


KIND: Final = TargetKind(PackedUploadState, PackedUploadTarget)
