"""Reads the weights in files of FSDP's ranks, as verl saves them."""

from pathlib import Path
from typing import Final

from streamshard.formats.fsdp_ranks import fsdp_ranks_reader
from streamshard.io.entries import is_file, paths_in
from streamshard.layout.sample import Sample
from streamshard.operations.checks.problems import Findings
from streamshard.operations.checks.structure import CheckedStructure, Reader, opened_to_check
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
        opened = opened_to_check(place, request, findings)
        entries = sorted(path for path in paths_in(place) if is_file(path))
        readable = ReadableFiles(entries, [place], findings)
        torch = TorchFiles.at(readable.files, lambda _: None, findings, sample)
        return CheckedStructure(self.kind, place.name, torch.files, torch.units, source=opened)


READER: Final = _FsdpRanksReader()
