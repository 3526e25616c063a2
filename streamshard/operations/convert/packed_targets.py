"""Turns a checkpoint into a store in one file: a zip whose entries are the files of a store.

First come the documents, then the chunks, then the manifest and the root's document, at last the
zip's directory: what is cut off is no zip.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from streamshard.checksums import crc32
from streamshard.compare import read_back
from streamshard.engine.run.phases import Progress
from streamshard.engine.run.work import SpanResult, Written
from streamshard.formats.torch.zip_layout import ALIGNMENT, directory_of
from streamshard.formats.zarr.array_paths import ROOT_DOCUMENT
from streamshard.formats.zarr.packed_directory import PackedEntry
from streamshard.formats.zarr.store_index import StoredChunk
from streamshard.io.entries import examine, open_readable
from streamshard.io.files import target_errors
from streamshard.io.object_path import as_path
from streamshard.layout.memory_plan import MIB, MemoryPlan
from streamshard.operations.convert.store_targets import StoreTargets, together
from streamshard.source.source import Request
from streamshard.transfer.byte_accounting import ByteCounts
from streamshard.transfer.packed_target import BUFFER_BYTES
from streamshard.transfer.report import Report
from streamshard.transfer.target_writer import Pass

_TOGETHER_BYTES: Final = 2 * MIB
"""Of all small files that wait in memory as one."""
_ENTRY_BYTES: Final = 512
"""Memory for what is known of an entry until the end."""


class PackedTargets(StoreTargets):
    """Fills the one file of a store, which has a given name, from a source."""

    def __init__(self, name: str, *planned: Any) -> None:  # noqa: ANN401
        super().__init__(*planned)
        self._name = name
        self._chunks_written: dict[str, Written] = {}
        """Path of each chunk that was written so far."""
        self._last: Mapping[str, bytes] = {}
        """The manifest's files, which may take a reading of the source, once they are made."""

    def _take(self, tensor: int, chunk: StoredChunk, result: SpanResult) -> None:
        super()._take(tensor, chunk, result)
        self._chunks_written[chunk.path] = result.written

    def _manifest(self) -> dict[str, bytes]:
        self._last = found = super()._manifest()
        return found

    def byte_counts(self) -> ByteCounts:
        counts = super().byte_counts()
        sizes = counts.sizes
        sizes[ROOT_DOCUMENT] = sizes.pop(ROOT_DOCUMENT)  # it comes last
        start = directory = 0
        for path, nbytes in sizes.items():
            entry = PackedEntry(path, start, nbytes)
            start, directory = entry.end, directory + len(entry.central(0))
            if self.encode is not None:  # then it may lie elsewhere, and need more padding
                start += ALIGNMENT
        counts.waiting_bytes = max(*sizes.values(), min(_TOGETHER_BYTES, sum(sizes.values())))
        counts.shared_bytes = BUFFER_BYTES + len(sizes) * _ENTRY_BYTES
        counts.sizes = {self._name: start + directory + len(directory_of([], 0))}
        return counts

    def passes(self) -> Sequence[Pass]:
        small = partial(together, source=self._source, most_bytes=_TOGETHER_BYTES)
        return [lambda: small(self.content()), self.manifest]

    def differences(self, place: Path, memory: MemoryPlan, progress: Progress) -> list[str]:
        return read_back.differences(Request(place / self._name), self._source, memory, progress)

    def is_same_around(self, target: Path) -> bool:
        start, central, documents = 0, list[bytes](), self._documents()
        last = {**self._last, ROOT_DOCUMENT: documents.pop(ROOT_DOCUMENT)}
        files = {**_written(documents), **self._chunks_written, **_written(last)}
        with target_errors(target), open_readable(target) as found:
            for path, content in files.items():
                entry = PackedEntry(path, start, content.nbytes)
                before, after = entry.header(), entry.descriptor(content.crc32)
                if found.read_at(start, len(before)) != before:
                    return False
                if found.read_at(entry.end - len(after), len(after)) != after:
                    return False
                start = entry.end
                central.append(entry.central(content.crc32))
            rest = directory_of(central, start)
            return found.read_at(start, len(rest) + 1) == rest

    def finish(self, report: Report, overflowed: Mapping[str, int]) -> Report:
        target = as_path(report.target)
        with target_errors(target):
            return replace(report, bytes_written=examine(target).nbytes)


def _written(files: Mapping[str, bytes]) -> dict[str, Written]:
    return {path: Written(len(data), crc32(data)) for path, data in files.items()}
