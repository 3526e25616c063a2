"""Computes the digest of every logical tensor of a checkpoint, however it is cut."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from streamshard.engine.numeric import digests
from streamshard.engine.scan.probe import Probe
from streamshard.errors import StreamshardError
from streamshard.formats.zarr.array_paths import array_path
from streamshard.layout.sample import Sample
from streamshard.model import ITEMSIZE
from streamshard.operations.checks.problems import Findings
from streamshard.operations.checks.scan import Result, ScanPiece, Unit
from streamshard.operations.source.source import Source

_PIECE_BYTES: Final = 8 << 20
"""Workers get large tensors in pieces of this size."""


def tensor_units(source: Source, findings: Findings, sample: Sample) -> Iterator[Unit]:
    """Yield a unit for every tensor in the sample; its digest is added to the findings."""
    tensors = source.checkpoint.tensors
    total, at = sum(tensor.nbytes for tensor in tensors), 0
    for index, tensor in enumerate(tensors):
        start, at = at, at + tensor.nbytes
        if not sample.holds(start, at, total):
            continue
        step = _PIECE_BYTES // ITEMSIZE[tensor.dtype]
        pieces = []
        for first in range(0, tensor.numel, step):
            stop = min(first + step, tensor.numel)
            region = source.region(index, first, stop)
            read = partial(Probe.digest_of, region=region)
            pieces.append(ScanPiece(region.content_bytes, read))
        yield Unit(pieces, partial(_note, source.path, findings, array_path(tensor)))


def _note(place: Path, findings: Findings, name: str, results: Sequence[Result]) -> None:
    for result in results:
        if isinstance(result, StreamshardError):
            findings.add_error(result, place)
            return
    findings.digests[name] = digests.joined(results).text
