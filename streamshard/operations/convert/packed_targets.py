"""Turns a checkpoint into a store in one file: a zip whose entries are the files of a store.

First come the documents, then the chunks, then the manifest and the root's document, at last the
zip's directory: what is cut off is no zip.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from streamshard.formats.torch.zip_layout import ALIGNMENT, directory_of
from streamshard.formats.zarr.array_paths import ROOT_DOCUMENT
from streamshard.formats.zarr.packed_directory import PackedEntry
from streamshard.io.entries import examine
from streamshard.io.files import target_errors
from streamshard.io.object_path import as_path
from streamshard.layout.memory_plan import MIB
from streamshard.operations.convert.store_targets import StoreTargets, together
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
        return [lambda: together(self.content(), self._source, _TOGETHER_BYTES), self.manifest]

    def finish(self, report: Report, overflowed: Mapping[str, int]) -> Report:
        target = as_path(report.target)
        with target_errors(target):
            return replace(report, bytes_written=examine(target).nbytes)
