"""Reads distributed checkpoints, as they are or completed, and checks their files.

They are PyTorch's own, Megatron's, and safetensors files of ranks with an optimizer next to them.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Self

from streamshard.checks.problems import MALFORMED, Findings
from streamshard.checks.torch_check import TorchFiles
from streamshard.errors import IncompleteError, SourceError
from streamshard.formats import detect, pretrained
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.dcp import dcp_names, dcp_reader, rank_shards
from streamshard.formats.dcp.config_completion import with_config
from streamshard.formats.dcp.dcp_reader import Distributed
from streamshard.formats.dcp.item_reader import audit_items, missing_file
from streamshard.formats.dcp.metadata_reader import is_distributed
from streamshard.formats.dcp.renaming import renamed
from streamshard.formats.deepspeed import ds_config
from streamshard.formats.megatron import megatron_reader
from streamshard.formats.torch.zip_audit import StoredRecord
from streamshard.io.entries import examine, identify, is_directory, is_file, list_ahead
from streamshard.sizes import counted
from streamshard.source.base_reader import Reader
from streamshard.source.directory_content import DirectoryContent
from streamshard.source.sidecars import has_shards
from streamshard.source.source import Request, Source
from streamshard.source.structure import CheckedStructure, opened_to_check
from streamshard.source.weights_source import NO_CHECKSUMS


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
    ) -> Self:
        """Look at the files; those that are missing are problems."""
        files = []
        for path in items:
            if is_file(path):
                files.append(identify(path))
            else:
                findings.add_error(missing_file(path), path)
        return cls(files, lambda _: None, findings, items=items)

    def _records(self, path: Path) -> Sequence[StoredRecord]:
        records: list[StoredRecord] = []
        unprotected = 0
        for start, audit in audit_items(path, self.items[path]):
            for problem in audit.problems:
                message = f"{path}: item at byte {start:,}: {problem}"
                self.findings.add(MALFORMED, path, message)
            checked = [r for r in audit.records if r.crc32 or not r.nbytes]
            unprotected += len(checked) < len(audit.records)
            records += [replace(record, start=start + record.start) for record in checked]
        if unprotected:
            items = counted(unprotected, "item")
            note = f"{path}: {items} whose writer left checksums out, which can therefore not be"
            self.findings.notes.append(f"{note} checked.")
        return records


class DistributedReader(Reader):
    """Reads what `torch.distributed.checkpoint` saves."""

    name = "dcp"
    title = "PyTorch's distributed checkpoint"
    is_foreign = True
    completes = True
    facts = frozenset({"rename"})

    def needs_like(self, checkpoint: Checkpoint) -> bool:
        return True

    def holds(self, directory: Path) -> bool:
        return bool(dcp_reader.parts_of(directory)) and not has_shards(directory)

    def recognizes(self, request: Request) -> Path | None:
        place = self.at(request)
        return None if place is None or detect.is_megatron(place) else place

    def is_alone_in(self, content: DirectoryContent) -> bool | None:
        return dcp_names.is_dcp(content.files) or None

    def index_of(self, place: Path, known: Set[str]) -> Distributed:
        """Read the index and the headers of items, for known names of the model's parameters."""
        return dcp_reader.open_distributed(place, known)

    def items_of(self, place: Path) -> Mapping[Path, Sequence[tuple[int, int]]]:
        """Return file → offset and length of each item in it."""
        return dcp_reader.index_of(place).by_file()

    def open(self, place: Path, request: Request) -> Source:
        list_ahead(place)
        rules = request.facts.rename
        # Rules are for the names that are shown without them, so known ones do not matter.
        found = self.index_of(place, frozenset() if rules else _parameters_of(request.like))
        reading = dcp_reader.as_it_is(found)
        reading = reading if rules is None else renamed(reading, found, rules)
        return Source.of(place, self, reading)

    def complete(
        self, source: Source, config: ds_config.Config, stage: int | None, world_size: int
    ) -> Checkpoint:
        return with_config(source.checkpoint, config, zero_stage=stage, world_size=world_size)

    def other_files(self, source: Source) -> Iterable[tuple[str, int]]:
        for place in dcp_reader.parts_of(source.path):
            path = place / dcp_names.METADATA
            yield path.relative_to(source.path).as_posix(), examine(path).nbytes

    def check_structure(
        self, place: Path, request: Request, findings: Findings
    ) -> CheckedStructure:
        opened = opened_to_check(place, request, findings)
        items: Mapping[Path, Sequence[tuple[int, int]]] = {}
        # Without an index it is not known where items lie, which is a problem already.
        with suppress(SourceError):
            items = self.items_of(place)
        check = ItemFilesCheck.of(items, findings)
        return CheckedStructure(self, place.name, check.files, check.units, source=opened)


class _MegatronReader(DistributedReader):
    name = "megatron"
    title = "Megatron's distributed checkpoint"
    completes = False

    def holds(self, directory: Path) -> bool:
        return megatron_reader.is_megatron(directory)

    def recognizes(self, request: Request) -> Path | None:
        root, found = request.root, self.at(request)
        if found is not None or request.tag is not None:
            return found
        place = megatron_reader.latest_of(root)
        if place is None or (is_directory(place) and not dcp_reader.parts_of(place)):
            return None
        if not is_directory(place):
            message = f"names {place.name}, which is not there; give another one"
            raise IncompleteError(message, path=root / megatron_reader.LATEST)
        return place

    def is_alone_in(self, content: DirectoryContent) -> bool | None:
        return None

    def index_of(self, place: Path, known: Set[str]) -> Distributed:
        if self.holds(place):
            return megatron_reader.open_megatron(place)
        return super().index_of(place, known)

    def items_of(self, place: Path) -> Mapping[Path, Sequence[tuple[int, int]]]:
        found, common = dict(super().items_of(place)), place / megatron_reader.COMMON
        if is_file(common):  # it is a whole file of torch.save, as items are
            found[common] = [(0, examine(common).nbytes)]
        return found


class _RankShardsReader(DistributedReader):
    def holds(self, directory: Path) -> bool:
        """Tell so, unless whole files were made of those of ranks."""
        if not rank_shards.is_of_shards(directory) or has_shards(directory):
            return False
        is_whole = pretrained.is_pretrained(directory)
        return is_distributed(directory) or not is_whole

    def index_of(self, place: Path, known: Set[str]) -> Distributed:
        return rank_shards.open_shards(place)

    def items_of(self, place: Path) -> Mapping[Path, Sequence[tuple[int, int]]]:
        return super().items_of(place) if is_distributed(place) else {}

    def check_structure(
        self, place: Path, request: Request, findings: Findings
    ) -> CheckedStructure:
        checked = super().check_structure(place, request, findings)
        if checked.source is None:
            return checked
        known = {file.path for file in checked.files}
        shards = [file for file in checked.source.files if file.path not in known]
        findings.files += len(shards)
        findings.notes.append(NO_CHECKSUMS)
        return replace(checked, files=(*checked.files, *shards))


def _parameters_of(like: Source | None) -> set[str]:
    parts = () if like is None else like.checkpoint.model_parts
    return {name for part in parts for group in part.groups for name in group.params}


READER: Final = DistributedReader()
MEGATRON: Final = _MegatronReader()
RANK_SHARDS: Final = _RankShardsReader()
