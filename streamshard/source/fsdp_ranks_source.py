"""Reads files of FSDP's ranks, as verl saves them."""

from dataclasses import replace
from pathlib import Path
from typing import Final

from streamshard.checks.problems import Findings
from streamshard.checks.torch_check import TorchFiles
from streamshard.errors import CorruptFileError, IncompleteError
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.fsdp_ranks import fsdp_ranks_reader, rank_names
from streamshard.io.entries import is_file, paths_in
from streamshard.source.base_reader import Reader
from streamshard.source.directory_content import DirectoryContent
from streamshard.source.shards_check import ReadableFiles
from streamshard.source.source import Request, Source
from streamshard.source.structure import CheckedStructure, opened_to_check


class _FsdpRanksReader(Reader):
    name = "fsdp-ranks"
    title = "files of FSDP's ranks"
    is_foreign = True
    is_of_job = False
    facts = frozenset({"wrapped"})
    form = "fsdp-ranks"

    def needs_like(self, checkpoint: Checkpoint) -> bool:
        return True

    def holds(self, directory: Path) -> bool:
        return rank_names.is_of_ranks(directory)

    def recognizes(self, request: Request) -> Path | None:
        return request.root if request.tag is None and self.holds(request.root) else None

    def is_alone_in(self, content: DirectoryContent) -> bool | None:
        others = content.names - {rank_names.PRETRAINED, rank_names.CONFIG, rank_names.LORA}
        is_one = any(rank_names.is_rank_file(name, rank_names.MODEL) for name in others)
        return all(map(rank_names.is_rank_file, others)) if is_one else None

    def open(self, place: Path, request: Request) -> Source:
        found = fsdp_ranks_reader.read(place, request.facts.wrapped)
        return replace(Source.of(place, self, found), details=found.faults)

    def check_structure(
        self, place: Path, request: Request, findings: Findings
    ) -> CheckedStructure:
        opened = opened_to_check(place, request, findings)
        for error in () if opened is None else opened.details:
            if isinstance(error, CorruptFileError | IncompleteError):
                findings.add_error(error, place)
        entries = sorted(path for path in paths_in(place) if is_file(path))
        readable = ReadableFiles(entries, [place], findings)
        torch = TorchFiles.at(readable.files, lambda _: None, findings)
        return CheckedStructure(self, place.name, torch.files, torch.units, source=opened)


READER: Final = _FsdpRanksReader()
