"""Reads safetensors files of ranks, with the optimizer next to them."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Final

from streamshard.formats import pretrained_reader
from streamshard.formats.dcp import rank_shards
from streamshard.formats.dcp.dcp_reader import Distributed
from streamshard.formats.dcp.metadata_reader import is_distributed
from streamshard.layout.sample import Sample
from streamshard.operations.checks.problems import Findings
from streamshard.operations.checks.structure import CheckedStructure
from streamshard.operations.source.distributed_source import DistributedReader
from streamshard.operations.source.sidecars import has_shards
from streamshard.operations.source.source import Request
from streamshard.operations.source.weights_source import NO_CHECKSUMS


class _RankShardsReader(DistributedReader):
    completes = False

    def holds(self, directory: Path) -> bool:
        """Tell so, unless whole files were made of those of ranks."""
        if not rank_shards.is_of_shards(directory) or has_shards(directory):
            return False
        is_whole = pretrained_reader.is_pretrained(directory)
        return is_distributed(directory) or not is_whole

    def index_of(self, place: Path, known: Set[str]) -> Distributed:
        return rank_shards.open_shards(place)

    def items_of(self, place: Path) -> Mapping[Path, Sequence[tuple[int, int]]]:
        return super().items_of(place) if is_distributed(place) else {}

    def check_structure(
        self, place: Path, request: Request, findings: Findings, sample: Sample
    ) -> CheckedStructure:
        checked = super().check_structure(place, request, findings, sample)
        if checked.source is None:
            return checked
        names = {file.path for file in checked.files}
        shards = [file for file in checked.source.files if file.path not in names]
        findings.files += len(shards)
        findings.notes.append(NO_CHECKSUMS)
        return replace(checked, files=(*checked.files, *shards))


READER: Final = _RankShardsReader()
