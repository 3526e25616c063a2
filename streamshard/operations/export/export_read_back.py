"""Reads the files of an export back from disk, and compares them with the source."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from streamshard.engine.run.phases import COMPARING, VERIFYING
from streamshard.engine.scan.probe import Probe
from streamshard.errors import StreamshardError
from streamshard.formats import pretrained, safetensors_file
from streamshard.formats.dcp.dcp_items import ItemFrame
from streamshard.formats.dcp.dcp_metadata_writer import key_of
from streamshard.formats.safetensors_file import Described, Stored
from streamshard.formats.torch import torch_file
from streamshard.formats.torch.torch_tensor import tensor_of
from streamshard.io.entries import identify, read_all
from streamshard.io.files import target_errors
from streamshard.layout.cutting import CuttingBuilder
from streamshard.layout.memory_plan import MemoryPlan
from streamshard.layout.sample import EVERYTHING
from streamshard.model import BLOB, ITEMSIZE, Slot, SourceFile, Whole
from streamshard.operations.checks.problems import DAMAGED, Findings
from streamshard.operations.checks.scan import Result, ScanPiece, Unit, scan
from streamshard.operations.checks.torch_check import TorchFiles
from streamshard.operations.compare.comparison import compare
from streamshard.operations.compare.pairing import Pair, SideElements
from streamshard.operations.export.dcp_contents import TensorEntry
from streamshard.operations.export.dcp_files import DcpFiles
from streamshard.operations.export.model_sidecars import ModelSidecars
from streamshard.operations.export.universal_files import UniversalFiles
from streamshard.operations.export.weight_files import WeightFiles
from streamshard.operations.source.source import Source
from streamshard.operations.transfer.report import Progress

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
    read = _ReadBack(place, sidecars.source)
    with target_errors(place):
        found = [*_documents(files.documents(), place), *_companions(sidecars, read)]
        if isinstance(files, DcpFiles):
            found += _items(files, read)
        elif isinstance(files, UniversalFiles):
            found += _images(files, read)
        else:
            found += _weights(files, read)
        return found or read.compare(memory, progress)


class _ReadBack:
    """Collects the pairs that should be equal in the written files and in the source."""

    def __init__(self, place: Path, source: Source) -> None:
        self.place = place
        self._source = source
        self._tensors = source.checkpoint.tensors
        self._files: list[SourceFile] = []
        self._torch_files: list[SourceFile] = []
        self._slots: list[tuple[Slot, int]] = []
        """Pieces of the left side of each pair, and their length."""
        self._pairs: list[Pair] = []
        self.items: list[WrittenItem] = []
        """Items of a distributed checkpoint."""

    def add(self, path: Path, *, is_torch: bool = False) -> int:
        """Add a file, and return its size."""
        self._files.append(identify(path))
        if is_torch:
            self._torch_files.append(self._files[-1])
        return self._files[-1].nbytes

    def pair(self, name: str, offset: int, tensor: int, dtype: str) -> None:
        """Pair the data at an offset of the last added file with one of the source's tensors."""
        numel = self._tensors[tensor].numel
        self.pair_pieces(name, [(len(self._files) - 1, offset)], numel, tensor, dtype)

    def pair_pieces(
        self,
        name: str,
        pieces: Sequence[tuple[int, int]],
        piece_numel: int,
        tensor: int,
        dtype: str,
    ) -> None:
        """Pair pieces of equal length, each (file, byte offset), with one of the source's tensors.

        Parameters
        ----------
        piece_numel
            Elements in each piece; the last may have fewer.
        """
        numel = self._tensors[tensor].numel
        left = SideElements(len(self._pairs), dtype)
        right = SideElements(tensor, self._tensors[tensor].dtype)
        files, offsets = (np.array(column) for column in zip(*pieces, strict=True))
        self._slots.append((Slot(files, offsets, np.full_like(files, piece_numel)), piece_numel))
        self._pairs.append(Pair(name, left, right, numel, dtype, ITEMSIZE[dtype]))

    def compare(self, memory: MemoryPlan, progress: Progress) -> list[str]:
        """Read everything, and return the differences."""
        findings = Findings()
        checked = TorchFiles(self._torch_files, str, findings, EVERYTHING)
        if self._torch_files:
            progress.start(sum(file.nbytes for file in self._torch_files), VERIFYING)
        scan(checked.units(), self._torch_files, memory, progress.advance)
        if self.items:
            progress.start(sum(item.nbytes for item in self.items), VERIFYING)
            units = _item_units(self.items, self._files, findings)
            scan(units, self._files, memory, progress.advance)
        written = self._written()
        found = compare(written, self._source, self._pairs, memory, progress, phase=COMPARING)
        return [*(problem.message for problem in findings.problems), *found.wrong]

    def _written(self) -> Source:
        builder = CuttingBuilder([pair.itemsize for pair in self._pairs])
        for number, (slot, piece_numel) in enumerate(self._slots):
            builder.place(number, builder.slot(slot), piece_numel=piece_numel)
        files, cutting = tuple(self._files), builder.build()
        return replace(self._source, path=self.place, files=files, cutting=cutting, codec_bytes=0)


def _documents(documents: Mapping[str, bytes], place: Path) -> Iterator[str]:
    for name, data in documents.items():
        if read_all(place / name) != data:
            yield f"{name} is not what was written"


def _companions(sidecars: ModelSidecars, read: _ReadBack) -> Iterator[str]:
    for one in sidecars.found:
        if read.add(read.place / one.path) != sidecars.source.checkpoint.tensors[one.tensor].numel:
            yield f"{one.path} is not as long as what it is a copy of"
        read.pair(one.path, 0, one.tensor, "uint8")


def _weights(files: WeightFiles, read: _ReadBack) -> Iterator[str]:
    for name, weights in files.held.items():
        found = {one.tensor.name: one for one in _stored(read, name, files.form)}
        expected = {n: weight for weight in weights for n in files.names(weight)}
        if found.keys() != expected.keys():
            yield f"{name} does not hold the tensors that were written"
            continue
        for key, weight in expected.items():
            offset = found[weight.names[0]].offset
            if found[key] != Stored(Described(key, weight.dtype, weight.shape), offset):
                yield f"{name} has another dtype, shape or place for '{key}'"
        for weight in weights:
            offset = found[weight.names[0]].offset
            read.pair(weight.names[0], offset, weight.tensor, weight.dtype)


def _items(files: DcpFiles, read: _ReadBack) -> Iterator[str]:
    """Add the items to be checked, and pair those of each tensor with the source."""
    places: dict[int, list[tuple[int, int]]] = {}
    entries: dict[int, tuple[TensorEntry, int]] = {}
    for number, (name, items) in enumerate(files.held.items()):
        wanted = items[-1].offset + items[-1].nbytes
        if (nbytes := read.add(read.place / name)) != wanted:
            yield f"{name} has {nbytes:,} bytes, and {wanted:,} were written"
        for item in items:
            entry, frame = item.entry, files.frame(item)
            content = item.offset + len(frame.head)
            read.items.append(WrittenItem(number, item.offset, frame))
            if isinstance(entry, TensorEntry) and isinstance(entry.content, Whole):
                places.setdefault(id(entry), []).append((number, content))
                numel = frame.content_bytes // ITEMSIZE[entry.dtype]
                entries.setdefault(id(entry), (entry, numel))
    for key, (entry, numel) in entries.items():
        if numel and isinstance(entry.content, Whole):
            tensor, name = entry.content.tensor, key_of(entry.paths[0])
            is_raw = files.is_raw(entry.content)
            unit = ITEMSIZE[entry.dtype] if is_raw else 1
            dtype = "uint8" if is_raw else entry.dtype
            read.pair_pieces(name, places[key], numel * unit, tensor, dtype)


def _stored(read: _ReadBack, name: str, form: str) -> Iterable[Stored]:
    """Read the names and places of the tensors in a file of weights."""
    path = read.place / name
    read.add(path, is_torch=form == pretrained.TORCH)
    if form == pretrained.SAFETENSORS:
        return safetensors_file.read(path)
    root = torch_file.read(path, 0).root
    found = []
    for key, node in root.items() if isinstance(root, dict) else ():
        tensor = tensor_of(node)
        if tensor is not None:
            tensor.require_contiguous(f"{path}: {key}")
            found.append(Stored(Described(key, tensor.dtype, tensor.shape), tensor.offset))
    return found


def _images(files: UniversalFiles, read: _ReadBack) -> Iterator[str]:
    """Pair the storages that hold one whole tensor; other storages are checked by checksum only."""
    for name, pickled, whole in files.held():
        path = read.place / name
        read.add(path, is_torch=True)
        found = torch_file.read(path, 0)
        if torch_file.pickled(path, found) != pickled:
            yield f"{name} is not what was written"
            continue
        for key, tensor in whole.items():
            storage = found.storages[key]
            is_raw = files.tensor(tensor).state == BLOB  # bytes, whatever its storage says
            read.pair(name, storage.offset, tensor, "uint8" if is_raw else storage.dtype)


@dataclass(frozen=True, slots=True)
class WrittenItem:
    """An item, and its place."""

    file: int
    """Index of the file."""
    offset: int
    frame: ItemFrame
    """Its bytes before and after the elements of its tensor."""

    @property
    def nbytes(self) -> int:
        """Size of the whole item."""
        return self.frame.nbytes


def _item_units(
    items: Sequence[WrittenItem], files: Sequence[SourceFile], findings: Findings
) -> Iterator[Unit]:
    """Yield the items to read: each must be as it was written, checksums included."""
    for item in items:
        judge = partial(_judge, files[item.file].path, item, findings)
        yield Unit([ScanPiece(item.nbytes, partial(_is_whole, item))], judge)


def _is_whole(item: WrittenItem, probe: Probe) -> bool:
    frame, start = item.frame, item.offset + len(item.frame.head)
    stop, end = start + frame.content_bytes, item.offset + item.nbytes
    checksum = probe.crc32(item.file, start, stop).to_bytes(4, "little")
    return probe.read(item.file, item.offset, start) == frame.head and probe.read(
        item.file, stop, end
    ) == checksum.join(frame.tail)


def _judge(path: Path, item: WrittenItem, findings: Findings, results: Sequence[Result]) -> None:
    found = results[0]
    if isinstance(found, StreamshardError):
        findings.add_error(found, path)
    elif not found:
        message = f"{path}: the item of {item.nbytes:,} bytes at byte {item.offset:,} is damaged"
        findings.add(DAMAGED, path, message)
