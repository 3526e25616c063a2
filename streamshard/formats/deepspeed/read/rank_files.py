"""Finds and opens the files of a ZeRO checkpoint. Refuses sets with missing or foreign files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from streamshard.errors import CorruptFileError, IncompleteError, UnsupportedError
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.unsupported import refuse_files
from streamshard.formats.detect import is_stage_0, without_shards
from streamshard.formats.pickle.inert import Node
from streamshard.formats.pickle.inert_dump import dump
from streamshard.formats.pickle.node_checks import of_file, require_unrolled
from streamshard.formats.torch import torch_file
from streamshard.formats.torch.torch_file import TorchFile
from streamshard.formats.torch.torch_tensor import Storage
from streamshard.formats.torch.tree_comparison import spell_few
from streamshard.io.entries import identify, is_file, open_readable, paths_below
from streamshard.model import SourceFile

_FREE_BYTES: Final = 1 << 24
"""Fingerprints of a file may serialize this many bytes, however much the entries share."""
_LIMIT_AGAIN: Final = 4
"""How often parts may be shared between entries, on average."""
SAVE_AGAIN: Final = "Load it with a later version at its own world size, and save it again"
"""What to do about a checkpoint that a very old DeepSpeed saved."""
UNREAD: Final = "Not read, as torch.save writes no such records:"
"""Beginning of the note about other records in a file."""
_LEGACY = (
    'Saved in torch\'s legacy format ("checkpoint_serialization": false), which keeps no '
    "checksums. What is written from it is in the zip format, which loads with either setting."
)


@dataclass(frozen=True, slots=True)
class FamilyFiles:
    """The shards that one data-parallel group of ranks saved."""

    mp_rank: int
    model_files: tuple[Path, ...]
    """One in stages 1 and 2, one per rank in stage 3."""
    optimizer_files: tuple[Path, ...]
    """One per rank, in order of rank; none at stage 0, where the model file holds everything."""


@dataclass(frozen=True, slots=True)
class ShardSet:
    """The files of one tag directory that belong together."""

    tag_dir: Path
    families: tuple[FamilyFiles, ...]
    """In order of `mp_rank`."""
    prefix: str
    model_parts: tuple[Path, ...]
    """Weights of pipeline layers and of experts, which do not depend on the data-parallel size."""
    others: tuple[Path, ...]
    """Files of the tag directory that are not DeepSpeed's."""


class _Found:
    """Files of one `mp_rank`, by data-parallel rank."""

    def __init__(self) -> None:
        self.model: dict[int | None, Path] = {}
        self.optimizer: dict[int, Path] = {}


def find(tag_dir: Path) -> ShardSet:
    """Sort the files of a tag directory by their names.

    Raises
    ------
    IncompleteError
        The file of a rank is missing, or the directory has files of two runs.
    UnsupportedError
        The files are not a ZeRO checkpoint, or not a complete one; the message says what they are.
    """
    families: dict[int, _Found] = {}
    prefixes: dict[str, Path] = {}
    parts: list[Path] = []
    others: list[Path] = []
    for path in sorted(p for p in paths_below(tag_dir) if is_file(p)):
        parsed = names.parse(path.name) if path.parent == tag_dir else None
        if parsed is None:
            others.append(path)
        elif parsed.kind == "part":
            parts.append(path)
        else:
            _sort(path, parsed, families.setdefault(parsed.mp_rank, _Found()))
            if parsed.kind == "optim":
                prefixes[parsed.prefix] = path
    if len(prefixes) > 1:
        both = " and ".join(str(path) for path in prefixes.values())
        raise IncompleteError(f"{both} are of different runs; move away the set that is older")
    refuse_files(tag_dir, others)
    if not prefixes:
        models = [path for found in families.values() for path in found.model.values()]
        if not models or not is_stage_0(models[0]):
            raise without_shards(tag_dir, models, parts)
    prefix = next(iter(prefixes), "")
    return ShardSet(
        tag_dir=tag_dir,
        families=_families(tag_dir, families, prefix),
        prefix=prefix,
        model_parts=tuple(parts),
        others=tuple(others),
    )


def _sort(path: Path, parsed: names.RankFile, found: _Found) -> None:
    if parsed.kind == "model":
        found.model[parsed.dp_rank] = path
    elif parsed.dp_rank is not None:
        if parsed.dp_rank in found.optimizer:
            message = f"{path} and {found.optimizer[parsed.dp_rank]} both claim to be of one rank"
            raise IncompleteError(f"{message}; move away the set that is older")
        found.optimizer[parsed.dp_rank] = path


def _families(
    tag_dir: Path, families: Mapping[int, _Found], prefix: str
) -> tuple[FamilyFiles, ...]:
    """Check that every family is complete, and that all have the same count of ranks."""
    bf16 = prefix == "bf16_"
    ranks = max(max(found.optimizer, default=-1) for found in families.values()) + 1
    whole = []
    for mp_rank in range(max(families) + 1):
        found = families.get(mp_rank, _Found())
        for rank in range(ranks):
            if rank not in found.optimizer:
                missing = tag_dir / names.optimizer_file(rank, bf16=bf16, mp_rank=mp_rank)
                message = (
                    f"{missing}: rank {rank} of at least {ranks} is missing; "
                    "copy it from the node that saved it, or take an earlier tag"
                )
                raise IncompleteError(message)
        model = _model_files(tag_dir, found.model, ranks, mp_rank)
        whole.append(FamilyFiles(mp_rank, model, tuple(found.optimizer[r] for r in range(ranks))))
    return tuple(whole)


def _model_files(
    tag_dir: Path, model: Mapping[int | None, Path], world_size: int, mp_rank: int
) -> tuple[Path, ...]:
    """Return the shared model file, or check that there is one for every rank."""
    if None in model:
        if len(model) > 1:
            stale = next(path for rank, path in model.items() if rank is not None)
            message = f"{stale} is of stage 3, {model[None]} of stage 1 or 2: two runs in one place"
            raise IncompleteError(f"{message}; move away the set that is older")
        return (model[None],)
    wanted = {tag_dir / names.model_file(rank, mp_rank): rank for rank in range(world_size)}
    if not model:
        missing = tag_dir / names.model_file(None, mp_rank)
        raise IncompleteError(f"{missing}: the model file is missing")
    for path, rank in wanted.items():
        if model.get(rank) != path:
            message = f"{path}: missing; {world_size} ranks saved optimizer files"
            raise IncompleteError(f"{message}; copy it from the node that saved it")
    for path in model.values():
        if path not in wanted:
            message = f"{path}: no optimizer file of this rank; left over from another world size?"
            raise IncompleteError(f"{message} Move it away, or restore the rank's optimizer file")
    return tuple(wanted)


class SourceFiles:
    """Opens and numbers source files, so that every storage can refer to its file."""

    def __init__(self) -> None:
        self.files: list[SourceFile] = []
        self._notes: dict[str, None] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Facts that the user should know about the files' containers."""
        return tuple(self._notes)

    def add(self, path: Path) -> int:
        """Number a file and record its current size and identity."""
        self.files.append(identify(path))
        return len(self.files) - 1

    def read_dict(self, path: Path) -> dict[str, Any]:
        """Number and open a torch file that holds a dict."""
        root: dict[str, Any] = self.read(path, self.add(path)).root
        return root

    def read(self, path: Path, number: int) -> TorchFile:
        """Open a numbered torch file. It must hold a dict."""
        found = torch_file.read(path, number)
        root = found.root
        if found.is_legacy:
            self._notes[_LEGACY] = None
        if found.unknown:
            self._notes[f"{UNREAD} {spell_few(found.unknown)} in {path.name}."] = None
        if not isinstance(root, dict):
            raise CorruptFileError(f"{path}: holds a {type(root).__name__} where a dict belongs")
        with of_file(path):
            require_unrolled(root[key] for key in names.LOOKED_INTO if key in root)
        return found

    def path_of(self, storage: Storage) -> Path:
        """Return the file that a storage was read from."""
        return self.files[storage.file].path

    def read_bytes(self, storage: Storage, offset: int, nbytes: int) -> bytes:
        """Read a small tensor's bytes."""
        with open_readable(self.path_of(storage)) as file:
            data = file.read_at(offset, nbytes)
        if len(data) != nbytes:
            message = f"{self.path_of(storage)}: ends before byte {offset + nbytes}"
            raise CorruptFileError(message)
        return data


def require(mapping: Mapping[str, Node], key: str, path: Path) -> Node:
    """Look up a key that every file of this kind has."""
    if key not in mapping:
        message = f"{path}: no '{key}' in it, which every checkpoint of its kind has"
        raise CorruptFileError(message)
    return mapping[key]


def fingerprint(node: Node) -> bytes:
    """Return a digest that is equal for nodes of equal value, tensors by size and CRC-32."""
    return sha256(pickled(node)).digest()


def fingerprints(
    nodes: Mapping[Node, Node],
    path: Path,
    checksum: Callable[[Storage], int] = torch_file.checksum,
) -> dict[Node, bytes]:
    """Return the fingerprint of every entry of a file.

    Parameters
    ----------
    checksum
        Returns the CRC-32 of a storage; by default, in the file that the storage refers to.

    Raises
    ------
    UnsupportedError
        The entries share so much that they take far more bytes one by one than together.
    """
    found, spent, together = {}, 0, 0
    for key, node in nodes.items():
        serialized = pickled(node, checksum)
        found[key] = sha256(serialized).digest()
        spent += len(serialized)
        if spent > _FREE_BYTES:
            together = together or len(pickled(list(nodes.values()), checksum))
            if spent > _FREE_BYTES + _LIMIT_AGAIN * together:
                message = f"{path}: holds entries that share their parts without end"
                raise UnsupportedError(message)
    return found


def pickled(node: Node, checksum: Callable[[Storage], int] = torch_file.checksum) -> bytes:
    """Serialize a node as a pickle that is equal for nodes of equal value, as in `fingerprint`."""

    def persistent_id(part: Node) -> Node | None:
        if not isinstance(part, Storage):
            return None
        return part.dtype, part.numel, checksum(part)

    return dump(node, persistent_id)
