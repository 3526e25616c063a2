"""Reads a model's weights alone, as `from_pretrained` loads them."""

from pathlib import Path
from typing import Final

from streamshard.checks.problems import Findings
from streamshard.formats import pretrained
from streamshard.formats.deepspeed import names
from streamshard.io.entries import is_file
from streamshard.source.base_reader import Reader
from streamshard.source.candidates import find_candidates
from streamshard.source.directory_content import DirectoryContent
from streamshard.source.sidecars import has_shards
from streamshard.source.source import Request, Source
from streamshard.source.structure import CheckedStructure, opened_to_check

NO_CHECKSUMS: Final = (
    "Files in safetensors format keep no checksums: their headers and sizes were checked."
)


class _WeightsReader(Reader):
    name = "weights"
    title = "safetensors"
    is_foreign = True
    is_of_job = False

    def recognizes(self, request: Request) -> Path | None:
        root = request.root
        if request.tag is not None or not pretrained.is_pretrained(root) or has_shards(root):
            return None
        return None if is_file(root / names.LATEST) or find_candidates(root) else root

    def is_alone_in(self, content: DirectoryContent) -> bool | None:
        return pretrained.is_export(content.files) or None

    def open(self, place: Path, request: Request) -> Source:
        return Source.of(place, self, pretrained.read(place))

    def check_structure(
        self, place: Path, request: Request, findings: Findings
    ) -> CheckedStructure:
        opened = opened_to_check(place, request, findings)
        if opened is None:
            return CheckedStructure(self, place.name)
        findings.files += len(opened.files)
        findings.notes.append(NO_CHECKSUMS)
        return CheckedStructure(self, place.name, opened.files, source=opened)


READER: Final = _WeightsReader()
