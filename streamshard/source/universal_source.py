"""Reads DeepSpeed's universal checkpoints: a directory of one, or what `latest_universal` names."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from streamshard.checks.problems import Findings
from streamshard.checks.torch_check import TorchFiles, deepspeed_owner
from streamshard.engine.numeric.cast import cast_between
from streamshard.errors import IncompleteError, UnsupportedError
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.cut.part_cut import flat_groups
from streamshard.formats.universal import universal_reader
from streamshard.io.entries import is_directory, is_file, paths_below, paths_in
from streamshard.io.files import require_inside
from streamshard.layout.zero import FlatGroup
from streamshard.model import ITEMSIZE, MASTER, MODULE
from streamshard.source.base_reader import Reader
from streamshard.source.candidates import find_candidates
from streamshard.source.directory_content import DirectoryContent
from streamshard.source.shards_check import ReadableFiles
from streamshard.source.sidecars import find_beside
from streamshard.source.source import Request, Source
from streamshard.source.source_access import SourceAccess
from streamshard.source.structure import CheckedStructure, opened_to_check
from streamshard.source.tag_directory import run_directory_of

_MOST_NUMEL: Final = 1024
_MISPLACED: Final = (
    "made of a checkpoint with round_robin_gradients, of which DeepSpeed's ds_to_universal puts "
    "parameters into each other's places. Give the checkpoint that it was made from"
)
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
            _require_own_places(source, place)
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


def _require_own_places(source: Source, place: Path) -> None:
    """Require that each parameter's files have its own elements.

    DeepSpeed's ds_to_universal takes the parameters of a flat group to be stored in the group's own
    order. With `round_robin_gradients` they are not, and files get elements of other parameters.
    Beginnings of master weights are compared with the module's weights, until one decides.
    """
    checkpoint, index = source.checkpoint, source.checkpoint.tensor_index()
    part, dtype = checkpoint.model_parts[0], checkpoint.module_dtype
    is_moved = False
    with closing(SourceAccess(source)) as access:

        def read(state: str, name: str, start: int, numel: int) -> NDArray[Any]:
            row = index.get((part.name, state, name))
            if row is None:
                raise UnsupportedError(_MISPLACED, path=place)
            elements = np.empty(numel, dtype=f"u{ITEMSIZE[dtype]}")
            cast = cast_between(checkpoint.tensors[row].dtype, dtype)
            access.fill(elements, row, start, cast)
            return elements

        flats = flat_groups(checkpoint, part, checkpoint.layout, dtype)
        for group, flat in zip(part.groups, flats, strict=True):
            for param, taken, start, numel in _moves(flat):
                is_moved, name = True, group.params[param]
                weights = read(MODULE, name, 0, numel)
                if not np.array_equal(read(MASTER, name, 0, numel), weights):
                    raise UnsupportedError(_MISPLACED, path=place)
                if not np.array_equal(read(MODULE, group.params[taken], start, numel), weights):
                    return
    if is_moved:
        raise UnsupportedError(_MISPLACED, path=place)


def _moves(flat: FlatGroup) -> Iterator[tuple[int, int, int, int]]:
    """Yield each parameter whose files get elements of another one from ds_to_universal.

    With it come that other one, the first of these elements in it, and how many are compared.
    """
    stops = flat.starts + flat.numels
    for param, at in enumerate((np.cumsum(flat.numels) - flat.numels).tolist()):
        for taken in np.flatnonzero((flat.starts <= at) & (at < stops)).tolist():
            numel = min(int(flat.numels[param]), int(stops[taken]) - at, _MOST_NUMEL)
            if taken != param and numel:
                yield param, taken, at - int(flat.starts[taken]), numel


READER: Final = _UniversalReader()
