"""Reads distributed checkpoints of PyTorch, as they are or completed."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from streamshard.errors import IntegrityError, SourceError, release_frames
from streamshard.formats import detect
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.dcp import dcp_names, dcp_reader, reference
from streamshard.formats.dcp.config_completion import with_config
from streamshard.formats.deepspeed import ds_config, names
from streamshard.io.entries import is_directory, list_ahead
from streamshard.layout.sample import Sample
from streamshard.operations.checks.item_check import ItemFilesCheck
from streamshard.operations.checks.problems import Findings
from streamshard.operations.checks.structure import CheckedStructure, Reader
from streamshard.operations.source.directory_content import DirectoryContent
from streamshard.operations.source.sidecars import has_shards
from streamshard.operations.source.source import Request, Source


class _DistributedReader(Reader):
    kind = "dcp"
    title = "PyTorch's distributed checkpoint"
    completes = True

    def holds(self, directory: Path) -> bool:
        return bool(dcp_reader.parts_of(directory)) and not has_shards(directory)

    def recognizes(self, request: Request) -> Path | None:
        root, tag = request.root, request.tag
        place = root if tag is None else root / tag
        if tag is not None and not (names.is_tag(tag) and is_directory(place)):
            return None
        return place if self.holds(place) and not detect.is_megatron(place) else None

    def is_alone_in(self, content: DirectoryContent) -> bool | None:
        return dcp_names.is_dcp(content.files) or None

    def open(self, place: Path, request: Request) -> Source:
        """Open it as it is, or completed by a reference checkpoint."""
        list_ahead(place)
        like = request.source_like
        if like is None:
            return Source.of(place, self.kind, dcp_reader.read(place))
        opened = Source.of(place, self.kind, reference.read_like(place, like))
        is_decoded = any(file.decoder is not None for file in opened.files)
        return replace(opened, codec_bytes=like.codec_bytes if is_decoded else 0)

    def complete(
        self, source: Source, config: ds_config.Config, stage: int | None, world_size: int
    ) -> Checkpoint:
        return with_config(source.checkpoint, config, zero_stage=stage, world_size=world_size)

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
        items: Mapping[Path, Sequence[tuple[int, int]]] = {}
        # Without an index it is not known where items lie, which is a problem already.
        with suppress(SourceError):
            items = dcp_reader.index_of(place).by_file()
        check = ItemFilesCheck.of(items, findings, sample)
        return CheckedStructure(self.kind, place.name, check.files, check.units, source=opened)


READER: Final = _DistributedReader()
