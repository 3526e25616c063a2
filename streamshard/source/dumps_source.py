"""Reads raw dumps: what each rank's optimizer saved by itself, without the model's files."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from streamshard.checks.problems import Findings
from streamshard.checks.torch_check import TorchFiles
from streamshard.errors import IntegrityError, SourceError, SourceNotFoundError, release_frames
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.deepspeed.dumps import dump_reader
from streamshard.formats.deepspeed.read.validation import validate_dumps
from streamshard.io.entries import paths_in
from streamshard.model import Template
from streamshard.source.base_reader import Reader
from streamshard.source.directory_content import DirectoryContent
from streamshard.source.shards_check import ReadableFiles, explain
from streamshard.source.source import Request, Source
from streamshard.source.structure import CheckedStructure


class _DumpsReader(Reader):
    name = "dumps"
    title = "raw per-rank dumps"
    is_of_ranks = True
    facts = frozenset({"ds_config"})

    def needs_like(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.layout.stage == 3

    def is_shard(self, path: Path) -> bool:
        return True

    def ranks_of_files(self, source: Source) -> list[int | None]:
        return list(range(len(source.files)))

    def recognizes(self, request: Request) -> Path | None:
        template = request.template
        return template.directory / template.name if template is not None else None

    def is_alone_in(self, content: DirectoryContent) -> bool | None:
        template = content.template
        if template is None:
            return None
        return all(template.rank_of(name) is not None for name in content.names)

    def open(self, place: Path, request: Request) -> Source:
        template = Template(place.parent, place.name)
        like = None if request.like is None else request.like.checkpoint
        found = dump_reader.read(template, request.facts.ds_config, like)
        return Source.of(template.directory, self, found)

    def check_structure(
        self, place: Path, request: Request, findings: Findings
    ) -> CheckedStructure:
        template, opened = Template(place.parent, place.name), None
        try:
            opened = request.open()
            paths: Iterable[Path] = [file.path for file in opened.files]
        except SourceNotFoundError:
            raise
        except (SourceError, IntegrityError) as error:
            release_frames(error)
            entries = sorted(paths_in(template.directory))
            named = [entry for entry in entries if template.rank_of(entry.name) is not None]
            readable = ReadableFiles(named, [template.directory], findings)
            problems = validate_dumps(template, readable.others)
            explain(error, findings, template.directory, problems, readable)
            paths = readable.files
        torch = TorchFiles.at(paths, template.rank_of, findings)
        return CheckedStructure(self, template.name, torch.files, torch.units, source=opened)


READER: Final = _DumpsReader()
