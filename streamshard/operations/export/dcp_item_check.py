"""Reads the items of a written distributed checkpoint, and checks everything but their elements."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from streamshard.engine.scan.probe import Probe
from streamshard.errors import StreamshardError
from streamshard.formats.dcp.dcp_items import ItemFrame
from streamshard.model import SourceFile
from streamshard.operations.checks.problems import DAMAGED, Findings
from streamshard.operations.checks.scan import Result, ScanPiece, Unit


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


def item_units(
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
