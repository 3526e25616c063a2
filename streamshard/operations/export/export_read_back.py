"""Reads the files of an export back from disk, and compares them with the source."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from streamshard.checks.problems import DAMAGED, Findings
from streamshard.checks.scan import Result, ScanPiece, Unit, scan
from streamshard.checks.torch_check import TorchFiles
from streamshard.compare.comparison import Pair, SideElements, compare
from streamshard.engine.run.phases import COMPARING, VERIFYING, Progress
from streamshard.engine.scan.probe import Probe
from streamshard.errors import CorruptFileError
from streamshard.formats import pretrained
from streamshard.formats.checkpoint import Reading
from streamshard.formats.dcp import dcp_reader
from streamshard.formats.dcp.dcp_writer import ItemFrame, key_of
from streamshard.formats.torch import torch_file
from streamshard.io.entries import identify, read_all
from streamshard.io.files import target_errors
from streamshard.layout.cutting import Cutting
from streamshard.layout.memory_plan import MemoryPlan
from streamshard.model import BLOB, ITEMSIZE, SourceFile, Whole
from streamshard.operations.export.dcp_contents import DcpFiles, frame_of
from streamshard.operations.export.model_sidecars import ModelSidecars
from streamshard.operations.export.universal_files import UniversalFiles
from streamshard.operations.export.weights import WeightFiles
from streamshard.registry import reader_of
from streamshard.source.source import Source

ExportFiles = WeightFiles | UniversalFiles | DcpFiles
"""The files of an export."""


def export_differences(
    place: Path,
    files: ExportFiles,
    sidecars: ModelSidecars,
    memory: MemoryPlan,
    progress: Progress,
) -> list[str]:
    """Read exported files back from disk, and describe how they differ from the source."""
    source, findings = sidecars.source, Findings()
    with target_errors(place):
        for name, data in files.documents().items():
            if read_all(place / name) != data:
                return [f"{name} is not what was written"]
        written, nbytes, units = _opened(place, files, source, findings)
        if nbytes:
            progress.start(nbytes, VERIFYING)
        scan(units, written.opened.files, memory, progress.advance)
        written.add_companions(sidecars)
        found = compare(written.opened, source, written.pairs, memory, progress, phase=COMPARING)
    return [*(problem.message for problem in findings.problems), *found.wrong]


class _Written:
    """Written files, and their tensors that should be equal to some of the source."""

    def __init__(self, place: Path, source: Source, reading: Reading) -> None:
        self.opened = Source.of(place, reader_of("weights"), reading)
        self.pairs: list[Pair] = []
        self._source = source

    def pair(self, name: str, row: int, tensor: int, dtype: str) -> None:
        """Pair a written tensor with one of the source's."""
        of_source = self._source.checkpoint.tensors[tensor]
        sides = SideElements(row, dtype), SideElements(tensor, of_source.dtype)
        self.pairs.append(Pair(name, *sides, of_source.numel, dtype, ITEMSIZE[dtype]))

    def add_companions(self, sidecars: ModelSidecars) -> None:
        """Pair copied files with what they are copies of."""
        first, place = len(self.opened.checkpoint.tensors), self.opened.path
        files = [identify(place / one.path) for one in sidecars.found]
        for row, (one, file) in enumerate(zip(sidecars.found, files, strict=True), start=first):
            if file.nbytes != self._source.checkpoint.tensors[one.tensor].numel:
                message = f"{one.path} is not as long as what it is a copy of"
                raise CorruptFileError(message)
            self.pair(one.path, row, one.tensor, "uint8")
        self.opened = self.opened.append_files([one.path for one in sidecars.found], files)


def _opened(
    place: Path, files: ExportFiles, source: Source, findings: Findings
) -> tuple[_Written, int, Iterable[Unit]]:
    """Open what was written; the units check so many bytes that have checksums."""
    if isinstance(files, DcpFiles):
        items = [
            WrittenItem(place / name, item.offset, frame_of(entry, item.shape))
            for name, items in files.held.items()
            for entry, item in items
        ]
        _require_lengths(items)
        written = _tensors(place, files, source)
        units = _item_units(items, written.opened.files, findings)
        return written, sum(item.nbytes for item in items), units
    if isinstance(files, UniversalFiles):
        written = _images(place, files, source)
    else:
        written = _weights(place, files, source)
        if files.form == pretrained.SAFETENSORS:
            return written, 0, ()
    files_found = written.opened.files
    units = TorchFiles(files_found, str, findings).units()
    return written, sum(file.nbytes for file in files_found), units


def _weights(place: Path, files: WeightFiles, source: Source) -> _Written:
    """Open the weights, and pair each with the source's."""
    reading = pretrained.read(place, files.form)
    tensors, cutting = reading.checkpoint.tensors, reading.cutting
    weights = [weight for held in files.held.values() for weight in held]
    rows = {tensor.name: row for row, tensor in enumerate(tensors)}
    expected = {name: weight for weight in weights for name in files.names(weight)}
    if rows.keys() != expected.keys():
        raise CorruptFileError(f"{place} does not hold the tensors that were written")
    for name, weight in expected.items():
        row, pieces = rows[name], cutting.first_piece[[rows[name], rows[weight.names[0]]]]
        places = zip(cutting.file[pieces].tolist(), cutting.offset[pieces].tolist(), strict=True)
        is_tied = len({*places}) == 1
        if (tensors[row].dtype, tensors[row].shape, is_tied) != (weight.dtype, weight.shape, True):
            raise CorruptFileError(f"{place} has another dtype, shape or place for '{name}'")
    written = _Written(place, source, reading)
    for weight in weights:
        written.pair(weight.names[0], rows[weight.names[0]], weight.tensor, weight.dtype)
    return written


def _images(place: Path, files: UniversalFiles, source: Source) -> _Written:
    """Pair the storages that hold one whole tensor; other storages are checked by checksum only."""
    rows: list[tuple[int, int, int, int]] = []
    names: list[tuple[str, int, str]] = []
    listed = list(files.held())
    for number, (name, pickled, whole) in enumerate(listed):
        found = torch_file.read(place / name, 0)
        if torch_file.pickled(place / name, found) != pickled:
            raise CorruptFileError(f"{name} is not what was written")
        for key, tensor in whole.items():
            storage = found.storages[key]
            dtype = files.tensor(tensor).dtype_in(storage.dtype)
            rows.append((number, storage.offset, files.tensor(tensor).numel, ITEMSIZE[dtype]))
            names.append((name, tensor, dtype))
    tensors = [replace(files.tensor(tensor), dtype=dtype) for _, tensor, dtype in names]
    checkpoint = replace(source.checkpoint, tensors=tuple(tensors))
    paths = [identify(place / name) for name, _, _ in listed]
    written = _Written(place, source, Reading(checkpoint, Cutting.of_files(rows), tuple(paths)))
    for row, each in enumerate(names):
        written.pair(each[0], row, *each[1:])
    return written


def _tensors(place: Path, files: DcpFiles, source: Source) -> _Written:
    """Open the distributed checkpoint, and pair its tensors with the source's."""
    entries = {
        key_of(entry.paths[0]): (entry, entry.content)
        for items in files.held.values()
        for entry, _ in items
        if isinstance(entry.content, Whole)
    }
    tensors = {key: files.tensor(content.tensor) for key, (_, content) in entries.items()}
    raw = {key for key, tensor in tensors.items() if tensor.state == BLOB}
    parts = [(place / path).parent for path in files.documents()]
    written = _Written(place, source, dcp_reader.read_keys(parts, raw))
    rows = {tensor.name: row for row, tensor in enumerate(written.opened.checkpoint.tensors)}
    for key, (entry, content) in entries.items():
        dtype = tensors[key].dtype_in(entry.dtype)
        written.pair(key, rows[key], content.tensor, dtype)
    return written


@dataclass(frozen=True, slots=True)
class WrittenItem:
    """An item, and its place."""

    path: Path
    offset: int
    frame: ItemFrame
    """Its bytes before and after the elements of its tensor."""

    @property
    def nbytes(self) -> int:
        """Size of the whole item."""
        return self.frame.nbytes


def _require_lengths(items: Sequence[WrittenItem]) -> None:
    """Refuse files that do not end where their last item does."""
    for path, end in {item.path: item.offset + item.nbytes for item in items}.items():
        if (nbytes := identify(path).nbytes) != end:
            raise CorruptFileError(f"{path.name} has {nbytes:,} bytes, and {end:,} were written")


def _item_units(
    items: Sequence[WrittenItem], files: Sequence[SourceFile], findings: Findings
) -> Iterator[Unit]:
    """Yield the items to read: each must be as it was written, checksums included."""
    numbers = {file.path: number for number, file in enumerate(files)}
    for item in items:
        read = partial(_is_whole, item, numbers[item.path])
        failed = partial(findings.add_error, place=item.path)
        yield Unit([ScanPiece(item.nbytes, read)], partial(_judge, item, findings), failed)


def _is_whole(item: WrittenItem, file: int, probe: Probe) -> bool:
    frame, start = item.frame, item.offset + len(item.frame.head)
    stop, end = start + frame.content_bytes, item.offset + item.nbytes
    checksum = probe.crc32(file, start, stop).to_bytes(4, "little")
    return probe.read(file, item.offset, start) == frame.head and probe.read(
        file, stop, end
    ) == checksum.join(frame.tail)


def _judge(item: WrittenItem, findings: Findings, results: Sequence[Result]) -> None:
    if not results[0]:
        message = f"the item of {item.nbytes:,} bytes at byte {item.offset:,} is damaged"
        findings.add(DAMAGED, item.path, f"{item.path}: {message}")
