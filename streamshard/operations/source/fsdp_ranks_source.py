"""Reads the weights in files of FSDP's ranks, as verl saves them."""

from pathlib import Path
from typing import Final

from streamshard.errors import IntegrityError, SourceError, release_frames
from streamshard.formats.fsdp_ranks import fsdp_ranks_reader
from streamshard.io.entries import is_file, paths_in
from streamshard.layout.sample import Sample
from streamshard.operations.checks.problems import Findings
from streamshard.operations.checks.structure import CheckedStructure, Reader
from streamshard.operations.checks.torch_check import TorchFiles
from streamshard.operations.source.readable_files import ReadableFiles
from streamshard.operations.source.source import Request, Source


class _FsdpRanksReader(Reader):
    kind = "fsdp-ranks"
    title = "files of FSDP's ranks"

    def holds(self, directory: Path) -> bool:
        return fsdp_ranks_reader.is_of_ranks(directory)

    def recognizes(self, request: Request) -> Path | None:
        return request.root if request.tag is None and self.holds(request.root) else None

    def open(self, place: Path, request: Request) -> Source:
        return Source.of(place, self.kind, fsdp_ranks_reader.read(place))

    def check_structure(
        self, place: Path, request: Request, findings: Findings, sample: Sample
    ) -> CheckedStructure:
        opened: Source | None = None
        try:
            opened = request.open()
            findings.notes += opened.checkpoint.remarks
        except (SourceError, IntegrityError) as error:
            release_frames(error)
            findings.add_error(error, place)
        entries = sorted(path for path in paths_in(place) if is_file(path))
        readable = ReadableFiles(entries, [place], findings)
        torch = TorchFiles.at(readable.files, lambda _: None, findings, sample)
        return CheckedStructure(self.kind, place.name, torch.files, torch.units, source=opened)


READER: Final = _FsdpRanksReader()
