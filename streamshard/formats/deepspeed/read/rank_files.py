"""Finds and opens the files of a ZeRO checkpoint. Refuses sets with missing or foreign files."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from streamshard.errors import CorruptFileError, IncompleteError, raise_first
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.unsupported import refuse_files
from streamshard.formats.pickle.inert import Call, Global, Node, show_few
from streamshard.formats.pickle.node_checks import of_file, require_unrolled
from streamshard.formats.torch import torch_file
from streamshard.formats.torch.torch_file import TorchFile
from streamshard.formats.torch.torch_tensor import Storage
from streamshard.io.entries import identify, is_file, open_readable, paths_below
from streamshard.model import Note, NoteKind, RecordCrcs, SourceFile

SAVE_AGAIN: Final = "Load it with a later version at its own world size, and save it again"
"""What to do about a checkpoint that a very old DeepSpeed saved."""
_MOST_MISSING: Final = 1000
"""Most missing ranks that are listed one by one; more than that are listed as ranges."""
_TOGETHER: Final = 16
"""Files whose storages of one element are read side by side."""
_PLAIN: Final = {int, float, str, bytes, bool, Global}
_MOST_LEVELS: Final = 16
"""Levels of a file that are compared with those of the first rank's."""
_FIELDS: Final = attrgetter(*(field.name for field in fields(Call)))


@dataclass(frozen=True, slots=True)
class ModelPartFiles:
    """The shards that one data-parallel group of ranks saved."""

    mp_rank: int
    model_files: tuple[Path, ...]
    """One in stages 1 and 2, one per rank in stage 3."""
    optimizer_files: tuple[Path, ...]
    """One per rank, in order of rank; none at stage 0, where the model file holds everything."""


class _RankFiles:
    """Files of one `mp_rank`, by data-parallel rank."""

    def __init__(self) -> None:
        self.model: dict[int | None, Path] = {}
        self.optimizer: dict[int, Path] = {}


# `DeepSpeedEngine._save_moe_checkpoint` (0.19.8) returns early on ranks that are not the first of
# those with the same experts. These are ranks of other parts then, by
# `_create_expert_and_data_parallel`.
_NEVER_SAVED: Final = (
    ", and so are files of its experts. DeepSpeed saves neither where MoE layers train next to "
    "tensor parallelism without enable_expert_tensor_parallelism, if the expert parallel size is "
    "below the tensor parallel degree. No job can resume then"
)


class TagFiles:
    """The files of a tag directory, sorted by their names."""

    def __init__(self, tag_dir: Path, paths: Iterable[Path]) -> None:
        self.tag_dir = tag_dir
        self.model_parts: dict[int, _RankFiles] = {}
        self.prefixes: dict[str, Path] = {}
        """Prefix of optimizer files → one of these files."""
        self.parts: list[Path] = []
        """Weights of pipeline layers and of experts, which do not depend on the data-parallel size.
        """
        self.sidecars: list[Path] = []
        """Files that are not DeepSpeed's."""
        self.shards: set[Path] = set()
        """All files that are DeepSpeed's by their names."""
        self._doubles: list[IncompleteError] = []
        for path in paths:
            parsed = names.parse(path.name) if path.parent == tag_dir else None
            if parsed is None:
                self.sidecars.append(path)
                continue
            self.shards.add(path)
            if parsed.kind == "part":
                self.parts.append(path)
            else:
                self._sort(path, parsed)

    def _sort(self, path: Path, parsed: names.RankFile) -> None:
        model_part = self.model_parts.setdefault(parsed.mp_rank, _RankFiles())
        if parsed.kind == "model":
            model_part.model[parsed.dp_rank] = path
            return
        self.prefixes[parsed.prefix] = path
        if parsed.dp_rank is None:
            return
        first = model_part.optimizer.setdefault(parsed.dp_rank, path)
        if first != path:
            message = f"claims to be of one rank with {first}; move away the set that is older"
            self._doubles.append(IncompleteError(message, path=path))

    def model_part(self, mp_rank: int) -> _RankFiles:
        return self.model_parts.get(mp_rank, _RankFiles())

    def mixed(self) -> Iterator[IncompleteError]:
        """Find files of two runs."""
        yield from self._doubles
        if len(self.prefixes) > 1:
            first, *others = self.prefixes.values()
            message = f"of another run than {' and '.join(map(str, others))}"
            yield IncompleteError(f"{message}; move away the set that is older", path=first)

    def _lacks_experts(self, mp_rank: int) -> bool:
        """Tell whether other parts of the model have files of experts, and this one has none."""
        numbers = {names.part_of_expert_file(path.name) for path in self.parts} - {None}
        return bool(numbers) and mp_rank not in numbers

    def incomplete(
        self, mp_rank: int, ranks: int, of: str = "", *, is_bf16: bool = False
    ) -> Iterator[IncompleteError]:
        """Find the missing files of one part of the model, and those of another world size.

        `of`: words that follow the count of ranks in a message.
        `is_bf16`: whether the job trained in bf16, which counts where there is no optimizer file at
        all.
        """
        part = self.model_part(mp_rank)
        bf16 = "bf16_" in self.prefixes if self.prefixes else is_bf16

        def optimizer_of(rank: int) -> Path:
            return self.tag_dir / names.optimizer_file(rank, bf16=bf16, mp_rank=mp_rank)

        yield from missing_ranks(part.optimizer.keys(), ranks, optimizer_of, of)
        models = {rank: path for rank, path in part.model.items() if rank is not None}
        if None in part.model:
            for path in list(models.values())[:1]:
                message = f"of stage 3, {part.model[None]} of stage 1 or 2: two runs in one place"
                yield IncompleteError(f"{message}; move away the set that is older", path=path)
        elif not models:
            missing = self.tag_dir / names.model_file(None, mp_rank)
            hint = _NEVER_SAVED if self._lacks_experts(mp_rank) else ""
            yield IncompleteError(f"the model file is missing{hint}", path=missing)
        else:
            yield from self._incomplete_models(mp_rank, models, ranks, of, optimizer_of)

    def _incomplete_models(
        self,
        mp_rank: int,
        models: Mapping[int, Path],
        ranks: int,
        of: str,
        optimizer_of: Callable[[int], Path],
    ) -> Iterator[IncompleteError]:
        """Check that there is one model file for every rank."""

        def file_of(rank: int) -> Path:
            return self.tag_dir / names.model_file(rank, mp_rank)

        fit = {rank for rank, path in models.items() if rank < ranks and path == file_of(rank)}
        yield from missing_ranks(fit, ranks, file_of, of)
        for rank, path in models.items():
            if rank not in fit:
                message = "no optimizer file of this rank; left over from another world"
                message = f"{message} size? Move it away, or restore {optimizer_of(rank).name}"
                yield IncompleteError(message, path=path)


def missing_ranks(
    present: Set[int], ranks: int, file_of: Callable[[int], Path], of: str = ""
) -> Iterator[IncompleteError]:
    """Find the missing ranks. `ranks` is the expected count, which some file claims."""
    ends = [-1, *sorted(present), ranks]
    gaps = [range(before + 1, after) for before, after in pairwise(ends) if before + 1 < after]
    single = sum(gap.stop - gap.start for gap in gaps) <= _MOST_MISSING
    for gap in gaps:
        for rank in gap if single else gap[:1]:
            if single or gap.stop - rank == 1:
                who, what = f"rank {rank}{of} is missing", "it"
            else:
                who, what = f"ranks {rank} to {gap.stop - 1}{of} are missing", "them"
            message = f"{who}; copy {what} from the node that saved {what}"
            yield IncompleteError(f"{message}, or take an earlier tag", path=file_of(rank))


def find(tag_dir: Path) -> tuple[TagFiles, list[ModelPartFiles]]:
    """Sort the files of a tag directory by their names; those of each part of the model are whole.

    The parts are in order of `mp_rank`.
    """
    files = TagFiles(tag_dir, sorted(p for p in paths_below(tag_dir) if is_file(p)))
    raise_first(files.mixed())
    refuse_files(tag_dir, files.sidecars)
    if not files.prefixes:
        models = [path for part in files.model_parts.values() for path in part.model.values()]
        # Not at the top: most checkpoints have optimizer files.
        from streamshard.formats.detect import is_stage_0, without_shards

        if not models or not is_stage_0(models[0]):
            raise without_shards(tag_dir, models, files.parts)
    ranks = 1 + max(max(part.optimizer, default=-1) for part in files.model_parts.values())
    model_parts = []
    for mp_rank in range(max(files.model_parts) + 1):
        raise_first(files.incomplete(mp_rank, ranks, f" of at least {ranks}"))
        own = files.model_part(mp_rank)
        models = [own.model[rank] for rank in ([None] if None in own.model else range(ranks))]
        optimizers = tuple(own.optimizer[rank] for rank in range(ranks))
        model_parts.append(ModelPartFiles(mp_rank, tuple(models), optimizers))
    return files, model_parts


class SourceFiles:
    """Opens and numbers source files, so that every storage can refer to its file."""

    def __init__(self) -> None:
        self.files: list[SourceFile] = []
        self._notes: dict[Note, None] = {}

    @property
    def notes(self) -> tuple[Note, ...]:
        """Facts that the user should know about the files' containers."""
        return tuple(self._notes)

    def add(self, path: Path) -> int:
        """Number a file and record its current size and identity."""
        self.files.append(identify(path))
        return len(self.files) - 1

    def read(self, path: Path, number: int) -> TorchFile:
        """Open a numbered torch file. It must hold a dict."""
        found = read_dict(path, number)
        self.note(number, found)
        return found

    def note(self, number: int, found: TorchFile) -> None:
        """Note the checksums in a numbered file, and what the user should know about it."""
        path, unknown = self.files[number].path, found.unknown
        self.record(number, found.recorded, is_whole=not found.lacks_checksums)
        if unknown:
            text = f"Not read, as torch.save writes no such records: {show_few(unknown)}"
            self._notes[Note(f"{text} in {path.name}.", NoteKind.LEFT_OUT)] = None

    def record(self, number: int, recorded: RecordCrcs, *, is_whole: bool) -> None:
        """Note the checksums in a numbered file; `is_whole`: whether they are of all storages."""
        if not is_whole:
            self._notes[Note(f"{self.files[number].path}: {torch_file.LACKS_CHECKSUMS}")] = None
        self.files[number] = replace(self.files[number], recorded=recorded)

    def read_bytes(self, storage: Storage, offset: int, nbytes: int) -> bytes:
        known = storage.data
        if known is not None and storage.offset == offset and len(known) == nbytes:
            storage.require_intact(known)
            return known
        path = self.files[storage.file].path
        with open_readable(path) as file:
            data = file.read_at(offset, nbytes)
        if len(data) != nbytes:
            raise CorruptFileError(f"ends before byte {offset + nbytes}", path=path)
        if nbytes == storage.nbytes:
            storage.require_intact(data)
        return data


def read_optimizers(sources: SourceFiles, paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Open the optimizer files of all ranks, and read their storages of one element.

    What is equal to the first rank's is the first rank's object.
    """
    roots: list[dict[str, Any]] = []
    for start in range(0, len(paths), _TOGETHER):
        some = paths[start : start + _TOGETHER]
        files = [sources.read(path, sources.add(path)) for path in some]
        _read_scalars(some, files)
        for file in files:
            roots.append(_Sharing().of(file.root, roots[0]) if roots else file.root)
    return roots


class _Sharing:
    """Takes the first rank's object where another rank's is equal, so that memory holds it once.

    Only plain values and what is built of them are compared, types and signs too: 1 is not `True`,
    0.0 is not -0.0. Whatever a file nests, each object is compared once, and few levels deep.
    """

    def __init__(self) -> None:
        self._results: dict[int, Node] = {}
        """Identity of an object → what takes its place."""

    def of(self, node: Node, first: Node, level: int = 0) -> Node:
        """Return the first rank's object, or this one if they differ."""
        kind = type(node)
        if kind is not type(first) or node is first:
            return node
        if kind in _PLAIN:
            is_equal = str(node) == str(first) if kind is float else node == first
            return first if is_equal else node
        if id(node) not in self._results and level < _MOST_LEVELS:
            self._results[id(node)] = node  # for an object that holds itself
            self._results[id(node)] = first if self._is_equal(node, first, level + 1) else node
        return self._results.get(id(node), node)

    def _is_equal(self, node: Node, first: Node, level: int) -> bool:
        """Compare the parts of an object. A dict that differs takes those that are equal."""
        if isinstance(node, Call):
            node, first = _FIELDS(node), _FIELDS(first)
        if type(node) is dict and all(type(key) is str for key in node):
            keys, of_first = list(node), list(first)
            values = [self.of(value, first.get(key), level) for key, value in node.items()]
            node.clear()
            node.update(zip(of_first if keys == of_first else keys, values, strict=True))
            return keys == of_first and all(node[key] is first[key] for key in keys)
        if not isinstance(node, list | tuple) or len(node) != len(first):
            return False
        # All of them, also after one that differs: what they share among themselves stays shared.
        parts = [self.of(a, b, level) for a, b in zip(node, first, strict=True)]
        if type(node) is list:
            node[:] = parts
        return all(a is b for a, b in zip(parts, first, strict=True))


def _read_scalars(paths: Sequence[Path], files: Sequence[TorchFile]) -> None:
    """Read storages of one element, such as the optimizer's step, of some files side by side."""
    with ExitStack() as stack:
        scalars = []
        for path, file in zip(paths, files, strict=True):
            if wanted := [storage for storage in file.storages.values() if storage.numel == 1]:
                opened = stack.enter_context(open_readable(path))
                scalars += [(opened, storage) for storage in wanted]
        for opened, storage in scalars:
            opened.will_need(storage.offset, storage.nbytes)
        for opened, storage in scalars:
            # If the file has become shorter, an error is raised where the scalar is needed.
            storage.data = opened.read_at(storage.offset, storage.nbytes)


def read_dict(path: Path, number: int = -1) -> TorchFile:
    """Open a torch file that must hold a dict. Its storages refer to the file by the number."""
    return require_dict(torch_file.read(path, number), path)


def require_dict(archive: TorchFile, path: Path) -> TorchFile:
    """Require that a torch file holds a dict, in which the usual keys can be looked up."""
    root = archive.root
    if not isinstance(root, dict):
        raise CorruptFileError(f"holds a {type(root).__name__} where a dict belongs", path=path)
    with of_file(path):
        require_unrolled(root[key] for key in names.LOOKED_INTO if key in root)
    return archive


def require(mapping: Mapping[str, Node], key: str, path: Path) -> Node:
    """Look up a key that every file of this kind has."""
    if key not in mapping:
        message = f"no '{key}' in it, which every checkpoint of its kind has"
        raise CorruptFileError(message, path=path)
    return mapping[key]
