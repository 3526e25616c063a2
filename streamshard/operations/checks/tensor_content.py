"""Computes the digest and the health of every logical tensor of a checkpoint, however it is cut."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from streamshard.engine.numeric import digests, magnitudes
from streamshard.engine.scan.probe import Probe
from streamshard.errors import SourceError
from streamshard.formats.zarr.array_paths import array_path
from streamshard.health import TensorHealth
from streamshard.layout.sample import EVERYTHING, Sample
from streamshard.model import ITEMSIZE, LogicalTensor
from streamshard.operations.checks.problems import UNHEALTHY, Findings
from streamshard.operations.checks.scan import Result, ScanPiece, Unit, scan
from streamshard.operations.source.source import Source
from streamshard.operations.source.store_source import is_measured, known_of_all
from streamshard.operations.transfer.execution import Limits

_PIECE_BYTES: Final = 8 << 20
"""Workers get large tensors in pieces of this size."""


@dataclass(frozen=True, slots=True)
class TensorUnits:
    """What is computed of a source's tensors; it is added to the findings."""

    source: Source
    findings: Findings
    digests: bool = False
    health: bool = False
    sample: Sample = EVERYTHING

    @property
    def nbytes(self) -> int:
        """Bytes that are read if no sample is taken."""
        return sum(
            tensor.nbytes for tensor in self.source.checkpoint.tensors if self._takes(tensor)
        )

    def __iter__(self) -> Iterator[Unit]:
        """Yield a unit for every tensor in the sample."""
        tensors = self.source.checkpoint.tensors
        total, at = sum(tensor.nbytes for tensor in tensors), 0
        failed = partial(self.findings.add_error, place=self.source.path)
        for index, tensor in enumerate(tensors):
            start, at = at, at + tensor.nbytes
            if self._takes(tensor) and self.sample.holds(start, at, total):
                yield Unit([*self._pieces(index, tensor)], partial(self._note, tensor), failed)

    @property
    def _place(self) -> Path:
        """The directory of the checkpoint itself."""
        is_tag = self.source.kind == "native"
        return self.source.path / self.source.checkpoint.tag if is_tag else self.source.path

    def _takes(self, tensor: LogicalTensor) -> bool:
        return self.digests or (self.health and is_measured(tensor))

    def _pieces(self, index: int, tensor: LogicalTensor) -> Iterator[ScanPiece]:
        step = _PIECE_BYTES // ITEMSIZE[tensor.dtype]
        dtype = tensor.dtype if self.health and is_measured(tensor) else None
        for first in range(0, tensor.numel, step):
            region = self.source.region(index, first, min(first + step, tensor.numel))
            read = partial(Probe.content_of, region=region, takes_digest=self.digests, dtype=dtype)
            yield ScanPiece(region.content_bytes, read)

    def _note(self, tensor: LogicalTensor, results: Sequence[Result]) -> None:
        name = array_path(tensor)
        if self.digests:
            self.findings.digests[name] = digests.joined(one for one, _ in results).text
        if self.health and is_measured(tensor):
            found = magnitudes.health_of(magnitudes.joined(one for _, one in results))
            _add_health(self.findings, self._place, name, found)


def _add_health(findings: Findings, place: Path, name: str, found: TensorHealth) -> None:
    """Note which numbers a tensor holds; NaN and infinities are a problem."""
    findings.health[name] = found
    if not found.is_good:
        findings.add(UNHEALTHY, place, f"{place}: {name}: {found}")


def recorded(place: Path, health: Mapping[str, TensorHealth]) -> Findings:
    """Return as findings what was measured when a store was made."""
    findings = Findings()
    for name, found in health.items():
        _add_health(findings, place, name, found)
    return findings


def measured(
    source: Source, limits: Limits, known: Mapping[str, TensorHealth]
) -> dict[str, TensorHealth]:
    """Return which numbers each tensor of floats holds; they are read unless all are known."""
    if (found := known_of_all(source, known)) is not None:
        return found
    findings = Findings()
    units = TensorUnits(source, findings, health=True)
    plan = limits.fit(source.codec_bytes, source.files)
    scan(units, source.files, plan, lambda _: None)
    for problem in findings.problems:
        if problem.kind != UNHEALTHY:
            raise SourceError(problem.message)
    return findings.health
