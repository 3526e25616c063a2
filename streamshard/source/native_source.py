"""Reads a tag directory of a run, as DeepSpeed saves it."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.read import zero_reader
from streamshard.formats.frameworks import framework_of
from streamshard.io.entries import examine, is_directory, list_ahead, paths_below, paths_in
from streamshard.io.files import require_inside
from streamshard.io.object_path import is_packed_name
from streamshard.model import Note
from streamshard.source.base_reader import Reader
from streamshard.source.sidecars import find_beside, has_shards
from streamshard.source.source import Request, Source
from streamshard.source.tag_directory import find_tag

if TYPE_CHECKING:
    from streamshard.checks.problems import Findings
    from streamshard.source.directory_content import DirectoryContent
    from streamshard.source.structure import CheckedStructure


class NativeReader(Reader):
    name = "native"
    title = "DeepSpeed shards"
    is_tag = True
    is_of_ranks = True
    changes_degrees = True

    def holds(self, directory: Path) -> bool:
        if is_packed_name(directory) or not has_shards(directory):
            return False
        # DeepSpeed's universal checkpoints hold the model files of their source too.
        return _has_optimizer(directory) or not is_directory(directory / names.UNIVERSAL_PARAMS)

    def recognizes(self, request: Request) -> Path | None:
        return request.root

    def is_alone_in(self, content: "DirectoryContent") -> bool | None:
        root, names_there = content.root, content.names
        tag = names.latest_of(root) or ""
        if framework_of(tag, [*names_there]) is not None:
            return _first(tag) in content.directories and content.is_path_alone(tag)
        return not names_there or (
            content.directories == {_first(tag)} and content.is_path_alone(tag)
        )

    def open(self, place: Path, request: Request) -> Source:
        run_dir, tag_dir = find_tag(place, request.tag)
        for path in paths_below(tag_dir):
            require_inside(path, run_dir, tag_dir)
        tag = tag_dir.relative_to(run_dir).as_posix()
        files, notes = find_beside(run_dir, tag)
        found = zero_reader.read(tag_dir, files, tag=tag)
        opened = Source.of(run_dir, self, found)
        noted = (*opened.checkpoint.notes, *map(Note, notes))
        return replace(opened, checkpoint=replace(opened.checkpoint, notes=noted))

    def other_files(self, source: Source) -> Iterable[tuple[str, int]]:
        latest = source.path / names.LATEST
        with suppress(FileNotFoundError):
            if names.read_latest(latest) == source.checkpoint.tag:
                yield names.LATEST, examine(latest).nbytes

    def ranks_of_files(self, source: Source) -> list[int | None]:
        parsed = (names.parse(file.path.name) for file in source.files)
        return [None if known is None else known.dp_rank for known in parsed]

    def check_structure(
        self, place: Path, request: Request, findings: "Findings"
    ) -> "CheckedStructure":
        # Not at the top: who opens shards need not load what checks them.
        from streamshard.source.shards_check import check_native

        return check_native(self, place, request, findings)


def _has_optimizer(directory: Path) -> bool:
    kinds = (parsed.kind for file in paths_in(directory) if (parsed := names.parse(file.name)))
    return "optim" in kinds


def _first(tag: str) -> str:
    return tag.partition("/")[0]


class _CertainReader(NativeReader):
    """Is asked first: one listing decides for the shards of an optimizer, without other readers."""

    is_alone_in = Reader.is_alone_in  # what is to be replaced may be of another kind

    def recognizes(self, request: Request) -> Path | None:
        root = request.root
        if request.template is not None or not is_directory(root):
            return None
        tag = request.tag or ("" if has_shards(root) else names.latest_of(root) or "")
        place = root / tag
        if (tag and not names.is_tag(tag)) or not is_directory(place):
            return None
        list_ahead(place)
        is_universal = is_directory(place / names.UNIVERSAL_PARAMS)
        return root if _has_optimizer(place) and not is_universal else None


CERTAIN: Final = _CertainReader()
READER: Final = NativeReader()
