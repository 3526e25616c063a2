"""A target that is one file, on a disk or in a bucket: workers fill memory, one writer appends.

Results are taken in the order of the jobs, and written one after the other. So the order of the
plan alone decides where a file lies, whatever sizes the files come to. Two files per worker wait in
memory at most, and one is being written. The one file is no store before the zip's directory stands
at its end.

On a disk it is written in OUT.partial, and renamed to OUT. An object exists once its upload is
complete; to be read back before that, it is uploaded below OUT.partial, and the service copies it.
A run that is killed starts over: the next one removes what it left.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

import numpy as np

from streamshard.engine.jobs.executor import Job
from streamshard.engine.jobs.proofs import TargetProof
from streamshard.engine.journals.journal import Journal
from streamshard.engine.run import resident_memory
from streamshard.engine.run.phases import Progress
from streamshard.engine.run.runner import StagedFiles
from streamshard.engine.run.source_check import Ranges
from streamshard.engine.run.span_writer import Resources, SpanWriter, TargetFiles
from streamshard.engine.run.window import WriteBuffer, unwritten_bytes
from streamshard.engine.run.work import SpanResult, TargetFile
from streamshard.errors import SourceError, TargetExistsError, UsageError
from streamshard.formats.torch.zip_layout import directory_of
from streamshard.formats.zarr.packed_directory import PackedEntry
from streamshard.formats.zarr.store_index import is_store
from streamshard.io.changes import discard, make_directory, open_sink, remove, remove_file, rename
from streamshard.io.durability import Reservation
from streamshard.io.entries import examine_if_there, lexists
from streamshard.io.files import target_errors
from streamshard.io.object_path import is_object, object_of
from streamshard.io.place import place_of
from streamshard.io.readable import Status
from streamshard.io.sink import Sink
from streamshard.io.writable import aligned
from streamshard.model import Template
from streamshard.source.unfinished import JOURNAL
from streamshard.transfer.staging import RESERVED
from streamshard.transfer.target import partial_of
from streamshard.transfer.target_state import TargetState, require_of_a_run
from streamshard.transfer.transaction import Transaction

BUFFER_BYTES: Final = 1 << 21
"""Memory through which the one file is written: a huge page."""
_Filled: TypeAlias = tuple[Sequence[SpanResult], Sequence[bytes | memoryview], bytearray | None]
"""The results and the contents of the files of a job, and the memory to be used again."""


class PackedFiles(StagedFiles):
    """The one file that files are packed into.

    `nbytes`: its size at most.
    `must_be_new`: whether an object that is there already is an error.
    """

    is_ordered = True

    def __init__(self, file: Path, nbytes: int, *, must_be_new: bool = False) -> None:
        self.file = file
        self.path: Path = file.parent
        self._nbytes = nbytes
        self._must_be_new = must_be_new
        self.reservation: Reservation | None = None
        """Preallocated space, which is given back before it is written to."""
        self._free: list[bytearray] = []
        """Memory for files."""
        self._sink: Sink | None = None
        self._central: list[bytes] = []
        """The entries of the zip's directory."""
        self._end = 0
        self._waiting: deque[TargetFiles] = deque()

    def begin(self, resources: Resources, watcher: Progress) -> None:
        super().begin(resources, watcher)
        with target_errors(self.file):
            self._sink = open_sink(self.file, nbytes=self._nbytes, is_last=self._must_be_new)
        self._buffer = WriteBuffer(
            aligned(BUFFER_BYTES),
            unwritten_bytes(resident_memory.available_bytes()),
            drops_behind=resources.drops_behind,
        )
        self._buffer.begin(self._sink, 0)

    def begin_proof(self) -> TargetProof:
        message = f"{self.file.name}: a store in one file is written by threads, not by a cluster"
        raise UsageError(f"{message}. Give a name that ends in .zarr")

    def jobs(self, files: Iterable[TargetFiles]) -> Iterator[Job[SpanWriter, _Filled]]:
        for some in files:
            self._waiting.append(some)
            yield partial(_fill, some, self.file, self._free)

    def take(self, number: int, done: _Filled, ranges: Ranges) -> None:
        """Write files; after the last one of all, the zip's directory."""
        files, (results, contents, memory) = self._waiting.popleft(), done
        paths = [files.path] if isinstance(files, TargetFile) else files.paths
        # Workers count what they fill. The rest is what compression saved, and what is between.
        remainder = files.nbytes - sum(result.written.nbytes for result in results)
        with target_errors(self.file):
            for path, result, content in zip(paths, results, contents, strict=True):
                remainder += self._append(path, result.written.crc32, content)
            if isinstance(files, TargetFile) and files.is_last:
                remainder += self._append_directory()
        self._watcher.advance(remainder)
        files.take(*results) if isinstance(files, TargetFile) else files.take(results)
        if memory is not None:
            self._free.append(memory)

    def _append(self, path: str, crc32: int, content: bytes | memoryview) -> int:
        """Add a file after those before it; returns how many bytes are around its content."""
        entry = PackedEntry(path, self._end, len(content))
        header, descriptor = entry.header(), entry.descriptor(crc32)
        if self.reservation is not None:
            self.reservation.give_back(entry.end - entry.start)
        for piece in (header, content, descriptor):
            self._buffer.put(memoryview(piece))
        self._central.append(entry.central(crc32))
        self._end = entry.end
        return len(header) + len(descriptor)

    def _append_directory(self) -> int:
        directory = directory_of(self._central, self._end)
        self._buffer.put(memoryview(directory))
        self._buffer.flush()
        return len(directory)

    def finish(self) -> None:
        if self._sink is not None:
            self._sink.finish(None)
            self.close()

    def close(self) -> None:
        """Close the one file; an object that is not complete is given up."""
        if self.reservation is not None:
            self.reservation.close()
        if self._sink is not None:
            self._sink.close()
            self._sink = None


class _Memory(Sink):
    """Takes the bytes of one file."""

    def __init__(self, data: bytearray) -> None:
        self._data = data

    def write(self, view: memoryview, offset: int) -> None:
        end = offset + len(view)
        self._data.extend(bytes(max(0, end - len(self._data))))
        # Other threads run while an array is copied.
        np.frombuffer(self._data, np.uint8)[offset:end] = np.frombuffer(view, np.uint8)


def _fill(files: TargetFiles, target: Path, free: list[bytearray], writer: SpanWriter) -> _Filled:
    with target_errors(target):
        if not isinstance(files, TargetFile):
            contents = list[bytes]()
            results = files.write(writer, lambda _, parts: contents.append(b"".join(parts)))
            return results, contents, None
        (span,) = files.spans
        memory = bytearray()
        with suppress(IndexError):
            memory = free.pop()
        if len(memory) < span.nbytes:
            memory = bytearray(span.nbytes)
        result = writer.window.write(span, _Memory(memory))
    return [result], [memoryview(memory)[: result.written.nbytes]], memory


@dataclass(frozen=True)
class PackedState(TargetState):
    target: Path
    status: Status | None

    @classmethod
    def at(cls, target: Path, template: Template | None = None) -> Self:
        return cls(target, examine_if_there(target, follows=False))

    @property
    def is_settled(self) -> bool:
        return self.status is None

    def _require_free(self, *, overwrite: bool) -> None:
        if not is_object(self.target):
            partial_target = partial_of(self.target)
            require_of_a_run(partial_target, Journal(partial_target / JOURNAL))
        if self.status is None:
            return
        if not overwrite:
            raise self._exists()
        with suppress(SourceError):
            if self.status.is_file and is_store(self.target):
                return
        message = f"{self.target}: is no store of ours in one file, so it is not replaced"
        raise TargetExistsError(f"{message}; remove it yourself")


class PackedTarget(Transaction):
    state = PackedState
    files: PackedFiles

    def __init__(self, *planned: Any, **options: Any) -> None:  # noqa: ANN401
        super().__init__(*planned, **options)
        self._is_far = is_object(self._target)
        self._staged = partial_of(self._target) / self._target.name
        self._is_staged = self._verify or not self._is_far
        self.path = self._staged if self._is_staged else self._target
        must_be_new = not (self._overwrite or self._is_staged)
        self.files = PackedFiles(self.path, self._nbytes, must_be_new=must_be_new)

    def _begin(self, stack: ExitStack) -> None:
        if not self._is_far:
            self._make_parents()
        self._lock.take()
        stack.callback(self._lock.release)
        self._before = PackedState.at(self._target)
        self._before.require_free(overwrite=self._overwrite)
        stack.push(self._ended)
        if self._is_far:
            self._abort_strays()
        else:
            self._begin_partial(self._staged.parent)

    def _abort_strays(self) -> None:
        # Not at the top: for buckets.
        from streamshard.io.objects.object_upload import upload_requests
        from streamshard.transfer.uploaded_target import abort_strays

        if upload_requests(self._nbytes) > 1:
            self.notes = abort_strays(object_of(self._target), self._staged)

    def _begin_partial(self, directory: Path) -> None:
        """Make a directory whose journal tells that it is a run's, in place of an earlier one."""
        remove(directory)
        make_directory(directory)
        journal = Journal(directory / JOURNAL)
        journal.begin(self._identity.header)
        journal.close()
        self.files.reservation = Reservation(directory / RESERVED, self._nbytes)

    def complete(self) -> Path:
        with target_errors(self._target):
            self.files.finish()
        return self.path

    def commit(self, require: Callable[[], None], latest: str | None = None) -> None:
        require()
        with target_errors(self._target):
            now, before = PackedState.at(self._target).status, self._before.status
            if (now and now.version) != (before and before.version):
                message = f"{self._target}: was written by someone else meanwhile; move it away"
                raise TargetExistsError(f"{message}, and run the same command again")
            self.files.finish()
            if not self._is_far:
                rename(self._staged, self._target)
                self._sync_parents()
            elif self._is_staged:
                place_of(self._staged).make_link(self._staged, self._target)

    def _end(self, error: BaseException | None) -> None:
        """Remove what is next to the target, also what a run that was killed left."""
        self.files.close()
        if not self._is_far:
            discard(self._staged.parent)
        elif lexists(self._staged):
            remove_file(self._staged)
