"""A target that is one file: it is written in `OUT.partial`, and moved from there to OUT.

At any moment the disk is in one of these states, and the same command finishes each of them:

- OUT does not exist, or is the old one; OUT.partial does not exist, or has a journal, and the
  beginning of the file: this is written again.
- OUT.partial has a journal that says that the file in it is complete: the file is moved to OUT.
- OUT.partial has that journal, and its file is at OUT: OUT.partial is removed.

Files of a target that are packed into one file: workers fill memory, and one appender writes.

Results are taken in the order of the jobs, and written one behind the other, to a file or to an
upload. So the order of the plan alone decides where a file lies, whatever sizes the files come to.
Two files per worker wait in memory at most, and one is being written. The one file is no store
before the zip's directory stands at its end.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

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
from streamshard.io.changes import open_sink, remove, remove_file, rename, sync_path
from streamshard.io.durability import Reservation
from streamshard.io.entries import examine_if_there, is_same_file, lexists
from streamshard.io.files import target_errors
from streamshard.io.place import place_of
from streamshard.io.sink import Sink
from streamshard.io.writable import aligned
from streamshard.model import Template
from streamshard.source.unfinished import JOURNAL
from streamshard.transfer.staging import PartialTarget
from streamshard.transfer.target import partial_of
from streamshard.transfer.target_state import DiskState, replaces

BUFFER_BYTES: Final = 1 << 21
"""Memory through which the one file is written: a huge page."""
_Filled = tuple[Sequence[SpanResult], Sequence[Sequence[bytes | memoryview]], bytearray | None]
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
        self._free: list[bytearray] = []
        """Memory for files."""
        self._nbytes = nbytes
        self._must_be_new = must_be_new
        self.reservation: Reservation | None = None
        """Preallocated space, which is given back before it is written to."""
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
        """Write files; behind the last one of all, the zip's directory."""
        files, (results, contents, buffer) = self._waiting.popleft(), done
        paths = [files.path] if isinstance(files, TargetFile) else files.paths
        # Workers count what they fill. The rest is what compression saved, and what is between.
        rest = files.nbytes - sum(result.written.nbytes for result in results)
        with target_errors(self.file):
            for path, result, content in zip(paths, results, contents, strict=True):
                rest += self.append(path, result.written.crc32, content)
            if isinstance(files, TargetFile) and files.is_last:
                directory = directory_of(self._central, self._end)
                self._buffer.put(memoryview(directory))
                self._buffer.flush()
                rest += len(directory)
        self._watcher.advance(rest)
        if isinstance(files, TargetFile):
            files.take(*results)
        else:
            files.take(results)
        if buffer is not None:
            self._free.append(buffer)

    def append(self, path: str, crc32: int, content: Sequence[bytes | memoryview]) -> int:
        """Add a file behind those before it; returns how many bytes are around its content."""
        entry = PackedEntry(path, self._end, sum(map(len, content)))
        header, descriptor = entry.header(), entry.descriptor(crc32)
        if self.reservation is not None:
            self.reservation.give_back(entry.end - entry.start)
        for piece in (header, *content, descriptor):
            self._buffer.put(memoryview(piece))
        self._central.append(entry.central(crc32))
        self._end = entry.end
        return len(header) + len(descriptor)

    def finish(self) -> None:
        if self._sink is not None:
            self._sink.finish(None)
            self.close()

    def close(self) -> None:
        """Close the one file; an object that is not complete is given up."""
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


def _fill(
    files: TargetFiles, target: Path, buffers: list[bytearray], writer: SpanWriter
) -> _Filled:
    with target_errors(target):
        if not isinstance(files, TargetFile):
            contents = list[list[bytes | memoryview]]()

            def keep(path: str, parts: Sequence[bytes | memoryview]) -> None:
                contents.append([bytes(part) for part in parts])

            return files.write(writer, keep), contents, None
        (span,) = files.spans
        data = bytearray()
        with suppress(IndexError):
            data = buffers.pop()
        if len(data) < span.nbytes:
            data = bytearray(span.nbytes)
        result = writer.window.write(span, _Memory(data))
        return [result], [[memoryview(data)[: result.written.nbytes]]], data


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
