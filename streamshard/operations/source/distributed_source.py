"""Reads distributed checkpoints of PyTorch, as they are or completed, and checks their files."""

from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, Self

from streamshard.errors import SourceError
from streamshard.formats import detect
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.dcp import dcp_names, dcp_reader, reference
from streamshard.formats.dcp.config_completion import with_config
from streamshard.formats.dcp.dcp_reader import Distributed
from streamshard.formats.dcp.item_reader import audit_items, missing_file
from streamshard.formats.dcp.renaming import renamed
from streamshard.formats.deepspeed import ds_config, names
from streamshard.formats.torch.zip_audit import StoredRecord
from streamshard.io.entries import identify, is_directory, is_file, list_ahead
from streamshard.layout.sample import Sample
from streamshard.operations.checks.problems import MALFORMED, Findings
from streamshard.operations.checks.structure import CheckedStructure, Reader, opened_to_check
from streamshard.operations.checks.torch_check import TorchFiles
from streamshard.operations.source.directory_content import DirectoryContent
from streamshard.operations.source.sidecars import has_shards
from streamshard.operations.source.source import Request, Source
from streamshard.sizes import counted


class DistributedReader(Reader):
    """Reads what `torch.distributed.checkpoint` saves."""

    kind = "dcp"
    title = "PyTorch's distributed checkpoint"
    completes = True
    renames = True

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

    def index_of(self, place: Path, known: Set[str]) -> Distributed:
        """Read the index and the headers of items, for known names of the model's parameters."""
        return dcp_reader.open_distributed(place, known)

    def items_of(self, place: Path) -> Mapping[Path, Sequence[tuple[int, int]]]:
        """Return file → offset and length of each item in it."""
        return dcp_reader.index_of(place).by_file()

    def open(self, place: Path, request: Request) -> Source:
        """Open it as it is, or completed by a reference checkpoint."""
        list_ahead(place)
        like, opened_for = request.source_like, partial(self.index_of, place)
        if request.rename is not None:
            opened_for = partial(self._renamed, place, request.rename)
        if like is None:
            return Source.of(place, self.kind, dcp_reader.as_it_is(opened_for(frozenset())))
        opened = Source.of(place, self.kind, reference.read_like(place, like, opened_for))
        is_decoded = any(file.decoder is not None for file in opened.files)
        return replace(opened, codec_bytes=like.codec_bytes if is_decoded else 0)

    def _renamed(self, place: Path, rules: Path, _: Set[str]) -> Distributed:
        # Rules are for the names that are shown without them, so known ones do not matter.
        return renamed(self.index_of(place, frozenset()), rules)

    def complete(
        self, source: Source, config: ds_config.Config, stage: int | None, world_size: int
    ) -> Checkpoint:
        return with_config(source.checkpoint, config, zero_stage=stage, world_size=world_size)

    def check_structure(
        self, place: Path, request: Request, findings: Findings, sample: Sample
    ) -> CheckedStructure:
        opened = opened_to_check(place, request, findings)
        items: Mapping[Path, Sequence[tuple[int, int]]] = {}
        # Without an index it is not known where items lie, which is a problem already.
        with suppress(SourceError):
            items = self.items_of(place)
        check = ItemFilesCheck.of(items, findings, sample)
        return CheckedStructure(self.kind, place.name, check.files, check.units, source=opened)


READER: Final = DistributedReader()


_MOST_LISTED = 100
"""Most items of a file whose problems are listed one by one."""


@dataclass(slots=True)
class ItemFilesCheck(TorchFiles):
    """Files of items to check: every item is a torch file of its own."""

    items: Mapping[Path, Sequence[tuple[int, int]]] = field(default_factory=dict)
    """Offset and length of each item, by file."""

    @classmethod
    def of(
        cls,
        items: Mapping[Path, Sequence[tuple[int, int]]],
        findings: Findings,
        sample: Sample,
    ) -> Self:
        """Look at the files; those that are missing are problems."""
        files = []
        for path in items:
            if is_file(path):
                files.append(identify(path))
            else:
                findings.add_error(missing_file(path), path)
        return cls(files, lambda _: None, findings, sample, items=items)

    def _records(self, path: Path) -> Sequence[StoredRecord]:
        found: list[StoredRecord] = []
        listed = unprotected = 0
        for start, audit in audit_items(path, self.items[path]):
            for problem in audit.problems:
                if listed < _MOST_LISTED:
                    message = f"{path}: item at byte {start:,}: {problem}"
                    self.findings.add(MALFORMED, path, message)
                listed += 1
            checked = [r for r in audit.records if r.crc32 or not r.nbytes]
            unprotected += len(checked) < len(audit.records)
            found += [replace(record, start=start + record.start) for record in checked]
        if unprotected:
            items = counted(unprotected, "item")
            note = f"{path}: {items} whose writer left checksums out, which can therefore not be"
            self.findings.notes.append(f"{note} checked.")
        if listed > _MOST_LISTED:
            message = f"{path}: {listed - _MOST_LISTED:,} more problems of its items"
            self.findings.add(MALFORMED, path, message)
        return found
