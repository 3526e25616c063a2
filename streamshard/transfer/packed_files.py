"""Files of a target that are packed into one file: workers fill memory, and one appender writes.

Results are taken in the order of the jobs, and written one behind the other, to a file or to an
upload. So the order of the plan alone decides where a file lies, whatever sizes the files come to.
Two files per worker wait in memory at most, and one is being written. The one file is no store
before the zip's directory stands at its end; a run that is cut off starts from the beginning.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from streamshard.engine.jobs.executor import Job
from streamshard.engine.jobs.proofs import TargetProof
from streamshard.engine.run import resident_memory
from streamshard.engine.run.phases import Progress
from streamshard.engine.run.runner import StagedFiles
from streamshard.engine.run.source_check import Ranges
from streamshard.engine.run.span_writer import Resources, SpanWriter, TargetFiles
from streamshard.engine.run.window import WriteBuffer, unwritten_bytes
from streamshard.engine.run.work import SpanResult, TargetFile
from streamshard.errors import UsageError
from streamshard.formats.torch.zip_layout import directory_of
from streamshard.formats.zarr.packed_directory import PackedEntry
from streamshard.io.changes import open_sink
from streamshard.io.durability import Reservation
from streamshard.io.files import target_errors
from streamshard.io.sink import Sink
from streamshard.io.writable import aligned

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
