"""Reads a model's weights alone, as `from_pretrained` loads them."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from streamshard.errors import SourceError, release_frames
from streamshard.formats import pretrained_reader
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.deepspeed import ds_config, names
from streamshard.io.entries import is_file
from streamshard.layout.sample import Sample
from streamshard.operations.checks.problems import Findings
from streamshard.operations.checks.structure import Looked, Reader
from streamshard.operations.source.candidates import find_candidates
from streamshard.operations.source.sidecars import has_shards
from streamshard.operations.source.source import Source


class _WeightsReader:
    kind = "weights"
    completes = False

    def holds(self, directory: Path) -> bool:
        """Tell that it is no checkpoint to choose: a job begins with weights, and resumes not."""
        return False

    def recognizes(self, root: Path, tag: str | None) -> Path | None:
        if tag is not None or not pretrained_reader.is_pretrained(root) or has_shards(root):
            return None
        return None if is_file(root / names.LATEST) or find_candidates(root) else root

    def open(self, place: Path, like: Source | None) -> Source:
        return Source.of(place, self.kind, pretrained_reader.read(place))

    def complete(
        self, source: Source, config: ds_config.Config, stage: int | None, world_size: int
    ) -> Checkpoint:
        raise TypeError("a model's weights are completed by nothing")

    def look_at(
        self, place: Path, reopen: Callable[[], Source], findings: Findings, sample: Sample
    ) -> Looked:
        try:
            opened = reopen()
        except SourceError as error:
            release_frames(error)
            findings.add_error(error, place)
            return Looked(self.kind, place.name, (), lambda: iter(()))
        findings.files += len(opened.files)
        findings.notes.append(
            "Files in safetensors format keep no checksums: their headers and sizes were checked."
        )
        return Looked(self.kind, place.name, opened.files, lambda: iter(()), source=opened)


READER: Final[Reader] = _WeightsReader()
