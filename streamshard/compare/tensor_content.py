"""Measures the health of every logical tensor of a checkpoint, however it is cut."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from streamshard.checks.problems import UNHEALTHY, Findings
from streamshard.checks.scan import Result, ScanPiece, Unit, scan
from streamshard.engine.numeric import magnitudes
from streamshard.engine.run.memory_limits import Limits
from streamshard.engine.scan.probe import Probe
from streamshard.errors import SourceError
from streamshard.formats.zarr.array_paths import array_path
from streamshard.formats.zarr.store_manifest import health_of_all, is_measured
from streamshard.health import TensorHealth
from streamshard.model import ITEMSIZE, LogicalTensor
from streamshard.source.source import Source

_PIECE_BYTES: Final = 8 << 20
"""Workers get large tensors in pieces of this size."""


@dataclass(frozen=True, slots=True)
class TensorUnits:
    """The tensors of a source that are measured; their health is added to the findings."""

    source: Source
    findings: Findings

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.source.checkpoint.tensors if is_measured(t))

    def __iter__(self) -> Iterator[Unit]:
        failed = partial(self.findings.add_error, place=self.source.path)
        for index, tensor in enumerate(self.source.checkpoint.tensors):
            if is_measured(tensor):
                yield Unit([*self._pieces(index, tensor)], partial(self._note, tensor), failed)

    def _pieces(self, index: int, tensor: LogicalTensor) -> Iterator[ScanPiece]:
        step = _PIECE_BYTES // ITEMSIZE[tensor.dtype]
        for first in range(0, tensor.numel, step):
            region = self.source.region(index, first, min(first + step, tensor.numel))
            read = partial(Probe.magnitudes, region=region, dtype=tensor.dtype)
            yield ScanPiece(region.content_bytes, read)

    def _note(self, tensor: LogicalTensor, results: Sequence[Result]) -> None:
        found = magnitudes.health_of(magnitudes.joined(results))
        _add_health(self.findings, self.source.place, array_path(tensor), found)


def _add_health(findings: Findings, place: Path, name: str, health: TensorHealth) -> None:
    """Note which numbers a tensor holds; NaN and infinities are a problem."""
    findings.health[name] = health
    if not health.is_good:
        findings.add(UNHEALTHY, place, f"{place}: {name}: {health}")


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
    if (found := health_of_all(source.checkpoint.tensors, known)) is not None:
        return found
    findings = Findings()
    units = TensorUnits(source, findings)
    plan = limits.fit(source.codec_bytes, source.files)
    scan(units, source.files, plan, lambda _: None)
    for problem in findings.problems:
        if problem.kind != UNHEALTHY:
            raise SourceError(problem.message)
    return findings.health
