"""Reads DeepSpeed's universal checkpoints: a directory of one, or what `latest_universal` names."""

from pathlib import Path
from typing import Final

from streamshard.errors import IncompleteError
from streamshard.formats.deepspeed import names
from streamshard.formats.universal import universal_reader
from streamshard.io.entries import is_directory, is_file, paths_below, paths_in
from streamshard.io.files import require_inside
from streamshard.operations.checks.problems import Findings
from streamshard.operations.checks.structure import CheckedStructure, opened_to_check
from streamshard.operations.checks.torch_check import TorchFiles, deepspeed_owner
from streamshard.operations.source.candidates import find_candidates
from streamshard.operations.source.directory_content import DirectoryContent
from streamshard.operations.source.readable_files import ReadableFiles
from streamshard.operations.source.reader import Reader
from streamshard.operations.source.sidecars import find_beside
from streamshard.operations.source.source import Request, Source
from streamshard.operations.source.tag_directory import run_directory_of
from streamshard.operations.source.universal_order import require_own_places

_MASTERS: Final = "fp32.pt"


class _UniversalReader(Reader):
    name = "universal"
    title = "DeepSpeed's universal checkpoint"

    def holds(self, directory: Path) -> bool:
        params = directory / names.UNIVERSAL_PARAMS
        if not is_directory(params):
            return False
        # One may be made in the directory of the shards themselves, which hold more.
        kinds = {parsed.kind for f in paths_in(directory) if (parsed := names.parse(f.name))}
        return "optim" not in kinds and (
            is_file(params / names.UNIVERSAL_STATE)
            or any(is_file(param / _MASTERS) for param in paths_in(params))
        )

    def recognizes(self, request: Request) -> Path | None:
        root, found = request.root, self.at(request)
        if found is not None or request.tag is not None:
            return found
        named = names.latest_of(root, names.LATEST_UNIVERSAL)
        if named is None or not names.is_tag(named):
            return None
        latest = names.latest_of(root)
        if latest is None:
            return root / named if find_candidates(root) in ([], [named]) else None
        is_it = names.is_tag(latest) and self.holds(root / latest)
        return root / latest if is_it else None

    def is_alone_in(self, content: DirectoryContent) -> bool | None:
        named = names.latest_of(content.root, names.LATEST_UNIVERSAL) or ""
        first = named.partition("/")[0]
        if not named or content.names != {names.LATEST_UNIVERSAL, first}:
            return None
        return content.is_path_alone(named)

    def open(self, place: Path, request: Request) -> Source:
        run_dir, tag = _parts(place, request.root)
        for path in paths_below(place):
            require_inside(path, run_dir, place)
        files, notes = find_beside(run_dir, tag)
        found = universal_reader.read(place, files, tag=tag, notes=notes)
        source = Source.of(run_dir, self, found)
        if source.checkpoint.layout.round_robin:
            require_own_places(source, place)
        return source

    def check_structure(
        self, place: Path, request: Request, findings: Findings
    ) -> CheckedStructure:
        opened = opened_to_check(place, request, findings)
        beside = [file.path for file in opened.files] if opened is not None else []
        run_dir, tag = _parts(place, request.root)
        readable = ReadableFiles(sorted(paths_below(place)), [run_dir, place], findings)
        torch = TorchFiles.at([*readable.files, *beside], deepspeed_owner, findings)
        tag = opened.checkpoint.tag if opened is not None else tag
        return CheckedStructure(self, tag, torch.files, torch.units, source=opened)


def _parts(place: Path, root: Path) -> tuple[Path, str]:
    """Return the run directory, and the path of the checkpoint's directory in it."""
    if not is_directory(place):
        message = f"names {place.relative_to(root)}, which is not there"
        raise IncompleteError(message, path=root / names.LATEST_UNIVERSAL)
    run_dir = run_directory_of(place.absolute()) if place == root else root
    place = place.absolute() if place == root else place
    return run_dir, place.relative_to(run_dir).as_posix()


READER: Final = _UniversalReader()
