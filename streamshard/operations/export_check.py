"""Reads back exported weights, and compares them with the source that they were made from."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from streamshard.engine.cache import drop_cached
from streamshard.engine.files import Decoder, target_errors
from streamshard.errors import IntegrityError, SourceError
from streamshard.formats import pretrained, safetensors_file, torch_file
from streamshard.formats.safetensors_file import Described, Stored
from streamshard.formats.torch_tensor import tensor_of
from streamshard.model import ITEMSIZE, Slot, SourceFile
from streamshard.operations.companions import Companions
from streamshard.operations.compare import Comparing
from streamshard.operations.pairing import Half, Pair
from streamshard.operations.report import Progress
from streamshard.operations.scanning import scan
from streamshard.operations.verification import Findings
from streamshard.operations.verify_torch import TorchFiles
from streamshard.operations.weight_files import WeightFiles
from streamshard.plan.cutting import Cutting, CuttingBuilder
from streamshard.plan.memory import MemoryPlan
from streamshard.plan.sample import EVERYTHING


@dataclass(frozen=True, slots=True)
class _Written:
    """Files that were written, seen as one side of a comparison."""

    path: Path
    files: tuple[SourceFile, ...]
    cutting: Cutting
    decoders: Mapping[int, Decoder] = field(default_factory=dict)
    codec_bytes: int = 0


def require_exported(
    place: Path, files: WeightFiles, companions: Companions, memory: MemoryPlan, progress: Progress
) -> None:
    """Refuse exported files unless, read back from the disk, they hold what the source does.

    Raises
    ------
    IntegrityError
        They do not; the message says what is wrong first.
    """
    with target_errors(place):
        drop_cached(place)
        try:
            wrong = _Check(place, files, companions).run(memory, progress)
        except SourceError as error:
            wrong = [str(error)]
    if wrong:
        more = f", and {len(wrong) - 1:,} more" if len(wrong) > 1 else ""
        raise IntegrityError(
            f"{place}: read back from disk, it is not what {companions.source.path} holds. "
            f"{wrong[0]}{more}. It was not put into its place"
        )


class _Check:
    """Collects what is to be the same: first what the headers say, then the elements."""

    def __init__(self, place: Path, files: WeightFiles, companions: Companions) -> None:
        self._place = place
        self._weights = files
        self._source = companions.source
        self._companions = companions.found
        self._files: list[SourceFile] = []
        self._places: list[tuple[int, int]] = []
        """(file, byte offset) of the left half of each pair."""
        self._pairs: list[Pair] = []

    def run(self, memory: MemoryPlan, progress: Progress) -> list[str]:
        """Read everything; returns what is wrong."""
        wrong = [*self._documents(), *self._headers(), *self._copies()]
        if wrong:
            return wrong
        findings = Findings()
        self._check_records(memory, progress, findings)
        comparing = Comparing(self._written(), self._source, self._pairs)
        differences = comparing.run(memory, findings, progress.advance)
        return [*(p.message for p in findings.problems), *(d.message for d in differences)]

    def _check_records(self, memory: MemoryPlan, progress: Progress, findings: Findings) -> None:
        """Hold what lies in torch files against their checksums; safetensors has none."""
        if self._weights.form == pretrained.TORCH:
            held = [file for file in self._files if file.path.name in self._weights.held]
            checked = TorchFiles(held, str, findings, EVERYTHING)
            scan(checked.units(), held, {}, memory, progress.advance)

    def _documents(self) -> Iterator[str]:
        for name, data in self._weights.documents().items():
            if (self._place / name).read_bytes() != data:
                yield f"{name} is not what was written"

    def _headers(self) -> Iterator[str]:
        for name, weights in self._weights.held.items():
            found = {one.tensor.name: one for one in self._read(name)}
            expected = {n: weight for weight in weights for n in self._weights.names(weight)}
            if found.keys() != expected.keys():
                yield f"{name} does not hold the tensors that were written"
                continue
            for key, weight in expected.items():
                if found[key] != Stored(
                    Described(key, weight.dtype, weight.shape), found[weight.names[0]].offset
                ):
                    yield f"{name} has another dtype, shape or place for '{key}'"
            for weight in weights:
                dtype = self._source.checkpoint.tensors[weight.tensor].dtype
                offset = found[weight.names[0]].offset
                right = Half(weight.tensor, dtype)
                self._pair(weight.names[0], offset, right, weight.numel, weight.dtype)

    def _read(self, name: str) -> Iterable[Stored]:
        """Read where a file of weights keeps its tensors."""
        path = self._place / name
        self._add(path)
        if self._weights.form == pretrained.SAFETENSORS:
            return safetensors_file.read(path)
        root = torch_file.read(path, 0).root
        found = []
        for key, node in root.items() if isinstance(root, dict) else ():
            tensor = tensor_of(node)
            if tensor is not None:
                tensor.require_contiguous(f"{path}: {key}")
                found.append(Stored(Described(key, tensor.dtype, tensor.shape), tensor.offset))
        return found

    def _copies(self) -> Iterator[str]:
        """Pair the files that came along."""
        for one in self._companions:
            numel = self._source.checkpoint.tensors[one.tensor].numel
            if self._add(self._place / one.path) != numel:
                yield f"{one.path} is not as long as what it is a copy of"
            self._pair(one.path, 0, Half(one.tensor, "uint8"), numel, "uint8")

    def _add(self, path: Path) -> int:
        """Add a file that was written; returns its size."""
        stat = path.stat()
        self._files.append(SourceFile(path, stat.st_size, stat.st_mtime_ns))
        return stat.st_size

    def _pair(self, name: str, offset: int, right: Half, numel: int, dtype: str) -> None:
        """Pair elements in the file that was added last with the source's."""
        left = Half(len(self._pairs), dtype)
        self._places.append((len(self._files) - 1, offset))
        self._pairs.append(Pair(name, left, right, numel, dtype, ITEMSIZE[dtype]))

    def _written(self) -> _Written:
        builder = CuttingBuilder([pair.itemsize for pair in self._pairs])
        for number, (pair, (file, offset)) in enumerate(
            zip(self._pairs, self._places, strict=True)
        ):
            slot = Slot(np.array([file]), np.array([offset]), np.array([pair.numel]))
            builder.place(number, builder.slot(slot), piece_numel=pair.numel)
        return _Written(self._place, tuple(self._files), builder.build())
