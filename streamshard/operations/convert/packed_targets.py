"""Turns a checkpoint into a store in one file: a zip whose entries are the files of a store.

First come the documents, then the chunks, then the manifest and the root's document, at last the
zip's directory: what is cut off is no zip. Without a codec the place of each entry is known before
anything is written.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Final

import numpy as np

from streamshard.checksums import crc32
from streamshard.engine.journals.journal import Written
from streamshard.engine.run.work import (
    Ending,
    Fixed,
    LazySpans,
    Region,
    Span,
    SpanResult,
    TargetFile,
)
from streamshard.formats.torch.zip_layout import ALIGNMENT, directory_of
from streamshard.formats.zarr.array_paths import ROOT_DOCUMENT
from streamshard.formats.zarr.chunks import CHECKSUM_BYTES, serialize_checksum
from streamshard.formats.zarr.packed_layout import CRC32_IN_DESCRIPTOR, PackedEntry
from streamshard.formats.zarr.store_index import StoredChunk, stored_arrays
from streamshard.health import TensorHealth
from streamshard.io.entries import examine, open_readable
from streamshard.io.files import target_errors
from streamshard.io.object_path import as_path
from streamshard.layout.memory_plan import MemoryPlan
from streamshard.operations.convert.store_targets import StoreTargets, record_of
from streamshard.operations.source.source import Request, Source
from streamshard.operations.transfer import file_layout, read_back
from streamshard.operations.transfer.byte_accounting import ByteCounts
from streamshard.operations.transfer.file_layout import Divider, Elements, FileLayout, Layout
from streamshard.operations.transfer.report import Progress, Report
from streamshard.operations.transfer.target_writer import Pass

_MOST_ENTRIES: Final = 256
"""Most entries of the file that one worker gets at once."""
_PER_ENTRY: Final = 6
"""Header, content and the copies that fill it, more or less."""
_KNOWN_PER_PIECE: Final = 2
"""Entries of which what is known until the end takes the memory of one piece of a file."""


class PackedTargets(StoreTargets):
    """Fills the one file of a store from a source; compressed files are packed as they come."""

    name = ""
    """Of the file."""
    _last: dict[str, bytes] | None = None
    """The manifest's files, which may take a reading of the source, once they are made."""

    def _manifest(self) -> dict[str, bytes]:
        self._last = super()._manifest()
        return self._last

    def byte_counts(self) -> ByteCounts:
        counts = super().byte_counts()
        sizes = counts.sizes
        root = sizes.pop(ROOT_DOCUMENT)
        start = directory = 0
        for path, nbytes in chain(sizes.items(), [(ROOT_DOCUMENT, root)]):
            entry = PackedEntry(path, start, nbytes)
            start, directory = entry.end, directory + len(entry.central(0))
            if self.encode is not None:  # then it may lie elsewhere, and need more padding
                start += ALIGNMENT
        pieces = max(_MOST_ENTRIES * _PER_ENTRY, len(sizes) // _KNOWN_PER_PIECE)
        counts.add(FileLayout(self.name, [Fixed(b"")] * pieces), [])
        counts.sizes = {self.name: start + directory + len(directory_of([], 0))}
        return counts

    def passes(self) -> Sequence[Pass]:
        """Return two passes, of files one by one: they lie in their order."""
        return [self.content, self.manifest]

    def differences(self, place: Path, memory: MemoryPlan, progress: Progress) -> list[str]:
        return read_back.differences(Request(place / self.name), self._source, memory, progress)

    def is_packed_so(self, file: Path) -> bool:
        """Tell whether a file has just what belongs around the files that were compared."""
        last, start, central = self._last or {}, 0, list[bytes]()
        known = {path: (len(data), crc32(data)) for path, data in last.items()}
        documents = [path for path in self._documents() if path != ROOT_DOCUMENT]
        chunks = (chunk.path for _, chunk in self._chunks())
        with target_errors(file), open_readable(file) as found:
            for path in chain(documents, chunks, last, [ROOT_DOCUMENT]):
                record = self._records.get(path)
                whole = known[path] if record is None else (record.nbytes, int(record.crc32s[0]))
                entry = PackedEntry(path, start, whole[0])
                before, after = entry.header(), entry.descriptor(whole[1])
                if found.read_at(start, len(before)) != before:
                    return False
                if found.read_at(entry.end - len(after), len(after)) != after:
                    return False
                start = entry.end
                central.append(entry.central(whole[1]))
            rest = directory_of(central, start)
            return found.read_at(start, len(rest) + 1) == rest

    def finish(self, report: Report, overflowed: Mapping[str, int]) -> Report:
        target = as_path(report.target)
        with target_errors(target):
            return replace(report, bytes_written=examine(target).nbytes)


class PlacedTargets(PackedTargets):
    """Fills the one file of a store that is not compressed: the place of each entry is known."""

    def __init__(
        self,
        source: Source,
        chunk_shapes: Sequence[tuple[int, ...]],
        codec: str,
        measure: Callable[[], Mapping[str, TensorHealth]] | None = None,
    ) -> None:
        super().__init__(source, chunk_shapes, codec, measure)
        self._arrays = stored_arrays(source.checkpoint, chunk_shapes)
        self._first = np.cumsum([0, *(array.count for array in self._arrays)])
        """Number of the first chunk of each array; at the end the count of all."""
        self._documents_here: Sequence[tuple[str, bytes]] = ()
        """The documents and the training state, in the order of their entries."""
        self._starts = array("q")
        """Byte offset of each entry up to the manifest's, and of what follows them."""
        self._crc32s = array("I")
        """CRC-32 of each of these entries, once it is written."""
        self._sections: dict[int, tuple[int, int]] = {}
        """Byte offset of a section → the number of its first entry, and of the one after it."""

    def passes(self) -> Sequence[Pass]:
        """Return one pass: what depends on all entries comes at the end of the one file."""
        return [self._layouts]

    def _layouts(self) -> Iterator[Layout]:
        """Yield the layout of the one file: this itself, as it has too many pieces to be held."""
        documents = self._documents()
        self._records = {path: record_of(data) for path, data in documents.items()}
        self._root = documents.pop(ROOT_DOCUMENT)
        self._documents_here = list(documents.items())
        self._place()
        self._crc32s = array("I", bytes(4 * (len(self._starts) - 1)))
        for number, (path, _) in enumerate(self._documents_here):
            self._crc32s[number] = int(self._records[path].crc32s[0])
        yield self

    def divided(self, divider: Divider) -> TargetFile:
        """Return the one file as work: a span for each section, laid out when it is needed."""
        makers = [partial(self._span, divider, start) for start in self._sections]
        ending = Ending(self._starts[-1], b"", make=self._end)
        spans = LazySpans(makers, self._starts[-1])
        return TargetFile(self.name, spans, [ending], take=self._take_section)

    def _span(self, divider: Divider, start: int) -> Span:
        parts = list[Fixed | Region]()
        for piece in self._pieces(*self._sections[start]):
            parts += [piece] if isinstance(piece, Fixed) else divider.regions(piece)
        return Span(start, parts)

    def _place(self) -> None:
        """Place the entries, and divide them into sections."""
        self._starts, self._sections = array("q"), {}
        first = start = 0
        for number, (path, nbytes) in enumerate(self._entries()):
            entry = PackedEntry(path, start, nbytes)
            self._starts.append(start)
            start = entry.end
            begin = self._starts[first]
            if start - begin >= file_layout.SPAN_BYTES or number + 1 - first == _MOST_ENTRIES:
                self._sections[begin] = first, number + 1
                first = number + 1
        if first < len(self._starts):
            self._sections[self._starts[first]] = first, len(self._starts)
        self._starts.append(start)

    def _entries(self) -> Iterator[tuple[str, int]]:
        """Yield path and size of each entry up to the manifest's."""
        yield from ((path, len(data)) for path, data in self._documents_here)
        yield from ((chunk.path, chunk.nbytes + CHECKSUM_BYTES) for _, chunk in self._chunks())

    def _pieces(self, first: int, stop: int) -> list[Fixed | Elements]:
        """Lay out some of the entries: header, content, descriptor."""
        pieces = list[Fixed | Elements]()
        for number, (path, data) in enumerate(self._documents_here[first:stop], first):
            entry = PackedEntry(path, self._starts[number], len(data))
            pieces.append(Fixed(entry.whole(data, self._crc32s[number])))
        for number, tensor, chunk in self._chunks_of(first, stop):
            nbytes = chunk.nbytes + CHECKSUM_BYTES
            entry = PackedEntry(chunk.path, self._starts[number], nbytes)
            descriptor, elements = entry.descriptor(0), self._elements(tensor, chunk)
            if elements.trailer is None:
                raise TypeError("a chunk without its checksum")
            after = descriptor[: CRC32_IN_DESCRIPTOR.start], descriptor[CRC32_IN_DESCRIPTOR.stop :]
            trailer = replace(elements.trailer, after=after)
            pieces += [Fixed(entry.header()), replace(elements, trailer=trailer)]
        return pieces

    def _chunks_of(self, first: int, stop: int) -> Iterator[tuple[int, int, StoredChunk]]:
        """Yield number of the entry, tensor and chunk, for the chunks among some entries."""
        before = len(self._documents_here)
        number, end = max(first - before, 0), stop - before
        tensor = bisect_right(self._first, number) - 1
        while number < end:
            skipped = number - int(self._first[tensor])
            for chunk in islice(self._arrays[tensor].chunks(), skipped, skipped + end - number):
                yield number + before, tensor, chunk
                number += 1
            tensor += 1

    def _take_section(self, result: SpanResult) -> None:
        """Note the chunks of a section that is written."""
        chunks = self._chunks_of(*self._sections[result.offset])
        for (number, tensor, chunk), region in zip(chunks, result.regions, strict=True):
            checksum = serialize_checksum(region.content.crc32c)
            found = crc32(checksum, region.content.crc32)
            self._crc32s[number] = found
            self._note(tensor, chunk, region, Written(chunk.nbytes + len(checksum), found))

    def _end(self) -> bytes:
        """Serialize the manifest, the root's document and the zip's directory."""
        last = {**self._manifest(), ROOT_DOCUMENT: self._root}
        parts, central = list[bytes](), list[bytes]()
        for number, (path, nbytes) in enumerate(self._entries()):
            entry = PackedEntry(path, self._starts[number], nbytes)
            central.append(entry.central(self._crc32s[number]))
        start = self._starts[-1]
        for path, data in last.items():
            entry = PackedEntry(path, start, len(data))
            parts.append(entry.whole(data, crc32(data)))
            central.append(entry.central(crc32(data)))
            start = entry.end
        return b"".join([*parts, directory_of(central, start)])
